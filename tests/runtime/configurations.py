"""Features of engines, values that go together, and a sample in which every pair of values meets.

A pair is a value of one feature beside a value of another. Most faults of software that is configured need no more than
one pair (Kuhn, Wallace and Gallo, 2004), and all pairs of billions of engines are in some hundred.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from itertools import combinations, product
from typing import Any

from tests.runtime.helpers import BLOCK, WINDOWS
from tests.tiny import CASES, FAMILY_BODIES, FLEX_CASES, HEADS, HYBRIDS

SLOTS = BLOCK - 1
_SHIFTED = {"sample_from_anchor": True}
#: Blocks of the first and the second drafter where a step commits up to BLOCK tokens.
BLOCKS: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "equal": ({"block_size": BLOCK}, {"block_size": BLOCK}),
    "both shifted": ({"block_size": SLOTS} | _SHIFTED, {"block_size": SLOTS} | _SHIFTED),
    "first shifted": ({"block_size": SLOTS} | _SHIFTED, {"block_size": BLOCK}),
    "second shifted": ({"block_size": BLOCK}, {"block_size": SLOTS} | _SHIFTED),
    "cut": ({"block_size": 9}, {"block_size": 7}),
    "cut and shifted": ({"block_size": 16} | _SHIFTED, {"block_size": BLOCK} | _SHIFTED),
    "first smaller": ({"block_size": 3}, {"block_size": BLOCK}),
    "second smaller": ({"block_size": BLOCK}, {"block_size": 3}),
    "second smaller and shifted": ({"block_size": 9}, {"block_size": 2} | _SHIFTED),
    "one draft": ({"block_size": 1} | _SHIFTED, {"block_size": BLOCK}),
}
#: The first drafter is an EAGLE-3 head.
EAGLE = "eagle3"
#: FlexDraft drafts in these.
DENSE = ("llama", "qwen2", "qwen3")
#: `gemma4_unified_text` computes as `gemma4_text`.
FAMILIES = tuple(name for name in FAMILY_BODIES if name != "gemma4_unified_text")
#: Their rows are found on the host, or their states: no graph repeats what is recorded.
ON_HOST = tuple(name for name, body in FAMILY_BODIES.items() if "experts" in body or name in HYBRIDS)

#: A value that stands here several times is as much likelier where no pair is missing.
FEATURES: dict[str, tuple[str, ...]] = {
    "policy": (*CASES, "auto"),
    "family": FAMILIES,
    "head": ("none", *HEADS, EAGLE),  # of the first drafter, or what it is; the second has any
    "blocks": tuple(BLOCKS),
    "windows": tuple(WINDOWS),  # of layers; families with their own keep them where the target has none here
    "rows": ("all", "causal", "sinks"),  # what those of the drafters see
    "ids": ("all", "some"),  # that drafters may say
    "drafters": ("both", "first"),
    "drafts": ("right", "right", "right", "random", "nan"),
    "turns": ("never", "policies"),  # whether policies take turns
    "copies": ("none", "copies"),
    "depth": ("block", "deeper", "deepest"),
    "switch": ("on", "mixed"),  # mixed: some requests speculate never, or by the policy alone
    "grammar": ("none", "thirds", "guided"),  # of some requests
    "sampling": ("greedy", "sampled", "parameters"),
    "room": ("alone", "batch", "tight"),
    "prefixes": ("computed", "cached"),
    "context": ("in time", "late"),  # whether drafters that do not run are fed before they run again
    "steps": ("eager", "cut", "late", "recorded"),  # late: graphs that run their function again
    "weights": ("whole", "whole", "whole", "whole", "broken"),
    "type": ("fp32", "bf16", "fp16"),
    "kernels": ("compiled", "of other heads", "none"),
    "calibration": ("none", "random"),
    "ranks": ("one", "two"),
}
PLACES = {name: place for place, name in enumerate(FEATURES)}
#: Values that do not go together.
APART: tuple[tuple[str, Iterable[str], str, Iterable[str]], ...] = (
    ("policy", FLEX_CASES, "family", set(FAMILIES) - set(DENSE)),
    ("policy", FLEX_CASES, "head", (*HEADS, EAGLE)),
    ("policy", ("d2sd",), "head", (EAGLE,)),
    ("head", (EAGLE,), "rows", ("causal", "sinks")),
    ("head", (EAGLE,), "drafters", ("both",)),
    ("policy", FLEX_CASES, "blocks", set(BLOCKS) - {"equal"}),
    ("policy", FLEX_CASES, "rows", ("causal", "sinks")),
    ("policy", ("d2sd",), "drafters", ("first",)),
    ("family", HYBRIDS, "windows", (name for name, (target, *_) in WINDOWS.items() if target)),
    # a graph repeats operators alone: neither the library's nor those that wait for numbers
    ("steps", ("recorded",), "kernels", ("compiled", "of other heads")),
    ("steps", ("recorded",), "family", ON_HOST),
    ("steps", ("recorded",), "type", ("bf16", "fp16")),
    ("type", ("bf16", "fp16"), "kernels", ("of other heads", "none")),  # whose rows depend on their neighbours
    # drafters on other ranks say what these models say, in fp32; nothing of hybrids and Gemma 4 is divided
    ("ranks", ("two",), "policy", FLEX_CASES),
    ("ranks", ("two",), "family", (*HYBRIDS, "gemma4_text")),
    ("ranks", ("two",), "drafts", ("right", "nan")),
    ("ranks", ("two",), "weights", ("broken",)),
    ("ranks", ("two",), "steps", ("cut", "recorded")),
    ("ranks", ("two",), "type", ("bf16", "fp16")),
    ("ranks", ("two",), "calibration", ("random",)),
    ("ranks", ("two",), "context", ("late",)),
)
#: A feature, its value, another and its value, in the order of FEATURES.
Pair = tuple[str, str, str, str]


@dataclass(frozen=True)
class Configuration:
    """One value of each feature."""

    policy: str
    family: str
    head: str
    blocks: str
    windows: str
    rows: str
    ids: str
    drafters: str
    drafts: str
    turns: str
    copies: str
    depth: str
    switch: str
    grammar: str
    sampling: str
    room: str
    prefixes: str
    context: str
    steps: str
    weights: str
    type: str
    kernels: str
    calibration: str
    ranks: str

    def __str__(self) -> str:
        return ", ".join(asdict(self).values())

    @property
    def pairs(self) -> set[Pair]:
        return {(one, a, other, b) for (one, a), (other, b) in combinations(asdict(self).items(), 2)}


@cache
def apart() -> frozenset[Pair]:
    """All pairs that do not go together."""
    return frozenset(_pair(one, a, other, b) for one, mine, other, its in APART for a, b in product(mine, its))


def all_pairs() -> set[Pair]:
    """All pairs that go together."""
    pairs = combinations(FEATURES.items(), 2)
    return {(one, a, other, b) for (one, mine), (other, its) in pairs for a, b in product(mine, its)} - apart()


def drawn(dice: random.Random, given: Mapping[str, str], missing: set[Pair] | None = None) -> Configuration | None:
    """A random configuration with the given values; of what goes with them, that which is in most `missing` pairs."""
    chosen, order = dict(given), [name for name in FEATURES if name not in given]
    dice.shuffle(order)
    for name in order:
        gains = list[tuple[str, int]]()
        for value in FEATURES[name]:
            pairs = {_pair(name, value, other, its) for other, its in chosen.items()}
            if pairs.isdisjoint(apart()):
                gains.append((value, len(pairs & missing) if missing else 0))
        if not gains:
            return None
        most = max(gain for _, gain in gains)
        chosen[name] = dice.choice([value for value, gain in gains if gain == most])
    return Configuration(**chosen)


def _pair(one: str, a: str, other: str, b: str) -> Pair:
    return (one, a, other, b) if PLACES[one] < PLACES[other] else (other, b, one, a)


def any_of(dice: random.Random, **given: str) -> Configuration:
    """A random configuration with these values."""
    while (found := drawn(dice, given)) is None:
        pass
    return found


@cache
def sample() -> tuple[Configuration, ...]:
    """Configurations in which every pair is at least once: each holds a missing pair, and of ten the most others."""
    dice, missing, found = random.Random(0), all_pairs(), list[Configuration]()
    while missing:
        one, a, other, b = min(missing)
        made = [drawn(dice, {one: a, other: b}, missing) for _ in range(10)]
        best = max((each for each in made if each), key=lambda each: len(each.pairs & missing))
        found.append(best)
        missing -= best.pairs
    return tuple(found)
