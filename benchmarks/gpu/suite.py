"""GPU measurements that one machine finishes in minutes, the most informative first.

    sh benchmarks/gpu_suite.sh [--out build/gpu] [--budget 500] [--dry]

Each part is a process of its own with a share of the time; one that dies is started again behind the case that killed
it. `gpu.json` grows case by case, and another call with the same --out goes on with what is missing. Of the tests that
need a GPU it runs those of the kernels and of training (`proofs.FILES`);
`tests/runtime/backends/test_tensorrt_cuda.py` is not among them. **Not yet run** on a GPU; `--dry` runs every case
without one, but for its launches (`benchmarks.gpu.dry`).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import dry
from benchmarks.gpu.cases import LOST, Case, run_cases
from benchmarks.gpu.record import Record
from benchmarks.gpu.table import render
from d2sd.errors import D2SDError

#: Part -> most seconds. Together they exceed the budget: a part that needs less leaves its time to the later ones.
PARTS = {
    "probe": 100,
    "copy": 40,
    "checks": 90,
    "replay": 40,
    "layers": 60,
    "choices": 120,
    "captured": 90,
    "steps": 120,
    "times": 170,
    "writes": 40,
    "pytest": 150,
    "flex": 150,
}
#: Parts that run, or report why not, without a CUDA device.
ANYWHERE = ("probe",)
#: A case may outlast its part's time by this many seconds, then the process is ended.
GRACE = 20


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--budget", type=float, default=500, help="seconds in all")
    parser.add_argument("--dry", action="store_true", help="without a GPU and without launches; figures stay empty")
    parser.add_argument("--engines", type=Path, default=Path("build/gpu/engines"), help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.part:
        cases = cases_of(chosen.part, chosen.out, chosen.engines, chosen.until)
        run_cases(Record(chosen.out), dry.dry(cases) if chosen.dry else cases, chosen.until)
        return 0
    # SIGTERM, from a caller's time limit, ends it and its processes like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    deadline = time.time() + (dry.SECONDS if chosen.dry else chosen.budget)
    try:
        record = Record(chosen.out)
        record.resume(environment() | ({"device": dry.DEVICE} if chosen.dry else {}))
    except D2SDError as error:
        print(error, file=sys.stderr)
        return 2
    if chosen.dry:
        record.rows.clear()  # all of them, every time
        record.write()
    for part in PARTS:
        run_part(part, chosen.out, chosen.engines, deadline, dry=chosen.dry)
    record = Record(chosen.out)
    print(render(record.environment, record.rows))
    fine = all(row["status"] in ("ok", "skipped") for row in record.rows.values())
    return 0 if fine and not (chosen.dry and dry.errors(record.rows)) else 1


def cases_of(part: str, out: Path, engines: Path, until: float) -> Iterable[Case]:
    """The cases of a part; its modules are imported by its own process only."""
    if part == "probe":
        return importlib.import_module("benchmarks.gpu.probe").cases(engines)  # type: ignore[no-any-return]
    if part == "pytest":
        return importlib.import_module("benchmarks.gpu.proofs").cases(out, until)  # type: ignore[no-any-return]
    if part in ("checks", "times", "flex"):
        kernels = importlib.import_module("benchmarks.gpu.kernels")
        return {"checks": kernels.check_cases, "times": kernels.time_cases, "flex": kernels.flex_cases}[part]()  # type: ignore[no-any-return]
    module = {"copy": "copy_rate"}.get(part, part)
    return importlib.import_module(f"benchmarks.gpu.{module}").cases()  # type: ignore[no-any-return]


def run_part(part: str, out: Path, engines: Path, deadline: float, *, dry: bool = False) -> None:
    """Run its cases in a process, and again after each that dies, until its time is up; `dry`: that is the deadline."""
    record = Record(out)
    if part not in ANYWHERE and not dry and not torch.cuda.is_available():
        record.put(f"{part}/all", "skipped", reason="no CUDA device")
        return
    until = deadline - GRACE if dry else min(time.time() + PARTS[part], deadline - GRACE)
    while True:
        if time.time() >= until:
            record.put(f"{part}/all", "no time", reason="the budget was used up")
            return
        ended = _process(
            ["--part", part, "--until", str(until), "--out", str(out), "--engines", str(engines), *["--dry"] * dry],
            until + GRACE - time.time(),
        )
        record = Record(out)
        if ended == 0:
            return
        if not record.bury(f"its process ended with {ended}") and ended != LOST:
            record.put(f"{part}/all", "died", reason=f"its process ended with {ended} outside of any case")
            return


def _process(arguments: list[str], seconds: float) -> int | str:
    """Exit status of this module as a process group of its own, of which nothing is left on the device, however the
    wait ends.
    """
    child = subprocess.Popen([sys.executable, "-m", "benchmarks.gpu.suite", *arguments], start_new_session=True)
    try:
        return child.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return "its time"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def environment() -> dict[str, Any]:
    """Where and with what this is measured."""
    found: dict[str, Any] = {
        "device": None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": os.environ.get("D2SD_COMMIT") or None,
        "code": code_hash(),
        "began": time.strftime("%Y-%m-%d %H:%M"),
    }
    for package in ("triton", "flashinfer-python", "tensorrt-rtx", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    if torch.cuda.is_available():
        about = torch.cuda.get_device_properties(0)
        found |= {
            "device": about.name,
            "capability": [about.major, about.minor],
            "memory": about.total_memory,
            "processors": about.multi_processor_count,
            "l2": about.L2_cache_size,
        }
    return found


def code_hash() -> str:
    """Hash of the kernels, their launchers and this suite: a machine without git has no commit to name."""
    here = Path(__file__).resolve().parent
    digest = hashlib.sha256()
    for folder in (here, *(here.parents[1] / "d2sd" / name for name in ("plugins", "modeling", "runtime"))):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
