"""The check of machine code refuses what keeps memory waiting, and passes what does not; no GPU is needed."""

# Triton compiles the kernel below; mypy does not know its types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"

from __future__ import annotations

from collections import defaultdict
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

pytest.importorskip("triton", reason="the extra triton is not installed")

import triton
import triton.language as tl

from benchmarks.ahead_of_time import Compiled, compile_kernel
from benchmarks.gpu import steps, traffic
from benchmarks.machine_code import DEVICES, EXCEPTIONS, Streamed, arguments_of_lines, order_faults, streams
from benchmarks.sass import UnknownCode, disassemble, loops, parse
from tests.plugins.cases import kernels, some
from tools.cuda.launches import storage_of

#: Bytes of an argument that a step reads, below which it may be anywhere.
SMALL = 1 << 20


@triton.jit(do_not_specialize=["width"])
def _gathered(
    q, pages, table, out, count, width,
    SIZE: tl.constexpr, TILE: tl.constexpr, AHEAD: tl.constexpr, FIXED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum products with pages, whose numbers are in a table; AHEAD loads them a turn before they are needed."""
    row, lane, slot = tl.arange(0, 16), tl.arange(0, SIZE), tl.arange(0, TILE)
    queries = tl.load(q + row[:, None] * SIZE + lane[None, :])
    sums = tl.zeros([16, TILE], tl.float32)
    if AHEAD:
        page = tl.load(table + slot // 16, mask=slot < count, other=0).to(tl.int64)
    for start in tl.range(0, count, TILE, num_stages=STAGES):
        if not AHEAD:
            page = tl.load(table + (start + slot) // 16, mask=start + slot < count, other=0).to(tl.int64)
        at = (page * 16 + slot % 16) * (SIZE if FIXED else width)
        known = (start + slot < count)[:, None]
        keys = tl.load(pages + at[:, None] + lane[None, :], mask=known, other=0.0)
        sums = tl.dot(queries, tl.trans(keys), sums)
        if AHEAD:
            ahead = start + TILE + slot
            page = tl.load(table + ahead // 16, mask=ahead < count, other=0).to(tl.int64)
    tl.store(out + row[:, None] * TILE + slot[None, :], sums)


def compiled(capability: int, *, ahead: bool, fixed: bool = True, stages: int, **options: int) -> Compiled:
    def launch() -> None:
        _gathered[1,](
            some("bf16", 16, 64), some("bf16", 8, 16, 64), some("i64", 64), some("fp32", 16, 32), 1000, 64,
            SIZE=64, TILE=32, AHEAD=ahead, FIXED=fixed, STAGES=stages, **({"num_warps": 4} | options),
        )  # fmt: skip

    return compile_kernel(_gathered, launch, capability)


def checked(capability: int, *, ahead: bool, fixed: bool = True, stages: int) -> list[Streamed]:
    done = compiled(capability, ahead=ahead, fixed=fixed, stages=stages)
    return streams(done.cubin, done.ptx, list(done.names), ("pages",))


@pytest.mark.parametrize("capability", [90, 100])
def test_a_loop_that_waits_for_its_own_copies_is_refused(capability: int) -> None:
    """Attention once was such a loop: its page numbers were loaded where they are used, so that no copy ran ahead."""
    loop, *_ = checked(capability, ahead=False, stages=2)
    assert loop.product
    assert (loop.overlap, loop.tile) == (0, 32)
    assert "0 of 32 bytes of the next tile pending" in loop.faults["overlap"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_a_loop_with_a_tile_pending_passes(capability: int) -> None:
    loop, *others = checked(capability, ahead=True, stages=4)
    assert loop.faults == {}
    assert loop.overlap >= loop.tile == 32
    assert loop.in_flight >= 3 * loop.tile
    assert not any(part.looped for part in others)


def test_narrow_copies_are_refused() -> None:
    """Where nobody told the compiler that rows begin at multiples of 16 bytes."""
    loop, *_ = checked(90, ahead=True, fixed=False, stages=4)
    assert "LDG" in loop.faults["width"]


def test_spills_are_seen() -> None:
    """A kernel of one warp spills when its threads may not use the registers that they need."""
    assert compiled(90, ahead=True, stages=4, num_warps=1).spilled == 0
    assert compiled(90, ahead=True, stages=4, num_warps=1, maxnreg=40).spilled > 0


def test_what_a_load_reads_is_followed_to_the_argument() -> None:
    """Not to where the number of its page came from."""
    ptx = """.visible .entry one(
	.param .u64 .ptr .global .align 1 one_param_0,
	.param .u64 .ptr .global .align 1 one_param_1,
	.param .u32 one_param_2
)
	.loc	1 10 20 // file.py:10:20
	ld.param.b64 	%rd1, [one_param_0];
	ld.param.b64 	%rd2, [one_param_1];
	ld.param.b32 	%r1, [one_param_2];
	mul.wide.s32 	%rd3, %r1, 8;
	add.s64 	%rd4, %rd2, %rd3;
	@%p1 ld.global.b64 { %rd5 }, [ %rd4 + 0 ];
	.loc	1 11 20 // file.py:11:20 @[ file.py:30:4 ]
	shl.b64 	%rd6, %rd5, 4;
	add.s64 	%rd7, %rd1, %rd6;
	cp.async.cg.shared.global [ %r9 + 0 ], [ %rd7 + 0 ], 0x10, %r10;
"""
    found = arguments_of_lines(ptx, ["pages", "table", "count"])
    assert found == {"file.py:10": frozenset({"table"}), "file.py:11": frozenset({"pages"})}


def test_loops_are_those_of_control_and_not_of_addresses() -> None:
    """The block at the end turns in place and returns into the loop: it is no second loop around half of it."""
    code = """
        /*0000*/                   MOV R1, R2 ;
.L_x_0:
        /*0010*/                   LDGDEPBAR ;
        /*0020*/              @!P0 BRA `(.L_x_2) ;
.L_x_1:
        /*0030*/                   HMMA.16816.F32.BF16 R4, R4, R8, R4 ;
        /*0040*/               @P1 BRA `(.L_x_0) ;
        /*0050*/                   EXIT ;
.L_x_2:
        /*0060*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R4 ;
        /*0070*/               @P0 BRA `(.L_x_1) ;
        /*0080*/                   BRA `(.L_x_2) ;
"""
    spin, loop = loops(parse(code))
    assert [each.base for each in spin.own] == ["SYNCS", "BRA", "BRA"]
    assert [each.base for each in loop.own] == ["LDGDEPBAR", "BRA", "HMMA", "BRA"]


#: Machine code, and what is wrong with it.
ORDERS = {
    "ACQBULK; PREEXIT; LDG.E R4, [R2]; EXIT": "",
    "LDG.E R4, [R2]; ACQBULK; PREEXIT; EXIT": "LDG.E of  before the wait",
    "@!P0 ACQBULK; PREEXIT; STG.E [R2], R4; EXIT": "STG.E of  before the wait",
    "PREEXIT; ACQBULK; EXIT": "PREEXIT of  before the wait",
    "@P0 EXIT; ACQBULK; PREEXIT; EXIT": "EXIT of  before the wait",
    "ACQBULK; EXIT": "EXIT of  before the next kernel is let in",
    "@P0 BRA `(.L_x_1); ACQBULK; PREEXIT; .L_x_1:; RED.E [R2], R4; EXIT": "RED.E of  before the wait",
    "ACQBULK; @P0 BRA `(.L_x_1); IADD3 R1, R1, R2; .L_x_1:; PREEXIT; LDG.E R4, [R2]; EXIT": "",
    "UTCATOMSWS.FIND_AND_SET.ALIGN UP0, UR6, UR6; ACQBULK; PREEXIT; EXIT": "",
    "ACQBULK; PREEXIT; UTCATOMSWS.FIND_AND_SET.ALIGN UP0, UR6, UR6; EXIT": "tensor memory is taken",
}


@pytest.mark.parametrize("code", ORDERS)
def test_what_a_dependent_launch_must_not_do_is_found(code: str) -> None:
    rows = (
        f"/*{n:04x}*/ {row.strip()} ;" if row.strip()[-1] != ":" else row.strip()
        for n, row in enumerate(code.split(";"))
    )
    found = order_faults(parse("\n".join(rows)), 90)
    assert bool(found) == bool(ORDERS[code])
    assert all(ORDERS[code] in fault for fault in found[-1:])


def test_no_kernel_waits_on_an_architecture_without() -> None:
    wait, plain = parse("/*0000*/ ACQBULK ;\n/*0010*/ EXIT ;"), parse("/*0000*/ LDG.E R4, [R2] ;\n/*0010*/ EXIT ;")
    assert order_faults(plain, 89) == []
    assert order_faults(wait, 89) == ["ACQBULK below compute capability 9.0"]
    assert order_faults(plain, 90)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("capability", [89, 90, 100, 120])
def test_the_order_of_a_kernel(capability: int) -> None:
    """A kernel of the product waits before it reads; one that does not wait is reported."""
    page = kernels()["write_pages_kernel"]
    done = compile_kernel(page.kernel, page.launches["write bf16 path"], capability)
    assert done.dependent == (capability >= 90)
    assert order_faults(disassemble(done.cubin), capability) == []
    other = disassemble(compiled(capability, ahead=True, stages=4).cubin)
    assert bool(order_faults(other, capability)) == (capability >= 90)


@pytest.mark.parametrize("capability", [90, 100, 120])
def test_weights_are_asked_for_ahead_of_the_wait(capability: int) -> None:
    """By an instruction that is no access, so that the rule of order lets it pass; once."""
    linear = kernels()["linear_kernel"]
    done = compile_kernel(linear.kernel, linear.launches["split product fp8"], capability)
    code = [it.base for block in disassemble(done.cubin) for it in block.code]
    assert code.index("UBLKPF") < code.index("ACQBULK")
    assert code.count("UBLKPF") == 1


def test_code_that_is_not_modelled_is_an_error() -> None:
    with pytest.raises(UnknownCode, match="UBLKCP"):
        parse("        /*0000*/                   UBLKCP.S.G [UR8], [UR4], UR6 ;")


def test_blocks_that_a_multiprocessor_holds() -> None:
    """Bounded by registers, by shared memory, and by warps."""
    assert DEVICES[90].resident(4, 163, 49152) == 3
    assert DEVICES[90].resident(4, 64, 65536) == 3
    assert DEVICES[120].resident(8, 32, 0) == 6


def test_exceptions_name_launches() -> None:
    names = [name for kernel in kernels().values() for name in kernel.launches]
    assert [part for part, _, _ in EXCEPTIONS if not any(part in name for name in names)] == []


def test_what_a_step_reads_from_memory_is_checked() -> None:
    """Large weights, pages and logits that any kernel of a step reads are `streamed`."""
    read: defaultdict[str, set[str]] = defaultdict(set)

    class Meter(traffic.Meter):
        def kernel(self, kernel: Any, *args: Any, **options: Any) -> None:
            names = [name for name in kernel.arg_names if name not in options]
            rule, given = kernels()[kernel.__name__], dict(zip(names, args, strict=True))
            part, _ = rule.touched(given | options, self._context)
            for name, value in given.items():
                if isinstance(value, Tensor) and name not in rule.writes:
                    large = part.get(name, traffic.whole(value)) > SMALL
                    role = self._roles.get(storage_of(value), traffic.WEIGHTS)
                    if large and role != traffic.ACTIVATIONS:
                        read[kernel.__name__].add(name)
            super().kernel(kernel, *args, **options)

    with patch.object(steps, "Meter", Meter):
        steps.count(steps.Step("d2sd", batch=8, params=steps.FILTERED))
    assert {"cascade_attention_kernel", "scores_kernel"} <= read.keys()
    assert [name for name, found in read.items() if not found.issubset(kernels()[name].streamed)] == []
