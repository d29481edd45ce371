"""The roofline: the least that a decode step reads and computes, and the seconds of its launches, over `steps.count`.

A pass (a stage of `decode_step`) must read its weights and the K/V of the context once, and compute its products; it
takes the longer of the two at the peaks of the data sheet. Activations, logits and writes cost nothing in that floor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.gpu.traffic import KV, STATES, WEIGHTS, Launch

#: Seconds of a small kernel behind another in a CUDA graph, 1.5 to 2.5 µs: an assumption.
NODE_SECONDS = 2e-6


@dataclass(frozen=True, slots=True)
class GpuPeaks:
    """Peak rates from NVIDIA's data sheets, of the SXM or HGX version; products are dense."""

    bandwidth: float  # bytes a second
    half: float  # operations a second, bf16 and fp16
    fp8: float


#: By the names of `d2sd.build.plan.GPUS`.
PEAKS = {
    "H100": GpuPeaks(3.35e12, 989e12, 1979e12),
    "H200": GpuPeaks(4.8e12, 989e12, 1979e12),
    "B200": GpuPeaks(8.0e12, 2250e12, 4500e12),
}


@dataclass(slots=True)
class Pass:
    """The least bytes and operations of one stage."""

    weights: int = 0  # bytes
    context: int = 0  # bytes of K/V and of states
    half_flops: int = 0
    fp8_flops: int = 0

    def seconds(self, peaks: GpuPeaks) -> float:
        computed = self.half_flops / peaks.half + self.fp8_flops / peaks.fp8
        return max((self.weights + self.context) / peaks.bandwidth, computed)


def passes(launches: Iterable[Launch]) -> dict[str, Pass]:
    """By stage; those that neither read weights nor multiply are left out."""
    found: defaultdict[str, Pass] = defaultdict(Pass)
    read: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for launch in launches:
        one, weights = found[launch.stage], read[launch.stage]
        for access in launch.reads:
            if access.role == WEIGHTS:
                weights[access.storage] = min(access.size, weights.get(access.storage, 0) + access.bytes)
            elif access.role in (KV, STATES):
                one.context += access.bytes
        if launch.fp8:
            one.fp8_flops += launch.flops
        else:
            one.half_flops += launch.flops
    for stage, weights in read.items():
        found[stage].weights = sum(weights.values())
    return {stage: one for stage, one in found.items() if one.weights or one.half_flops or one.fp8_flops}


def floor_bytes(launches: Iterable[Launch]) -> int:
    return sum(one.weights + one.context for one in passes(launches).values())


def floor_seconds(launches: Iterable[Launch], peaks: GpuPeaks) -> float:
    return sum(one.seconds(peaks) for one in passes(launches).values())


def seconds(
    launches: Iterable[Launch],
    peaks: GpuPeaks,
    *,
    least: float = 0.0,
    more: float = 0.0,
    counted: Callable[[Launch], float] = lambda _: 0.0,
) -> float:
    """Each launch takes the longest of its bytes, its products, `least` seconds and those `counted` of its instructions
    and latencies, and then `more` seconds.
    """
    return sum(
        more + max(one.bytes / peaks.bandwidth, one.flops / (peaks.fp8 if one.fp8 else peaks.half), least, counted(one))
        for one in launches
    )
