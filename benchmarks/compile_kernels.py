"""Compile the Triton kernels for every architecture, without a GPU, and check their resources. `make kernels` runs it.

    python -m benchmarks.compile_kernels [--only TEXT] [--capability N ...]

The launches are those of every op's tests/plugins/OP/cases.py: what the product's launchers hand to Triton is compiled.
One line a kernel and architecture; minutes in all. Exits with 1 where a bound is broken. Nothing here ran on a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time

from benchmarks.ahead_of_time import CAPABILITIES, Compiled, bind, compile_kernel
from tests.plugins.cases import kernels

#: Default limit of shared memory per block in bytes, on every architecture.
MOST_SHARED = 48 * 1024
#: On sm_100 tiles of 64 rows take 32 bytes more, also those that fill the 48 KB. Triton's launcher requests
#: the needed size; any other launcher must do so there.
MOST_SHARED_100 = MOST_SHARED + 32
#: Bytes a thread, where ptxas uses at most `CHOSEN` of 255 registers: its choice, not a shortage. Else none.
MOST_SPILLED = 8
#: Of exact mode's product and attention.
MOST_SPILLED_EXACT = 24
CHOSEN = 168
#: Launches that spill a little more by ptxas's choice, at the capability where they do.
CHOSEN_TO_SPILL = {
    ("attention bf16 D=128 tile=64 split to fp8", 100): 16,
    ("attention bf16/fp8 D=256 tile=16 split", 100): 12,
    ("attention bf16/fp8 D=96 tile=16 split", 120): 12,
    ("attention bf16/fp8 D=256 tile=16 split window", 90): 12,
    ("attention fp32 D=128 tile=16 chunks", 80): 12,
    ("attention fp32 D=256 tile=16 chunks", 89): 24,
}


def least_capability(name: str) -> int:
    """A launch whose name says FP8 needs compute capability 8.9."""
    return 89 if "fp8" in name else 80


def broken(name: str, done: Compiled, capability: int) -> list[str]:
    """The bounds that the launch of this name exceeds."""
    most = MOST_SHARED_100 if capability == 100 else MOST_SHARED
    spilled = MOST_SPILLED_EXACT if done.name in ("linear_kernel", "attention_kernel") else MOST_SPILLED
    spilled = CHOSEN_TO_SPILL.get((name, capability), spilled)
    checks = {
        f"more than {most} bytes of shared memory": done.shared > most,
        "registers spill": done.spilled > (spilled if done.registers <= CHOSEN else 0),
        "needs scratch memory, which the launcher does not pass": done.scratch > 0,
        f"{done.parameters} parameters for {done.arguments} arguments and two scratch pointers": (
            done.parameters != done.arguments + 2
        ),
    }
    return [what for what, is_so in checks.items() if is_so]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument("--capability", type=int, nargs="+", choices=CAPABILITIES, default=CAPABILITIES)
    chosen = parser.parse_args(arguments)
    print(f"{'kernel':<36} {'sm':>4} {'shared':>7} {'registers':>9} {'spilled':>7} {'seconds':>7}")
    failed = compiled = 0
    launches = [(kernel.kernel, *launch) for kernel in kernels().values() for launch in kernel.launches.items()]
    for kernel, name, run in launches:
        for capability in chosen.capability:
            if chosen.only not in name or capability < least_capability(name):
                continue
            start = time.perf_counter()
            bound = bind(kernel, run, capability)
            done = compile_kernel(kernel, bound.types, bound.constants, capability, bound.warps)
            faults = broken(name, done, capability)
            took = time.perf_counter() - start
            numbers = f"{done.shared:>7} {done.registers:>9} {done.spilled:>7} {took:>7.1f}"
            print(f"{name:<36} {capability:>4} {numbers}", *faults, sep="  ! " if faults else "", flush=True)
            failed += bool(faults)
            compiled += 1
    print(f"{compiled} compiled, {failed} exceed a bound")
    return 1 if failed or not compiled else 0


if __name__ == "__main__":
    sys.exit(main())
