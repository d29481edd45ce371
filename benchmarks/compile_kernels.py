"""Compile the Triton kernels for every architecture, without a GPU, and check their code. `make kernels` runs it.

    python -m benchmarks.compile_kernels [--only TEXT] [--capability N ...] [--again]

The launches are those of every op's tests/plugins/OP/cases.py: what the product's launchers hand to Triton is compiled,
as it is served. One line a kernel and architecture with its resources and what is wrong with it, and one a loop that
reads weights, pages or logits, with what `benchmarks/machine_code.py` asks of it. What has not changed since it kept
every rule is in docs/results/checks.kernels.json and left out; all of them take an hour. Exits with 1 where a bound or
a rule is broken. Nothing here ran on a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import triton  # type: ignore[import-untyped]

from benchmarks.ahead_of_time import CAPABILITIES, Compiled, bind, compile_kernel
from benchmarks.machine_code import DEVICES, excepted, order_faults, streams
from benchmarks.sass import disassemble
from d2sd.plugins.shared.dependent_launch import FIRST_CAPABILITY
from tests.plugins.cases import Kernel, kernels

#: Hashes of launches that broke no rule when they were last compiled.
KEPT = Path(__file__).parents[1] / "docs" / "results" / "checks.kernels.json"
#: Files that a verdict depends on besides the launch.
RULES = ("ahead_of_time.py", "machine_code.py", "sass.py")
#: Bytes of shared memory that a block may ask for; Triton's launcher does.
MOST_SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}


def least_capability(name: str) -> int:
    """A launch whose name says FP8 needs compute capability 8.9."""
    return 89 if "fp8" in name else 80


def broken(name: str, done: Compiled, capability: int) -> list[str]:
    """The bounds that the launch of this name exceeds."""
    most = MOST_SHARED[capability]
    checks = {
        f"more than {most} bytes of shared memory": done.shared > most,
        "registers spill": done.spilled > 0 and excepted(name, "spills") is None,
        "needs scratch memory, which the launcher does not pass": done.scratch > 0,
        f"{done.parameters} parameters for {len(done.names)} arguments and two scratch pointers": (
            done.parameters != len(done.names) + 2
        ),
        "is not launched as other kernels of this architecture": done.dependent != (capability >= FIRST_CAPABILITY),
    }
    return [what for what, is_so in checks.items() if is_so]


def loop_lines(name: str, done: Compiled, streamed: tuple[str, ...], capability: int) -> Iterator[tuple[str, bool]]:
    """Yield what is printed of each loop over streamed arguments, and whether it breaks a rule that is not excepted."""
    device, threads = DEVICES[capability], done.warps * 32
    blocks = device.resident(done.warps, done.registers, done.shared)
    for part in streams(done.cubin, done.ptx, list(done.names), streamed):
        one = part.in_flight * threads
        text = f"    {part.line} {' '.join(part.arguments)}: "
        if part.product and part.looped:
            text += f"{part.overlap * threads} of {part.tile * threads} bytes of a tile pending at products, "
        text += f"{one / 1024:.0f} KB in flight, {blocks} blocks {one * blocks / 1024:.0f}"
        if one * blocks < device.needed:
            text += f" of {device.needed / 1024:.0f}: short on {device.name}"
        bad = False
        for rule, fault in part.faults.items():
            reason = excepted(name, rule)
            bad = bad or reason is None
            text += f"  ! {fault}" if reason is None else f"  ({rule} excepted: {reason})"
        yield text, bad


def checked(name: str, capabilities: Sequence[int]) -> tuple[list[str], int, int]:
    """Compile a launch; returns the lines to print, the number of kernels, and how many break a bound or a rule."""
    kernel, run = launches()[name]
    printed, failed, compiled = list[str](), 0, 0
    for capability in capabilities:
        if capability < least_capability(name):
            continue
        start = time.perf_counter()
        done = compile_kernel(kernel.kernel, run, capability)
        faults = broken(name, done, capability) + order_faults(disassemble(done.cubin), capability)
        lines = list(loop_lines(name, done, kernel.streamed, capability)) if kernel.streamed else []
        took = time.perf_counter() - start
        numbers = f"{done.shared:>7} {done.registers:>9} {done.spilled:>7} {took:>7.1f}"
        printed += ["  ! ".join([f"{name:<36} {capability:>4} {numbers}", *faults]), *(line for line, _ in lines)]
        failed += bool(faults) or any(bad for _, bad in lines)
        compiled += 1
    return printed, compiled, failed


def launches() -> dict[str, tuple[Kernel, Callable[[], object]]]:
    """All launches to compile, by name."""
    return {name: (kernel, run) for kernel in kernels().values() for name, run in kernel.launches.items()}


def keys(names: Iterable[str]) -> dict[str, str]:
    """A hash of all that decides a launch's machine code and verdict: sources, arguments, options, Triton, rules."""
    rules = b"".join((Path(__file__).parent / name).read_bytes() for name in RULES)
    found, known = {}, launches()
    for name in names:
        kernel, run = known[name]
        asked = [bind(kernel.kernel, run, each).key for each in CAPABILITIES if each >= least_capability(name)]
        text = "\n".join([triton.__version__, kernel.kernel.cache_key, *kernel.streamed, *asked])
        found[name] = hashlib.sha256(rules + text.encode()).hexdigest()[:16]
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument("--capability", type=int, nargs="+", choices=CAPABILITIES, default=CAPABILITIES)
    parser.add_argument("--again", action="store_true", help="also what has not changed since it kept every rule")
    chosen = parser.parse_args(arguments)
    names = [name for name in launches() if chosen.only in name]
    now, kept = keys(names), json.loads(KEPT.read_text("utf-8")) if KEPT.exists() else {}
    todo = [name for name in names if chosen.again or now[name] != kept.get(name)]
    print(f"{len(names) - len(todo)} of {len(names)} launches kept every rule before and have not changed since")
    print(f"{'kernel':<36} {'sm':>4} {'shared':>7} {'registers':>9} {'spilled':>7} {'seconds':>7}")
    failed = compiled = 0
    workers = min(len(todo), int(os.environ.get("WORKERS", os.cpu_count() or 1)))
    check = partial(checked, capabilities=chosen.capability)
    with ProcessPoolExecutor(workers, get_context("spawn")) if workers > 1 else nullcontext() as pool:
        for name, (printed, count, bad) in zip(todo, (pool.map if pool else map)(check, todo), strict=True):
            print(*printed, sep="\n", flush=True)
            compiled, failed = compiled + count, failed + bad
            kept.pop(name, None)
            if not bad and tuple(chosen.capability) == CAPABILITIES:
                kept[name] = now[name]
            KEPT.write_text(json.dumps(dict(sorted(kept.items())), indent=0) + "\n", "utf-8")
    asked = sum(each >= least_capability(name) for name in names for each in chosen.capability)
    print(f"{asked - failed} keep every rule, {asked - compiled} unchanged since; {failed} break a bound or a rule")
    return 1 if failed or not asked else 0


if __name__ == "__main__":
    sys.exit(main())
