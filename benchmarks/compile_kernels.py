"""Compile the Triton kernels for every architecture, without a GPU, and check their code. `make kernels` runs it.

    python -m benchmarks.compile_kernels [--only TEXT] [--capability N ...]

The launches are those of every op's tests/plugins/OP/cases.py: what the product's launchers hand to Triton is compiled,
as it is served. One line a kernel and architecture with its resources and what is wrong with it, and one a loop that
reads weights, pages or logits, with what `benchmarks/machine_code.py` asks of it; minutes in all, and less where
Triton's cache has them. Exits with 1 where a bound or a rule is broken. Nothing here ran on a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

from benchmarks.ahead_of_time import CAPABILITIES, Compiled, compile_kernel
from benchmarks.machine_code import DEVICES, excepted, order_faults, streams
from benchmarks.sass import disassemble
from d2sd.plugins.shared.dependent_launch import FIRST_CAPABILITY
from tests.plugins.cases import kernels

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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument("--capability", type=int, nargs="+", choices=CAPABILITIES, default=CAPABILITIES)
    chosen = parser.parse_args(arguments)
    print(f"{'kernel':<36} {'sm':>4} {'shared':>7} {'registers':>9} {'spilled':>7} {'seconds':>7}")
    failed = compiled = 0
    launches = [(kernel, *launch) for kernel in kernels().values() for launch in kernel.launches.items()]
    for kernel, name, run in launches:
        for capability in chosen.capability:
            if chosen.only not in name or capability < least_capability(name):
                continue
            start = time.perf_counter()
            done = compile_kernel(kernel.kernel, run, capability)
            faults = broken(name, done, capability) + order_faults(disassemble(done.cubin), capability)
            lines = list(loop_lines(name, done, kernel.streamed, capability)) if kernel.streamed else []
            took = time.perf_counter() - start
            numbers = f"{done.shared:>7} {done.registers:>9} {done.spilled:>7} {took:>7.1f}"
            print(f"{name:<36} {capability:>4} {numbers}", *faults, sep="  ! " if faults else "", flush=True)
            for line, _ in lines:
                print(line, flush=True)
            failed += bool(faults) or any(bad for _, bad in lines)
            compiled += 1
    print(f"{compiled} compiled, {failed} break a bound or a rule")
    return 1 if failed or not compiled else 0


if __name__ == "__main__":
    sys.exit(main())
