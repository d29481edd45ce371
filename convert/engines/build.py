"""Engines of a bundle: every graph for every compute capability, a process each, several at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from d2sd.convert.engines.seam import unversioned_library
from d2sd.convert.engines.worker import Job, Report
from d2sd.convert.progress import Progress, silent
from d2sd.errors import BuildError


def build_engines(jobs: Sequence[Job], scratch: Path, *, at_once: int = 1, progress: Progress = silent) -> list[Report]:
    """Build all engines; the first that fails is raised as `BuildError`, after those that have begun have ended."""
    with progress("building engines", len(jobs)) as advance, ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(_build, job, scratch / f"{place}") for place, job in enumerate(jobs)]
        reports = []
        for future in futures:
            reports.append(future.result())
            advance(1)
    return reports


def _build(job: Job, folder: Path) -> Report:
    folder.mkdir(parents=True, exist_ok=True)
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
            "The engine builder died.", where=job.graph, found=f"exit code {done.returncode}: {done.stderr[-2000:]}",
        )  # fmt: skip
    said = json.loads(Path(job.report).read_text("utf-8"))
    if "error" in said:
        raise BuildError(said["error"].pop("what"), **said["error"])
    return Report(**said)
