"""Prompt filtering: drops prompts that overlap evaluation prompts, near-duplicates, and unusable prompts.

The result depends on the texts and their order alone. No state is kept between runs, so an exclusion added later also
applies to prompts that were answered before.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal

from d2sd.train.data.prompts import Job

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
        if self._excluded(text_words):
            return "shares words with an excluded prompt"
        parts = list(runs(text_words, _SHINGLE))
        if 100 * len(set(parts)) < _DIFFERENT * len(parts):
            return "repeats itself"
        return None

    def _excluded(self, words: Sequence[str]) -> bool:
        """Whether it shares RUN consecutive words with an excluded prompt; for shorter texts, all words."""
        if len(words) < RUN and any(f" {' '.join(words)} " in text for text in self._whole):
            return True
        return any(
            not known.isdisjoint(runs(words, length)) for length, known in self._runs.items() if len(words) >= length
        )


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
