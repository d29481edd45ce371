"""The user's own GPU in a capacity sheet: step times of a bundle and efficiencies of products that it has measured.

Both are in files that engines keep (`d2sd.bundle.step_times`, `d2sd.bundle.product_times`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from d2sd.bench.roofline import PEAKS, Kind, Measured
from d2sd.build.plan import Plan
from d2sd.bundle.product_times import measured_product_times
from d2sd.bundle.step_times import About, measured_step_times
from d2sd.io import cache_folder, digest
from d2sd.manifest import NAME, load_manifest
from d2sd.runtime.product_times import Times
from d2sd.runtime.speculation.policy import Policy
from d2sd.runtime.step_times import StepTimes

#: Least bytes of weights: smaller ones may have been in the L2 cache.
_LEAST = 8 << 20
_BYTES = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


def steps(plan: Plan, gpu: str) -> Measured:
    """The function that finds step times of a bundle's plan on GPUs of this kind."""
    folder, bundle = _folder(), plan.recipe.folder

    def find(policies: Sequence[Policy], sizes: Sequence[int]) -> StepTimes | None:
        if folder is None or not (bundle / NAME).exists():
            return None
        files = digest(load_manifest(bundle).files)

        def matches(about: About) -> bool:
            same = about.bundle == files and about.ranks == plan.ranks and about.backend == "torch"
            return same and about.gpu is not None and is_kind(about.gpu, gpu)

        return measured_step_times(folder, matches, policies, sizes)

    return find


def shares(gpu: str) -> dict[tuple[Kind, int], float]:
    """Shares of a GPU's peaks that products reached on one of this kind, by type and bucket of rows."""
    folder = _folder()
    times = None if folder is None else measured_product_times(folder, lambda name: is_kind(name, gpu))
    return {} if times is None else shares_of(times, gpu)


def shares_of(times: Times, gpu: str) -> dict[tuple[Kind, int], float]:
    """The same by these times: of all shapes together, the longer of reading and computing over the fastest form."""
    peaks = PEAKS[gpu]
    ideal, taken = defaultdict[tuple[Kind, int], float](float), defaultdict[tuple[Kind, int], float](float)
    for (shape, rows), seconds in times.items():
        weights, size = shape.outputs * shape.inputs, _BYTES[shape.dtype]
        if weights * size < _LEAST:
            continue
        kind: Kind = "FP8 weights" if size == 1 else "16-bit weights"
        peak = peaks.fp8 if size == 1 else peaks.half
        ideal[kind, rows] += max(weights * size / peaks.bandwidth, 2 * rows * weights / peak)
        taken[kind, rows] += min(seconds.values())
    return {one: ideal[one] / taken[one] for one in ideal}


def is_kind(name: str, gpu: str) -> bool:
    """Whether a GPU that calls itself `name` is of this kind: `NVIDIA H100 80GB HBM3`, but not `NVIDIA GH200`."""
    return gpu in name.split()


def _folder() -> Path | None:
    try:
        return cache_folder()
    except OSError:  # the user has no home
        return None
