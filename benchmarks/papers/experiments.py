"""The experiments of the papers that need no training, and the figures that they report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from benchmarks.papers.arms import Chain, Restarts, Samples
from benchmarks.papers.measure import Player, Regime
from d2sd.policies import DrafterRole

FIRST = DrafterRole.FIRST

#: Restarts that D²SD's tables sweep, and thresholds of a verification length; FlexDraft's release has 0.01.
COUNTS = (1, 2, 3, 4, 5, 7)
THRESHOLDS = (0.003, 0.01, 0.03, 0.1)
OTHER_RULES = ("first", "least confident", "random")
SMALLER_BLOCKS = (6, 4)

_GREEDY: Mapping[str, Player] = {
    "chain": Player(Chain()),
    **{f"chain above {limit:g}": Player(Chain(limit)) for limit in THRESHOLDS},
    **{f"chain in blocks of {rows}": Player(Chain(), block=rows) for rows in SMALLER_BLOCKS},
    **{f"d2sd {count}": Player(Restarts(count)) for count in COUNTS},
    **{f"d2sd {count}, ban": Player(Restarts(count, banned=True)) for count in (4, 7)},
    **{f"d2sd {count}, {rule}": Player(Restarts(count, rule=rule)) for count in (2, 4) for rule in OTHER_RULES},
    **{f"first twice {count}": Player(Restarts(count, FIRST)) for count in (4, 7)},
    **{f"first twice {count}, ban": Player(Restarts(count, FIRST, banned=True)) for count in (4, 7)},
    "d2sd 4, calibrated": Player(Restarts(4, calibrated=True)),
    "d2sd 4, third level": Player(Restarts(4, third=True)),
    "samples 4": Player(Samples(4)),
    "samples 8": Player(Samples(8)),
    "d2sd 4 of 4 samples": Player(Restarts(4, samples=4)),
}
_SAMPLED: Mapping[str, Player] = {
    "chain": Player(Chain()),
    "chain, likeliest": Player(Chain(), coupled=False),
    "d2sd 4": Player(Restarts(4)),
    "d2sd 4, likeliest": Player(Restarts(4), coupled=False),
}
_LONG: Mapping[str, Player] = {"chain": Player(Chain()), "d2sd 4": Player(Restarts(4))}


def regimes(per_set: int, max_new_tokens: int, longest: int) -> dict[str, Regime]:
    """Greedy and sampled answers of so many tokens, and some of up to `longest`."""
    return {
        "greedy": Regime("greedy", 0.0, max_new_tokens, per_set, _GREEDY),
        "sampled": Regime("sampled", 1.0, max_new_tokens, per_set, _SAMPLED),
        "long": Regime("long", 0.0, longest, max(1, per_set // 4), _LONG),
    }


class Comparison(NamedTuple):
    """Two arms of which a paper compares the tokens a step."""

    title: str
    arm: str
    against: str
    paper: str  # its figure; "" where it has none
    remark: str = ""
    regime: str = "greedy"


D2SD = (
    Comparison("D²SD over DFlash, 4 restarts", "d2sd 4", "chain", "+33 %", "the paper's own setting"),
    Comparison("the same, with our ban on the rejected token", "d2sd 4, ban", "chain", "", "not in the paper"),
    Comparison("the same behind every boundary", "d2sd 7, ban", "chain", "", "what recipes serve as `d2sd`"),
    Comparison("the same at T = 1", "d2sd 4", "chain", "+26 %", "noise coupled in both", "sampled"),
    Comparison("the ban alone", "d2sd 7, ban", "d2sd 7", ""),
    Comparison("DFlash twice over DFlash", "first twice 4", "chain", "+14 %"),
    Comparison("D²SD over DFlash twice, no ban", "d2sd 4", "first twice 4", "+17 %", "like for like"),
    Comparison("D²SD over DFlash twice, ban in both", "d2sd 4, ban", "first twice 4, ban", ""),
    Comparison("4 samples of one pass over DFlash", "samples 4", "chain", "+6 %", "the pair head walks each"),
    Comparison("8 samples", "samples 8", "chain", ""),
    Comparison("D²SD behind 4 samples, over the samples", "d2sd 4 of 4 samples", "samples 4", "+25 %"),
    Comparison("a third level over two", "d2sd 4, third level", "d2sd 4", "+8 %", "one restart more a branch"),
    Comparison("boundaries by Eq. 4 over the first 4", "d2sd 4", "d2sd 4, first", ""),
    Comparison("over the 4 least confident", "d2sd 4", "d2sd 4, least confident", ""),
    Comparison("over 4 at random", "d2sd 4", "d2sd 4, random", ""),
    Comparison("calibrated over raw probabilities", "d2sd 4, calibrated", "d2sd 4", ""),
)
SAMPLED = (
    Comparison(
        "`chain`: drafts by the target's noise over likeliest ones", "chain", "chain, likeliest", "", "", "sampled"
    ),
    Comparison("`d2sd`: the same", "d2sd 4", "d2sd 4, likeliest", "", "", "sampled"),
)
