"""The clock against sums by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tools.ptxsim.asynchronous import Copies, Products
from tools.ptxsim.clock import ALU, BARRIER, EXCHANGE, L1, L2, SHARED, SPECIAL, Clock
from tools.ptxsim.machine import Machine
from tools.ptxsim.memory import GlobalMemory, Placed
from tools.ptxsim.program import prepare
from tools.ptxsim.tests.assembly import assembled

START = "mov.u32 %r1, 1; "
RETURN = 1


def cycles(lines: str, threads: int = 32, blocks: int = 1, tensors: int = 0, shared: int = 0) -> int:
    memory = GlobalMemory([Placed(f"tensor {n}", np.zeros(512, np.uint8), True) for n in range(tensors)])
    addresses = [memory.address(number) for number in range(tensors)]
    machine = Machine(prepare(assembled(lines, threads, tensors)), (blocks,), addresses, memory, shared)
    machine.copies, machine.products = Copies(machine.lanes), Products(machine)
    machine.clock = Clock(machine.lanes // 32, threads // 32)
    machine.run()
    return machine.clock.cycles


@pytest.mark.parametrize(
    ("step", "latency"),
    [
        ("add.s32 %r1, %r1, %r1;", ALU),
        ("selp.b32 %r1, %r1, %r1, %p1;", ALU),
        ("redux.sync.max.s32 %r1, %r1, -1;", EXCHANGE),
        ("shfl.sync.idx.b32 %r1, %r1, %r1, 31, -1;", EXCHANGE),
        ("rsqrt.approx.f32 %r1, %r1;", SPECIAL),
    ],
)
def test_what_depends_on_what_is_before_it_waits(step: str, latency: int) -> None:
    def of(count: int) -> int:
        return cycles(START + "setp.eq.s32 %p1, %r1, %r1; " + step * count)

    assert of(9) - of(2) == 7 * latency


def test_what_is_independent_takes_a_turn_each_and_64_bits_two() -> None:
    def of(count: int, step: str) -> int:
        return cycles(START + step * count)

    assert of(90, "add.s32 %r2, %r1, %r1;") - of(80, "add.s32 %r2, %r1, %r1;") == 10
    assert of(90, "add.s64 %rd2, %rd1, %rd1;") - of(80, "add.s64 %rd2, %rd1, %rd1;") == 20


def test_a_guard_is_an_operand_and_a_lane_that_is_switched_off_takes_its_turn() -> None:
    compare = START + "setp.ne.s32 %p1, %r1, %r1; "
    assert (
        cycles(compare + "@%p1 add.s32 %r1, %r1, %r1; add.s32 %r1, %r1, %r1; bar.sync 0;") == 3 * ALU + BARRIER + RETURN
    )


def test_memory_is_far_the_first_time() -> None:
    load = "ld.param.u64 %rd1, [kernel_param_0]; ld.global.b32 %r1, [%rd1]; add.s32 %r1, %r1, %r1; bar.sync 0;"
    again = "ld.global.b32 %r2, [%rd1]; add.s32 %r2, %r2, %r1; bar.sync 0;"
    first = cycles(load, tensors=1)
    assert first == ALU + L2 + BARRIER + RETURN
    assert cycles(load + again, tensors=1) == first + L1 + BARRIER
    assert cycles(load + again.replace("[%rd1]", "[%rd1+64]"), tensors=1) == first + L2 + BARRIER
    stored = "st.global.b32 [%rd1+64], %r1; "
    assert cycles(load + stored + again.replace("[%rd1]", "[%rd1+64]"), tensors=1) == first + L1 + BARRIER


def test_shared_memory_and_barriers_of_several_warps() -> None:
    lines = "mov.u32 %r1, 0; st.shared.b32 [%r1], 7; bar.sync 0; ld.shared.b32 %r2, [%r1]; add.s32 %r2, %r2, %r2; "
    assert cycles(lines + "bar.sync 0;", shared=16) == ALU + BARRIER + SHARED + BARRIER + RETURN


def test_warps_share_four_schedulers() -> None:
    lines = START + "add.s32 %r2, %r1, %r1;" * 100
    alone = cycles(lines)
    assert cycles(lines, threads=128) == alone
    assert cycles(lines, threads=256) == 2 * alone
    assert cycles(lines, threads=128, blocks=3) == alone
