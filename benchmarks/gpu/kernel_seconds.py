"""Seconds that kernels take on an H100 where neither bytes nor products decide: counted, see docs/kernel-times.md.

Of a step with 64 nodes, 4 branches of 16 slots and 2,048 tokens of context. Kernels that are not listed take less than
`NODE_SECONDS`; batches that are not listed take the largest below them, as one wave of blocks does.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.gpu.traffic import Launch

MICRO = 1e-6
#: By stage and batch, one launch.
ATTENTION: dict[str, dict[int, float]] = {
    "draft_first": {1: 6.7},
    "draft_second": {1: 7.7, 8: 43.6},
    "verify": {1: 7.7, 8: 43.6},
}
#: Of `verify` where a request has one row.
ONE_ROW = {1: 6.3, 8: 24.8, 32: 87.8}
#: By the executor's clock (`executed_as_ptx(90, timed=True)`): the largest of tests/ptx/test_cycles.py, and one row of
#: drafts and of the target's choice.
OTHERS: dict[str, dict[int, float]] = {"grow_kernel": {1: 12.1}, "pool_kernel": {1: 5.3}, "filtered_kernel": {1: 12.9}}


def counted_seconds(launch: Launch, batch: int, rows: int) -> float:
    """The time of a launch; 0 where it is not counted. `rows` of the target's pass."""
    if launch.name == "cascade_attention_kernel":
        of_stage = ONE_ROW if launch.stage == "verify" and rows == 1 else ATTENTION.get(launch.stage, {})
        return _at(of_stage, batch)
    return _at(OTHERS.get(launch.name, {}), batch)


def _at(times: Mapping[int, float], batch: int) -> float:
    below = [size for size in times if size <= batch]
    return MICRO * times[max(below)] if below else 0.0
