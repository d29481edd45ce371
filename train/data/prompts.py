"""Prompts for training: prompts read from files, and user turns written by the target itself.

There are two stages, because turns written by several processes finish in any order: first every turn is written to
disk, then all prompts are filtered together (`PromptFilter`) in the order of the plan, and the rest are answered.
So the set of answered prompts depends on the recipe alone, however often the run was interrupted.

Prompts that overlap evaluation prompts, near-duplicates and unusable prompts are dropped. That depends on the texts and
their order alone: no state is kept between runs, so an exclusion added later also applies to prompts that were answered
before.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal, TextIO

from pydantic import model_validator

from d2sd.errors import D2SDError
from d2sd.train.data import jsonl
from d2sd.train_recipe import Data, Documents, SelfWritten

KIND = "turns"


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt: a complete user turn to answer, or the opening of one that the target completes first."""

    id: str
    text: str
    kind: SelfWritten | None = None  # how to complete `text`; None if it is a complete turn


class Turn(jsonl.Named):
    """A line on disk: a user turn that the target wrote, its opening included, or why it was dropped."""

    text: str | None = None
    dropped: str | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Turn:
        if (self.text is None) == (self.dropped is None):
            raise ValueError("expected either text or dropped")
        return self


def plan_prompts(files: Iterable[tuple[Sequence[tuple[str, str]], int | None]], data: Data, seed: int = 0) -> list[Job]:
    """All jobs in a seeded random order, so that any prefix of them is a fair sample.

    `files` holds for each prompt file its (id, user turn) pairs and how many of them to use. The order depends on the
    seed and the ids alone: raising a count or adding a file adds jobs and never replaces existing ones.
    `self_written.count` is the number of turns tried, before filtering, so the plan is known before the target has
    run. Raises D2SDError if an id is not unique.
    """
    jobs = []
    for prompts, count in files:
        chosen = sorted(prompts, key=lambda prompt: order(prompt[0], seed))[:count]
        jobs += [Job(name, text) for name, text in chosen]
    for kind in data.self_written:
        names = [f"self/{kind.name}/{i}" for i in range(kind.count)]
        jobs += [Job(name, kind.openings[order(name, seed) % len(kind.openings)], kind) for name in names]
    if repeated := [name for name, times in Counter(job.id for job in jobs).items() if times > 1]:
        raise D2SDError("two prompts have the same id", where="data.prompts", found=repeated[0])
    return sorted(jobs, key=lambda job: order(job.id, seed))


def order(name: str, seed: int = 0) -> int:
    """A random number of 64 bits that the name and the seed determine."""
    return int.from_bytes(blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "big")


def take_turns(jobs: Sequence[Job], path: Path) -> tuple[list[Job], dict[str, str]]:
    """(jobs with every opening replaced by its turn in `path`, id -> why the turn was dropped).

    `path` is a file or the folder with the files of all processes. An opening without a turn yet stays an opening.
    Raises D2SDError for a damaged line, and for a turn that does not begin with its opening (from another recipe).
    """
    turns = {turn.id: (where, turn) for where, turn in jsonl.read_rows(path, KIND, Turn)}
    remaining, dropped = [], {}
    for job in jobs:
        if job.kind is None or job.id not in turns:
            remaining.append(job)
            continue
        where, turn = turns[job.id]
        if turn.text is None:
            dropped[job.id] = turn.dropped or ""
        elif turn.text.startswith(job.text):
            remaining.append(Job(job.id, turn.text))
        else:
            raise D2SDError(
                "a self-written turn begins with another opening",
                where=where,
                found=turn.text[:40],
                expected=job.text,
                fix="restore data.self_written.openings, or train into another --work folder",
            )
    return remaining, dropped


def append_turn(out: TextIO, turn: Turn) -> None:
    """Append and flush one line."""
    jsonl.append_row(out, turn.model_dump(exclude_none=True))


#: A document's id, and its texts by the names of their fields.
Document = tuple[str, Mapping[str, str]]


