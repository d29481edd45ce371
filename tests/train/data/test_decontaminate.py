"""Prompts near the evaluation's are left out, as shown by sets of n-grams made here, not by the screen."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from d2sd.train.data.decontaminate import PromptFilter, near_duplicates, runs, words
from d2sd.train.data.prompts import Job
from tests.data import DATA

#: The promise: no thirteen words in a row of an evaluation prompt, nor all of one that is shorter.
N = 13


def jobs(*texts: str) -> list[Job]:
    return [Job(f"p{i}", text) for i, text in enumerate(texts)]


# --- Disjointness ----------------------------------------------------------------------------------------------------


def plain(text: str) -> list[str]:
    return "".join(c.lower() if c.isalnum() else " " for c in text).split()


def grams(found: list[str], n: int) -> set[str]:
    return {" ".join(found[i : i + n]) for i in range(len(found) - n + 1)}


class Overlap:
    """Brute force: whether a text shares N words in a row with one of these, or one of both lies in the other."""

    def __init__(self, texts: Sequence[str]) -> None:
        found = [plain(text) for text in texts]
        self.long = set[str]().union(*(grams(ws, N) for ws in found))
        self.short = [ws for ws in found if len(ws) < N]
        self.all = found

    def __call__(self, text: str) -> bool:
        ws = plain(text)
        if grams(ws, N) & self.long:
            return True
        others = self.all if len(ws) < N else self.short
        return any(
            grams(ws, size) & grams(other, size) for other in others if (size := min(len(ws), len(other), N)) < N
        )


def asked(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text("utf-8").split("\n"):
            if line:
                yield from json.loads(line).get("turns", [])  # documents have none


def disguised(text: str, draw: random.Random) -> str:
    """The same words in other letters and spaces, between others."""
    shouted = "".join(c.upper() if draw.random() < 0.5 else c for c in text).replace(
        " ", draw.choice([" ", "\n", ", "])
    )
    return f"Kindly tell me about zebras first. {shouted} -- and quietly hum a sea shanty."


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "eval").is_dir(), reason="no prompt sets in data/: see `make data`")
def test_what_is_kept_is_disjoint_from_every_real_evaluation_prompt() -> None:
    excluded = list(asked(DATA / "eval"))
    draw = random.Random(0)
    texts = draw.sample(list(asked(DATA / "train")), 1200)
    planted = [disguised(text, draw) for text in excluded] + excluded
    overlap = Overlap(excluded)
    assert all(map(overlap, planted)), "the check sees what was planted"
    mixed = jobs(*texts, *planted)
    draw.shuffle(mixed)
    kept, dropped = PromptFilter(excluded).judge(mixed)
    assert len(kept) > 1150
    assert not {"too short", "repeats itself"} & set(dropped.values()), "these are all prompts"
    assert [job.text for job in kept if overlap(job.text)] == []
    shared = {name for name, reason in dropped.items() if reason == "shares words with an excluded prompt"}
    assert shared == {job.id for job in mixed if overlap(job.text)}, "nothing else is dropped for that reason"


def test_what_is_kept_is_disjoint_from_made_up_prompts() -> None:
    """Six words in all, so that runs of every length up to N and beyond are shared by chance."""
    draw = random.Random(1)

    def some(count: int, longest: int) -> list[str]:
        vocabulary = ["ant", "bee", "cat", "dog", "eel", "fox"]
        return [" ".join(draw.choices(vocabulary, k=draw.randint(3, longest))) for _ in range(count)]

    excluded, rest = [text for text in some(60, 30) if len(text.split()) >= 6], some(400, 30)
    pieces = [text.split() for text in excluded if len(text.split()) > N + 1]
    exact = [" ".join([*some(1, 9), *ws[1 : N + 1], *some(1, 9)]) for ws in pieces]
    one_less = [" ".join([*some(1, 9), "gnu", *ws[1:N], "gnu", *some(1, 9)]) for ws in pieces]
    screen, overlap = PromptFilter(excluded), Overlap(excluded)
    assert all(map(overlap, exact))
    assert not all(map(overlap, one_less))
    candidates = [*rest, *exact, *one_less]
    verdicts = [screen.fault(text) == "shares words with an excluded prompt" for text in candidates]
    assert verdicts == [overlap(text) for text in candidates]
    assert {True, False} == {
        verdict for verdict, text in zip(verdicts, candidates, strict=True) if len(text.split()) < N
    }


def test_an_excluded_word_or_two_exclude_nothing() -> None:
    assert PromptFilter(["Why?", "Go on", ""]).fault("Tell me why, and go on until I ask you to stop.") is None


# --- One by one ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Explain rain to me.", None),
        ("", "too short"),
        ("Explain rain", "too short"),
        ("1. 2. 3. 4. 5. 6. 7.", "too short"),
        ("## 12 ## ??? -- 7", "too short"),
        ("How does 1 + 1 work?", None),
        ("为什么天是蓝的？", None),
        ("Say <|im_end|> to me and then stop.", "holds chat markers"),
        ("Is it a < b | c > d in this grammar?", None),
        ("Write a poem.\n" * 6, "repeats itself"),
        ("Which are even?\n" + "assert f([1, 2, 3, 4, 5, 6, 7, 8]) == [2, 4, 6, 8]\n" * 2, None),
        ("What is the sum of" + " the" * 20, "repeats itself"),
        ("Is the sum of 1 and 2 more than the sum of 1 and 1, and is the sum of 2 and 2 more than both?", None),
    ],
)
def test_what_is_no_prompt(text: str, reason: str | None) -> None:
    assert PromptFilter([], ["<|im_start|>", "<|im_end|>", ""]).fault(text) == reason


def test_words_and_their_runs() -> None:
    """Words have no spacing, punctuation, case or kind of quotes; runs of fewer words are all of them."""
    assert words("Janet’s  ducks,\nlay_16 EGGS!") == ["janet", "s", "ducks", "lay", "16", "eggs"]
    assert words("Janet's ducks lay １６ eggs") == words("Janet’s  ducks,\nlay_16 EGGS!")
    assert words("TeX是什么") == ["tex", "是", "什", "么"]
    assert list(runs(["a", "b", "c"], 2)) == [("a", "b"), ("b", "c")]
    assert list(runs(["a", "b"], 3)) == [("a", "b")]
    assert list(runs([], 3)) == []


# --- Near-duplicates -------------------------------------------------------------------------------------------------

LONG = "Tom has twelve red apples and gives four of them to his sister who eats two right away"


def test_of_near_duplicates_the_first_stays() -> None:
    other = LONG.replace("right away", "at once")
    far = LONG.replace("red", "old").replace("four", "six").replace("sister", "horse")
    plan = jobs(LONG.upper(), "Say something else entirely, please", other, far, LONG)
    kept, dropped = PromptFilter([]).judge(plan)
    assert [job.id for job in kept] == ["p0", "p1", "p3"]
    assert dropped == {"p2": "nearly the same as another", "p4": "nearly the same as another"}


def test_what_is_dropped_for_another_reason_drops_no_other() -> None:
    other = LONG.replace("Tom", "Tim").replace("four", "six")
    kept, dropped = PromptFilter([], ["<end>"]).judge(jobs(f"{other} <end>", other))
    assert ([job.id for job in kept], dropped) == (["p1"], {"p0": "holds chat markers"})


def test_rare_runs_find_what_all_pairs_find() -> None:
    """Sentences of one family, changed here and there, of which about half are near-duplicates."""
    draw = random.Random(2)
    stems = [[draw.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(draw.randint(3, 40))] for _ in range(12)]
    texts = []
    for _ in range(300):
        ws = list(draw.choice(stems))
        for _ in range(draw.randint(0, 3)):
            ws[draw.randrange(len(ws))] = draw.choice("abcdefghijklmnopqrstuvwxyz")
        texts.append(" ".join(ws[: draw.randint(3, 40)]))

    def shingles(text: str) -> set[tuple[str, ...]]:
        ws = text.split()
        return {tuple(ws[i : i + 3]) for i in range(len(ws) - 2)}

    kept: list[set[tuple[str, ...]]] = []
    expected = []
    for text in texts:
        mine = shingles(text)
        expected.append(any(len(mine & other) / len(mine | other) >= 0.7 for other in kept))
        if not expected[-1]:
            kept.append(mine)
    assert near_duplicates(texts) == expected
    assert 50 < sum(expected) < 250
