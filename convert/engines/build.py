"""Builds the engines of a bundle: one process per graph and compute capability, several in parallel."""

from __future__ import annotations

import ctypes.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from d2sd.convert.engines.worker import Job, Report
from d2sd.errors import BuildError
from d2sd.extras import install_line
from d2sd.io import read_json
from d2sd.progress import Progress, silent
from d2sd.tensorrt_env import Builder


def build_engines(
    jobs: Sequence[Job], scratch: Path, *, at_once: int = 1, progress: Progress = silent, what: str = "building engines"
) -> list[Report]:
    """Build all engines. Raises the first failure as `BuildError`, after the running builds have ended."""
    with progress(what, len(jobs)) as advance, ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(_build, job, scratch / f"{index}") for index, job in enumerate(jobs)]
        try:
            for future in as_completed(futures):
                future.result()
                advance(1)
        except BaseException:
            pool.shutdown(cancel_futures=True)  # those that have not started
            raise
    return [future.result() for future in futures]


def _build(job: Job, folder: Path) -> Report:
    folder.mkdir(parents=True, exist_ok=True)
    Path(job.report).unlink(missing_ok=True)  # or an earlier run's report would be read as this one's
    file = folder / "job.json"
    file.write_text(json.dumps(asdict(job)), "utf-8")
    environment = dict(os.environ)
    linked = unversioned_library(job.builder, folder / "lib") if job.plugins else None
    if linked is not None:
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(
            filter(None, (str(linked), environment.get("LD_LIBRARY_PATH")))
        )
    command = [sys.executable, "-m", "d2sd.convert.engines.worker", str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if not Path(job.report).is_file():
        raise BuildError(
            "The engine builder crashed.", where=job.graph,
            found=f"exit code {done.returncode}: {done.stderr.strip().rpartition(os.linesep)[2]}",
        )  # fmt: skip
    report = read_json(Path(job.report), error=BuildError)
    if "error" in report:
        raise BuildError(report["error"].pop("what"), **report["error"])
    return Report(**report)


def unversioned_library(name: Builder, folder: Path) -> Path | None:
    """Link TensorRT-RTX's library in `folder` under the name that its parser opens to load plugins.

    The wheel contains only libtensorrt_rtx.so.1, and the parser opens libtensorrt_rtx.so. Returns the folder to put on
    LD_LIBRARY_PATH, which is read when a process starts; None if the library is found without it.
    """
    if name != "tensorrt-rtx" or ctypes.util.find_library("tensorrt_rtx"):
        return None
    libraries = find_spec("tensorrt_rtx_libs")
    folders = libraries.submodule_search_locations if libraries else None
    found = [file for each in folders or () for file in sorted(Path(each).glob("libtensorrt_rtx.so.*"))]
    if not found:
        raise BuildError(
            "TensorRT-RTX's parser cannot find the library that it loads for plugins.", where="engines",
            expected="libtensorrt_rtx.so", fix=f"put its folder on LD_LIBRARY_PATH, or {install_line('engines')}",
        )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "libtensorrt_rtx.so"
    link.unlink(missing_ok=True)
    link.symlink_to(found[0])
    return folder