def document_turns(kinds: Sequence[Documents], files: Mapping[str, Sequence[Document]]) -> list[tuple[str, str]]:
    """(id, user turn) of every turn of all kinds; `files` holds the documents of each kind's `path`.

    The kinds of one file take its documents in a random order that their ids determine, each document once: two turns
    with the same document would be near-duplicates. Raises D2SDError if a file has too few documents for its kinds.
    """
    left = {path: sorted(documents, key=lambda document: order(document[0])) for path, documents in files.items()}
    turns: list[tuple[str, str]] = []
    for kind in kinds:
        turns += _turns(kind, left)
    return turns


def _turns(kind: Documents, left: dict[str, list[Document]]) -> list[tuple[str, str]]:
    """The turns of one kind, whose documents are removed from those `left` of its file."""
    documents, shown = left[kind.path], kind.passage_fields
    leads = [document for document in documents if kind.fields | shown <= document[1].keys()][: kind.count]
    leading, beside = {name for name, _ in leads}, kind.passages - 1
    others = [document for document in documents if document[0] not in leading and shown <= document[1].keys()]
    others.sort(key=lambda document: len(document[1]))  # those with questions are kept for kinds that ask them
    if len(leads) < kind.count or len(others) < kind.count * beside:
        more = f", and {kind.count * beside:,} others with {_listed(shown)}" if beside else ""
        raise D2SDError(
            "too few documents",
            where=f"data.documents: {kind.name}",
            found=f"{len(leads):,} left with {_listed(kind.fields | shown)}, and {len(others):,} others",
            expected=f"{kind.count:,}{more}",
            fix=f"lower the counts of the kinds of {kind.path}",
        )
    used = leading | {name for name, _ in others[: kind.count * beside]}
    left[kind.path] = [document for document in documents if document[0] not in used]
    return [_turn(kind, lead, others[i * beside : (i + 1) * beside]) for i, lead in enumerate(leads)]


def _turn(kind: Documents, lead: Document, others: Sequence[Document]) -> tuple[str, str]:
    """(id, text) of a turn; the leading document is at a random place among the others."""
    name, fields = f"{kind.name}/{lead[0]}", lead[1]
    drawn = order(name)
    template = kind.templates[drawn % len(kind.templates)]
    if kind.passages > 1:
        place = drawn // len(kind.templates) % kind.passages
        numbered = enumerate([*others[:place], lead, *others[place:]], 1)
        shown = [kind.passage.format(**{**texts, "number": number}) for number, (_, texts) in numbered]
        fields = {**fields, "passages": "\n\n".join(shown)}
    return name, template.format(**fields)


def _listed(fields: set[str]) -> str:
    return ", ".join(f"{{{field}}}" for field in sorted(fields))


Reason = Literal[
    "shares words with an excluded prompt",
    "nearly the same as another",
    "too short",
    "repeats itself",
    "holds chat markers",
]

#: Length in words of the n-grams that a prompt may not share with an excluded one. Measured with the evaluation sets
#: on GSM8K's 7,473 training prompts, MBPP's 846 and 1,221 turns of SmolLM2-135M: 8 words drop 17, 695 and 1, most for
#: the frame common to all of MBPP ("... your code should pass these tests assert"), and 10 drop 3, 288 and 1. 13 drop
#: 0, 32 and 0: 19 of them are an evaluation prompt with a few words changed, most of the others share its test data.
RUN = 13
#: Minimum number of words with a letter; the shortest of 9,715 real prompts has 4.
_LEAST = 3
#: Words per run (n-gram) when a prompt is compared with others or with itself.
_SHINGLE = 3
#: Jaccard similarity of runs, in percent, from which two prompts are near-duplicates. At 70, 6 of those 9,715 are
#: dropped: a problem with another name or number, "cheap items" for "expensive items". At 60: 18, at 50: 50.
_ALIKE = 70
#: Minimum percentage of distinct runs in a prompt; lists of numbers in MBPP's tests go down to 48.
_DIFFERENT = 40

#: Chinese and Japanese put no spaces between words, so every character counts as a word.
_CJK = "\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(f"[{_CJK}]|[^\\W_{_CJK}]+")

