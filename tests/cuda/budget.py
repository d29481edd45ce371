"""Most launches of a decode step, by stage: 36 + 5 + 5 layers, the same at every batch size. Lower them with the code.

A launch costs the host about 5 us and the device 1.5 to 2.5 us in a graph; those are estimates, the counts are exact.
"""

from __future__ import annotations

from d2sd.policies import PolicyName

LAYERS, DRAFTER_LAYERS = 36, 5
#: (policy, FP8 layers, sampled) -> stage -> launches. "sync" flushes the drafters' pending context before the step;
#: "other" packs the tokens for the host. Sampled: greedy, temperature 1, and all filters, in one batch.
LAUNCHES: dict[tuple[PolicyName, bool, bool], dict[str, int]] = {
    ("off", False, False): {"build_tree": 13, "verify": 367, "accept": 19, "commit": 8, "other": 1},
    ("chain", False, False): {
        "sync": 14, "draft_first": 69, "build_tree": 46, "verify": 367, "accept": 19, "commit": 8, "other": 1
    },
    ("d2sd", False, False): {
        "sync": 28, "draft_first": 69, "pick_boundaries": 14, "draft_second": 79, "build_tree": 86, "verify": 367,
        "accept": 19, "commit": 8, "other": 1,
    },
    ("d2sd", False, True): {
        "sync": 28, "draft_first": 460, "pick_boundaries": 14, "draft_second": 470, "build_tree": 86, "verify": 367,
        "accept": 3916, "commit": 8, "other": 1,
    },
    ("d2sd", True, False): {
        "sync": 38, "draft_first": 74, "pick_boundaries": 14, "draft_second": 84, "build_tree": 86, "verify": 403,
        "accept": 19, "commit": 8, "other": 1,
    },
    ("hybrid", False, False): {
        "sync": 28, "draft_first": 69, "pick_boundaries": 222, "draft_second": 79, "build_tree": 358, "verify": 367,
        "accept": 19, "commit": 8, "other": 1,
    },
}  # fmt: skip
