"""Most launches of a decode step, by stage: 36 + 5 + 5 layers, at every batch size. Lower them with the code.

A launch costs the host about 5 us and the device 1.5 to 2.5 us in a graph; those are estimates, the counts are exact.
"""

from __future__ import annotations

LAYERS, DRAFTER_LAYERS = 36, 5
#: Of a whole step of d2sd, without and with FP8 layers.
MOST = {False: 440, True: 442}
#: (policy, FP8 layers, sampled) -> stage -> launches. "handover" is what follows from the step before and what the next
#: one needs, context of drafters included. Sampled: greedy, temperature 1, and all filters, in one batch.
LAUNCHES: dict[tuple[str, bool, bool], dict[str, int]] = {
    ("off", False, False): {"build_tree": 2, "verify": 327, "accept": 3, "commit": 2, "handover": 2},
    ("chain", False, False): {
        "draft_first": 51,
        "build_tree": 5,
        "verify": 327,
        "accept": 3,
        "commit": 2,
        "handover": 2,
    },
    ("d2sd", False, False): {
        "draft_first": 51,
        "pick_boundaries": 1,
        "draft_second": 51,
        "build_tree": 1,
        "verify": 327,
        "accept": 3,
        "commit": 2,
        "handover": 2,
    },
    ("d2sd", False, True): {
        "draft_first": 51,
        "pick_boundaries": 1,
        "draft_second": 51,
        "build_tree": 1,
        "verify": 327,
        "accept": 3,
        "commit": 2,
        "handover": 2,
    },
    ("d2sd", True, False): {
        "draft_first": 52,
        "pick_boundaries": 1,
        "draft_second": 52,
        "build_tree": 1,
        "verify": 327,
        "accept": 3,
        "commit": 2,
        "handover": 2,
    },
    ("hybrid", False, False): {
        "draft_first": 51,
        "pick_boundaries": 2,
        "draft_second": 51,
        "build_tree": 1,
        "verify": 327,
        "accept": 3,
        "commit": 2,
        "handover": 2,
    },
    ("flex", False, False): {
        "draft_first": 61,
        "build_tree": 5,
        "verify": 327,
        "accept": 3,
        "commit": 2,
        "handover": 2,
    },
    ("flex_parallel", False, False): {
        "draft_first": 12,  # finds the draft that the step before has left
        "build_tree": 5,
        "verify": 376,  # mask rows join five layers: two products of a kind and two rotations, and joint q, k and v
        "accept": 3,
        "commit": 29,
        "handover": 2,
    },
}
#: More of them at batch 2 and above: copies of slices that are contiguous at batch 1, and of masks that requests share.
COPIES: dict[str, dict[str, int]] = {
    "chain": {"draft_first": 1},
    "d2sd": {"draft_first": 1, "draft_second": 1},
    "hybrid": {"draft_first": 1, "draft_second": 1},
    "flex": {"draft_first": 2},
    "flex_parallel": {"verify": 12, "commit": 1},
}