Run = tuple[str, ...]


def words(text: str) -> list[str]:
    """Lower-case runs of letters and digits; ignores spacing, punctuation, letter case and the kind of quotes."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def runs(words: Sequence[str], length: int) -> Iterator[Run]:
    """Every run of `length` consecutive words; a shorter text is one run of all its words."""
    size = min(length, len(words))
    return zip(*(words[start : len(words) - size + 1 + start] for start in range(size)), strict=True)


class PromptFilter:
    """Filters prompts by overlap with evaluation prompts, by similarity to each other, and by their own text."""

    def __init__(self, excluded: Iterable[str], markers: Collection[str] = ()) -> None:
        """`excluded` are all prompts of evaluations; `markers` the strings of the tokenizer's special tokens."""
        texts = [text for text in map(words, excluded) if len(text) >= _LEAST]  # "Why?" alone is in every other
        self._markers = [marker for marker in markers if marker]
        self._runs: dict[int, set[Run]] = defaultdict(set)
        for text in texts:
            self._runs[min(RUN, len(text))].update(runs(text, RUN))
        self._whole = [f" {' '.join(text)} " for text in texts]

    def judge(self, jobs: Sequence[Job]) -> tuple[list[Job], dict[str, Reason]]:
        """(the jobs to answer, id -> why not, for the others), both in the order of `jobs`.

        Takes all jobs at once, after every turn is written: the first of several near-duplicates is kept, and which one
        is first must not depend on when turns were written. No two kept jobs have a similarity of `_ALIKE` percent.
        """
        assert all(job.kind is None for job in jobs), "a turn is judged when it is written"
        reasons = {job.id: reason for job in jobs if (reason := self.fault(job.text))}
        good = [job for job in jobs if job.id not in reasons]
        alike = near_duplicates([job.text for job in good])
        reasons |= {job.id: "nearly the same as another" for job, same in zip(good, alike, strict=True) if same}
        return [job for job in jobs if job.id not in reasons], {j.id: reasons[j.id] for j in jobs if j.id in reasons}

    def fault(self, text: str) -> Reason | None:
        """Why this text is dropped regardless of the others; None if it is kept."""
        if any(marker in text for marker in self._markers):  # tokenizers would encode it as the special token
            return "holds chat markers"
        text_words = words(text)
        if sum(any(map(str.isalpha, word)) for word in text_words) < _LEAST:
            return "too short"
        # RUN consecutive words of an excluded prompt; for shorter texts, all words
        spaced, size = f" {' '.join(text_words)} ", len(text_words)
        shared = any(not known.isdisjoint(runs(text_words, n)) for n, known in self._runs.items() if size >= n)
        if shared or (size < RUN and any(spaced in text for text in self._whole)):
            return "shares words with an excluded prompt"
        parts = list(runs(text_words, _SHINGLE))
        if 100 * len(set(parts)) < _DIFFERENT * len(parts):
            return "repeats itself"
        return None


def near_duplicates(texts: Sequence[str]) -> list[bool]:
    """Whether the text has a Jaccard similarity of at least `_ALIKE` percent to an earlier one that was kept.

    Exact, without comparing all pairs ("prefix filtering"): two sets that similar share one of the k rarest elements
    of each, where k is one more than the elements they may miss. Only texts with one of those in common are compared.
    """
    sets = [frozenset(runs(words(text), _SHINGLE)) for text in texts]
    times = Counter(run for parts in sets for run in parts)
    known: dict[Run, list[frozenset[Run]]] = defaultdict(list)
    verdicts = []
    for parts in sets:
        rare = sorted(parts, key=lambda run: (times[run], run))[: len(parts) - -(-_ALIKE * len(parts) // 100) + 1]
        others = {id(other): other for run in rare for other in known[run]}.values()
        verdicts.append(any(100 * len(parts & other) >= _ALIKE * len(parts | other) for other in others))
        if not verdicts[-1]:
            for run in rare:
                known[run].append(parts)
    return verdicts
