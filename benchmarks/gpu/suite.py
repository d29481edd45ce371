"""GPU measurements in five calls of eight minutes each at most, the most informative first.

    sh benchmarks/gpu_suite.sh [--call 1|...|5] [--out build/gpu] [--resume FOLDER] [--budget 480] [--dry]

1. What can the card do, and what does a step of each policy take by batch, nodes and branches?
2. Tokens a second of every policy with a real pair, and whether they are lossless.
3. Are fused models right, do captured steps serve the same tokens, and what do the main steps take?
4. What do attention, products, layers and every kind of step take?
5. Choice of tokens and trees, exact mode, peers, the tests, training, TensorRT-RTX.

Each part is a process of its own with a share of the time; one that dies is started again behind the case that killed
it. Parts of a call that time nothing run first, side by side: they wait for compilers most of the time. `gpu.json`
grows case by case, and another call with the same --out, or one that resumes from its folder, goes on with what is
missing. Fallbacks are forbidden throughout, and what would not have run kernels is refused. The exit status is 0 where
everything was measured, REFUSED where something was refused, else 1.
`--dry` runs every case without one, but for its launches (`benchmarks.gpu.dry`).
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
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import brought, dry, evidence
from benchmarks.gpu.cases import LOST, Case, run_cases
from benchmarks.gpu.page import cases, render
from benchmarks.gpu.record import Record, Row
from d2sd.errors import D2SDError

#: Exit status where kernels would not have run.
REFUSED = 4


@dataclass(frozen=True)
class Part:
    """A share of a call. `kernels`: it is refused where the dispatcher takes none; `launches`: so is each of its cases
    that launched none. `timed`: its figures are times, so nothing runs beside it.
    """

    call: int
    seconds: float
    kernels: bool = True
    launches: bool = True
    timed: bool = True


#: Their most seconds exceed a call's budget: a part that needs less leaves its time to the later ones.
PARTS = {
    "ceilings": Part(1, 40, kernels=False, launches=False),
    "budgets": Part(1, 400, launches=False),  # its lists of products launch nothing
    "bundles": Part(2, 200, kernels=False, launches=False),
    "endtoend": Part(2, 550, launches=False),  # its processes launch them
    "proof": Part(2, 550, launches=False),  # the same
    "proof_exact": Part(2, 550, launches=False),
    "flexdraft": Part(2, 550, launches=False),
    "wide_8b": Part(2, 550, launches=False),  # dry, on a CPU, none
    "wide_32b": Part(2, 550, launches=False),  # the same
    "layers": Part(3, 90, timed=False),
    "captured": Part(3, 120, timed=False),
    "first_steps": Part(3, 170),
    "times": Part(4, 190),
    "products": Part(4, 60, launches=False),  # PyTorch's alone for many rows
    "passes": Part(4, 60),
    "steps": Part(4, 270),
    "writes": Part(4, 40),
    "choices": Part(5, 140),
    "exact": Part(5, 100),
    "flex": Part(5, 100),
    "pytest": Part(5, 150, launches=False, timed=False),  # its processes launch them
    "training": Part(5, 70, kernels=False, launches=False, timed=False),
    "probe": Part(5, 100, kernels=False, launches=False),
}
CALLS = (1, 2, 3, 4, 5)
#: Parts that run, or report why not, without a CUDA device.
ANYWHERE = ("probe",)
#: What other modules than those of their names have.
ELSEWHERE = {
    "bundles": ("endtoend", "bundle_cases"),
    "proof": ("endtoend", "proof_cases"),
    "proof_exact": ("endtoend", "exact_cases"),
    "flexdraft": ("endtoend", "flexdraft_cases"),
    "wide_8b": ("wide_speeds", "cases_8b"),
    "wide_32b": ("wide_speeds", "cases_32b"),
    "times": ("kernels", "time_cases"),
    "flex": ("kernels", "flex_cases"),
    "passes": ("layers", "pass_cases"),
    "first_steps": ("steps", "first_cases"),
    "exact": ("steps", "exact_cases"),
    "training": ("proofs", "training_cases"),
    "pytest": ("proofs", "kernel_cases"),
}
#: A case may outlast its part's time by this many seconds, then the process is ended.
GRACE = 20


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--call", type=int, choices=CALLS, help="one of the five; else all, each with the budget")
    parser.add_argument(
        "--only", choices=("checks", "times"), help="the parts of a call that time nothing, or those that do"
    )
    parser.add_argument("--resume", type=Path, help="the folder of an earlier call, where --out is a new one")
    parser.add_argument("--budget", type=float, default=480, help="seconds of a call")
    parser.add_argument("--dry", action="store_true", help="without a GPU and without launches; figures stay empty")
    parser.add_argument("--engines", type=Path, default=Path("build/gpu/engines"), help=argparse.SUPPRESS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="these parts alone, whichever call has them")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    evidence.forbid_fallbacks()
    if chosen.part:
        if refused(chosen.part, Record(chosen.out), chosen.dry):
            return REFUSED
        cases = cases_of(chosen.part, chosen.out, chosen.engines, chosen.until)
        launches = PARTS[chosen.part].launches
        run_cases(Record(chosen.out), dry.dry(cases) if chosen.dry else cases, chosen.until, launches=launches)
        return 0
    # SIGTERM, from a caller's time limit, ends it and its processes like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    here = environment() | ({"device": dry.DEVICE} if chosen.dry else {})
    try:
        if chosen.resume and not (chosen.out / "gpu.json").exists():
            take_over(chosen.resume, chosen.out, here)
        record = Record(chosen.out)
        record.resume(here)
    except D2SDError as error:
        print(error, file=sys.stderr)
        return 2
    if chosen.dry:
        record.rows.clear()  # all of them, every time
        record.write()
    for call in [chosen.call] if chosen.call or chosen.parts else CALLS:
        deadline = time.time() + (dry.SECONDS if chosen.dry else chosen.budget)
        parts = {name: one for name, one in PARTS.items() if one.call == call or name in (chosen.parts or ())}
        if chosen.only != "times":
            checks = [name for name, one in parts.items() if not one.timed]
            run_side_by_side(checks, chosen.out, chosen.engines, deadline, dry=chosen.dry)
        if chosen.only != "checks":
            for part in [name for name, one in parts.items() if one.timed]:
                run_part(part, chosen.out, chosen.engines, deadline, dry=chosen.dry)
    return report(Record(chosen.out), chosen.out)


def take_over(folder: Path, out: Path, here: dict[str, Any]) -> None:
    """Begin with what an earlier call measured, if that was here and of this code; else say why not."""
    try:
        Record(folder).matches(here)
        earlier = (folder / "gpu.json").read_bytes()
    except (D2SDError, OSError) as error:
        print(f"begun anew: {error}", file=sys.stderr)
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.json").write_bytes(earlier)


def report(record: Record, out: Path) -> int:
    """Write and print the tables; returns the exit status."""
    text = "\n\n".join(make(record.environment, record.rows) for make in (render, cases))
    print(text)
    (out / "gpu.md").write_text(f"{text}\n", "utf-8")
    found = Counter(row["status"] for row in record.rows.values())
    ok, skipped = found["ok"], found["skipped"]
    print(f"{found.total()} cases: {ok} ok, {skipped} skipped, {found.total() - ok - skipped} failed")
    if found["refused"]:
        return REFUSED
    dried = record.environment["device"] == dry.DEVICE and dry.errors(record.rows)
    return 1 if found.total() > ok + skipped or dried else 0


def cases_of(part: str, out: Path, engines: Path, until: float) -> Iterable[Case]:
    """The cases of a part; its modules are imported by its own process only."""
    module, name = ELSEWHERE.get(part, (part, "cases"))
    make = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)
    given: dict[str, tuple[Any, ...]] = {"probe": (engines,)}
    served = [name for name, one in PARTS.items() if one.call == 2]
    given |= dict.fromkeys(("pytest", "training", *served), (out, until))
    return make(*given.get(part, ()))  # type: ignore[no-any-return]


def run_side_by_side(parts: list[str], out: Path, engines: Path, deadline: float, *, dry: bool = False) -> None:
    """`run_part` of several at once, each into a record of its own, which ends in the one of `out`."""

    def run(part: str) -> dict[str, Row]:
        own = Record(out / part)
        own.environment, own.rows = record.environment, dict(record.rows)
        own.write()
        run_part(part, own.path.parent, engines, deadline, dry=dry)
        return Record(own.path.parent).rows

    record = Record(out)
    with ThreadPoolExecutor(max(1, len(parts))) as pool:
        for rows in pool.map(run, parts):
            record.rows |= rows
            record.write()


def run_part(part: str, out: Path, engines: Path, deadline: float, *, dry: bool = False) -> None:
    """Run its cases in a process, and again after each that dies, until its time is up; `dry`: that is the deadline."""
    record = Record(out)
    if part not in ANYWHERE and not dry and not torch.cuda.is_available():
        record.put(f"{part}/all", "skipped", reason="no CUDA device")
        return
    if refused(part, record, dry):
        return
    until = deadline - GRACE if dry else min(time.time() + PARTS[part].seconds, deadline - GRACE)
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


def refused(part: str, record: Record, dry: bool) -> bool:
    """Whether the dispatcher takes no kernel here, and this part's figures would be of something else."""
    reason = evidence.refusal(evidence.HOPPER if dry else None) if PARTS[part].kernels else None
    if reason:
        record.put(f"{part}/all", "refused", reason=reason)
    return bool(reason)


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
    folder = os.environ.get(brought.VARIABLE)
    found["triton brought"] = bool(folder)
    installed = brought.triton_of([path for path in sys.path if path != folder])
    found["triton installed"] = installed and installed.version
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
