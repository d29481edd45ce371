"""Step times of a bundle, kept in a file: the next engine on the same machine reads them and starts at once.

The name of the file is a hash of everything that the times depend on. Times measured under load are marked busy and
re-measured on an idle start; what there was no time to measure is left out, and the next start measures it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from pydantic import Field

import d2sd
from d2sd.errors import D2SDError
from d2sd.io import cache_folder, digest, sha256, write_text
from d2sd.plugins.cpu import library
from d2sd.plugins.cpu.compiler import processor
from d2sd.policies import DrafterRole
from d2sd.runtime.request import buckets
from d2sd.runtime.speculation.policy import Policy
from d2sd.runtime.step_times import LIMIT, Forecast, StepTimes, measure_step_times
from d2sd.schema import Closed, read_model

if TYPE_CHECKING:
    from d2sd.bundle.devices import BackendName
    from d2sd.bundle.load import Bundle
    from d2sd.runtime.cuda_graphs.steps import DecodeSteps
    from d2sd.runtime.engine import Engine
    from d2sd.runtime.model_runner import ModelRunner
    from d2sd.runtime.request import Limits

logger = logging.getLogger(__name__)

_Seconds = Annotated[float, Field(ge=0)]
#: Folders of d2sd whose code runs in a step.
_FOLDERS = ("plugins", "modeling", "runtime")
_PACKAGES = ("torch", "triton", "onnxruntime")
_MEASURING = (
    "measuring how long steps take here, on a CPU for at most %.0f s, with %d threads (where other work keeps the "
    "cores busy, set OMP_NUM_THREADS lower); later starts read the times"
)


def step_times(
    bundle: Bundle, engine: Engine, policies: Sequence[Policy], backend: BackendName
) -> Callable[..., StepTimes]:
    """`measure_step_times`, once per machine: later calls read the file."""
    runner, limits = engine.runner, engine.limits
    on_cpu = runner.device == "cpu"
    about = About(
        gpu=None if on_cpu else torch.cuda.get_device_name(runner.device),
        bundle=digest(bundle.manifest.files),
        backend=backend,
        ranks=1 if bundle.ranks is None else bundle.ranks.size,
    )
    depends = {
        "files": bundle.manifest.files,  # the calibration decides which trees are not worth timing
        "calibrated": engine.calibration is not None,
        "precision": (bundle.recipe.precision, bundle.recipe.exact),
        "block_size": runner.block_size,
        "drafters": len(runner.drafters),
        "policies": [(policy.name, asdict(policy)) for policy in policies],
        "limits": (limits.max_batch, limits.max_context, limits.page_size),
        "backend": backend,
        "ranks": about.ranks,
        "device": about.gpu or runner.device,
        "processor": processor(),
        "cores": _cores(),
        "threads": torch.get_num_threads(),
        "kernels": library.name() if on_cpu else None,
        "packages": [package_version(package) for package in _PACKAGES],
        "code": code(),
    }
    path = kept_file("step-times", depends)
    return measure_step_times if path is None else partial(kept_step_times, path, about=about)


def kept_file(kind: str, depends: object) -> Path | None:
    """The file of times that depend on this; None if the user has no home."""
    try:
        return cache_folder() / f"{kind}-{digest(depends)[:24]}.json"
    except OSError:
        return None


def _cores() -> int:
    """Cores that this process may use; all of them where the system does not say, as on macOS."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def package_version(package: str) -> str | None:
    """The version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def code() -> str:
    """Hash of d2sd's own code: its version alone does not change with every commit."""
    root = Path(d2sd.__file__).parent
    return digest([sha256(file) for folder in _FOLDERS for file in sorted((root / folder).rglob("*.py"))])


class About(Closed):
    """The origin of times, by which a capacity sheet finds those that it can use."""

    gpu: str | None  # its name; None: a CPU
    bundle: str  # hash of its files' hashes
    backend: str
    ranks: int  # GPUs that share the target


class _File(Closed):
    d2sd_step_times: Literal[3] = 3
    about: About | None = None
    seconds: list[tuple[str, int, Annotated[float, Field(gt=0)]]]  # policy, batch bucket, seconds of a step
    context: list[tuple[str, int, _Seconds]]  # the same of a token more of context
    pending: dict[DrafterRole, _Seconds]
    busy: bool = False  # other work had the processor
    partial: bool = False  # there was no time for some of them


