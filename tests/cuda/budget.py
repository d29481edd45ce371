"""Most launches of a decode step, by stage: 36 + 5 + 5 layers, the same at every batch size. Lower them with the code.

A launch costs the host about 5 us and the device 1.5 to 2.5 us in a graph; those are estimates, the counts are exact.
"""

from __future__ import annotations

from d2sd.policies import PolicyName

LAYERS, DRAFTER_LAYERS = 36, 5
#: (policy, FP8 layers) -> stage -> launches.
LAUNCHES: dict[tuple[PolicyName, bool], dict[str, int]] = {}
