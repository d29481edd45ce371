"""Where the step times of a bundle are kept: in a file whose name is a hash of everything that they depend on."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import d2sd
from d2sd.io import cache_folder, digest, sha256
from d2sd.plugins.cpu import library
from d2sd.plugins.cpu.compiler import processor
from d2sd.runtime.kept_step_times import kept_step_times
from d2sd.runtime.speculation.policy import Policy
from d2sd.runtime.step_times import StepTimes, measure_step_times

if TYPE_CHECKING:
    from d2sd.bundle.backends import BackendName
    from d2sd.bundle.load import Bundle
    from d2sd.runtime.engine import Engine

#: Folders of d2sd whose code runs in a step.
_FOLDERS = ("plugins", "modeling", "runtime")
_PACKAGES = ("torch", "triton", "onnxruntime")


def step_times(
    bundle: Bundle, engine: Engine, policies: Sequence[Policy], backend: BackendName
) -> Callable[..., StepTimes]:
    """`measure_step_times`, once per machine: later calls read the file."""
    runner, limits = engine.runner, engine.limits
    on_cpu = runner.device == "cpu"
    depends = {
        "files": bundle.manifest.files,  # the calibration decides which trees are not worth timing
        "calibrated": engine.calibration is not None, "precision": (bundle.recipe.precision, bundle.recipe.exact),
        "block_size": runner.block_size, "drafters": runner.drafters,
        "policies": [(policy.name, asdict(policy)) for policy in policies],
        "limits": (limits.max_batch, limits.max_context, limits.page_size),
        "backend": backend, "device": runner.device if on_cpu else torch.cuda.get_device_name(runner.device),
        "processor": processor(), "cores": _cores(), "threads": torch.get_num_threads(),
        "kernels": library.name() if on_cpu else None,
        "packages": [_version(package) for package in _PACKAGES], "code": _code(),
    }  # fmt: skip
    try:
        folder = cache_folder()
    except OSError:  # the user has no home
        return measure_step_times
    return partial(kept_step_times, folder / f"step-times-{digest(depends)[:24]}.json")


def _cores() -> int:
    """Cores that this process may use; all of them where the system does not say, as on macOS."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def _code() -> str:
    """Hash of d2sd's own code: its version alone does not change with every commit."""
    root = Path(d2sd.__file__).parent
    return digest([sha256(file) for folder in _FOLDERS for file in sorted((root / folder).rglob("*.py"))])