def kept_step_times(
    path: Path,
    runner: ModelRunner,
    policies: Sequence[Policy],
    forecast: Forecast,
    limits: Limits,
    advance: Callable[[int], None] = lambda buckets: None,
    steps: DecodeSteps | None = None,
    about: About | None = None,
) -> StepTimes:
    """The step times in the file `path`, or else those of `measure_step_times`, which are then written there.

    A file that cannot be read is measured again, and one that cannot be written is not kept; neither is an error.
    Times of steps whose capture was refused are not kept, and neither are guesses.
    """
    busy, known, partial = _is_busy(), None, False
    try:
        known, partial = _read(path, policies, buckets(limits.max_batch), busy=busy)
    except (D2SDError, OSError) as error:
        logger.info("measuring step times again: %s", error)
    if known is not None and not partial:
        logger.info("step times were measured before on this machine; to measure again delete %s", path)
        return known
    logger.warning(_MEASURING, LIMIT, torch.get_num_threads())  # a warning: `LLM` shows nothing below it
    start = time.monotonic()
    times = measure_step_times(runner, policies, forecast, limits, advance, steps, known)
    seconds = time.monotonic() - start
    if steps is not None and steps.refused:
        logger.info("step times are not kept: steps run without CUDA graphs, which the next start may capture")
        return times
    keep(path, _file(times, about, busy=busy), f"measured step times in {seconds:.1f} s")
    if times.guessed:
        logger.info("%d of %d are guesses, which serving corrects", len(times.guessed), len(times.seconds))
    return times


def keep(path: Path | None, times: Closed, found: str) -> None:
    """Write a file of times, and log where, or why not: `found` says how they were found."""
    try:
        if path is None:
            raise OSError("the user has no home")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, times.model_dump_json() + "\n")
    except OSError as error:
        logger.info("%s, but cannot keep them: %s", found, error)
    else:
        logger.info("%s; the next start reads them from %s", found, path)


def _is_busy() -> bool:
    """Whether the machine has more to run than processors, by the load average of the last minute."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > (os.cpu_count() or 1)


def _read(path: Path, policies: Sequence[Policy], sizes: Sequence[int], *, busy: bool) -> tuple[StepTimes | None, bool]:
    """The times in the file, None if there is no file, and whether some are left out. Raises D2SDError if they are not
    of `sizes`, or of a busy machine that is not `busy` any more.
    """
    if not path.exists():
        return None, False
    file = read_model(_File, path, error=D2SDError, what="file of step times")
    if file.busy and not busy:
        raise D2SDError("The step times were measured on a busy machine.", where=path)
    return _times(file, path, policies, () if file.partial else sizes), file.partial


def _times(file: _File, path: Path, policies: Sequence[Policy], sizes: Sequence[int]) -> StepTimes:
    """The times of `policies`. Raises D2SDError if plain decoding lacks a size."""
    known = {str(policy): policy for policy in policies}
    if not {size for name, size, _ in file.seconds if name == "off"} >= set(sizes):
        raise D2SDError("The file of step times has other batch sizes.", where=path)
    seconds = {(known[name], size): duration for name, size, duration in file.seconds if name in known}
    context = {(known[name], size): added for name, size, added in file.context if name in known}
    return StepTimes(seconds, context, file.pending)


def measured_step_times(
    files: Iterable[Path], about: Callable[[About], bool], policies: Sequence[Policy], sizes: Sequence[int]
) -> StepTimes | None:
    """Step times in the newest of the files that is `about` this and has these policies and sizes."""
    for path in sorted(files, key=_changed, reverse=True):
        try:
            file = read_model(_File, path, error=D2SDError, what="file of step times")
            if file.about is not None and about(file.about):
                return _times(file, path, policies, sizes)
        except (D2SDError, OSError) as error:
            logger.info("step times are not used: %s", error)
    return None


def _changed(path: Path) -> float:
    """When a file was changed; 0 if it cannot be read."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _file(times: StepTimes, about: About | None, *, busy: bool) -> _File:
    seconds = [(str(step[0]), step[1], one) for step, one in times.seconds.items() if step not in times.guessed]
    context = [(str(step[0]), step[1], one) for step, one in times.context.items() if step not in times.guessed]
    pending, partial = dict(times.pending), bool(times.guessed)
    return _File(about=about, seconds=seconds, context=context, pending=pending, busy=busy, partial=partial)
