"""Faults must not pass in silence: for each rule a few lines that break it, and the same lines put right."""

from __future__ import annotations

import numpy as np
import pytest

from tools.ptxsim.memory import GlobalMemory, Placed
from tools.ptxsim.order import Fault
from tools.ptxsim.tests.assembly import run

GLOBAL = (
    "ld.param.b64 %rd0, [kernel_param_0]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd1, %r1, 4; add.s64 %rd0, %rd0, %rd1;"
)
OTHER = (
    "xor.b32 %r4, %r1, 32; mul.wide.u32 %rd2, %r4, 4; ld.param.b64 %rd3, [kernel_param_0]; add.s64 %rd2, %rd3, %rd2;"
)
STACK = ".local .align 4 .b8 stack[16]; mov.b64 %rd5, stack; mov.u32 %r1, %tid.x;"
SHARED = "mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 2; xor.b32 %r3, %r2, 128;"  # %r3: a place of the other warp
COPY = "shl.b32 %r4, %r1, 4; xor.b32 %r5, %r4, 512; ld.param.b64 %rd0, [kernel_param_0];"
COPIED = "cp.async.cg.shared.global [%r4 + 0], [%rd0 + 0], 0x10; cp.async.commit_group;"


def attempt(lines: str, *, writable: bool = True, blocks: int = 1, size: int = 256, dependent: bool = False) -> None:
    """64 threads, a tensor of 64 numbers."""
    memory = GlobalMemory([Placed("x", np.zeros(size, np.uint8), writable), Placed("y", np.zeros(64, np.uint8), True)])
    run(lines, threads=64, blocks=blocks, shared=1024, memory=memory, dependent=dependent)


def store(data: str) -> str:
    return f"st.global.b32 [%rd0], {data};"


BROKEN = {
    "out of bounds by 1 lanes, at byte 256 of x": (
        GLOBAL + "ld.global.b32 %r2, [%rd0 + 4];",
        GLOBAL + "ld.global.b32 %r2, [%rd0];",
    ),
    "out of bounds by 1 lanes, at byte -4 of x": (GLOBAL + "ld.global.b32 %r2, [%rd0 + -4];", None),
    "far from every tensor": ("mov.u64 %rd0, 0; ld.global.b32 %r2, [%rd0];", None),
    "misaligned global read of 8": (GLOBAL + "ld.global.b64 %rd2, [%rd0];", GLOBAL + "ld.global.b32 %r3, [%rd0];"),
    "two lanes write different values to one address": (
        "ld.param.b64 %rd0, [kernel_param_0]; mov.u32 %r1, %tid.x;" + store("%r1"),
        "ld.param.b64 %rd0, [kernel_param_0]; mov.u32 %r1, 3;" + store("%r1"),
    ),
    "global race: read after another warp's write": (
        GLOBAL + OTHER + "st.global.b32 [%rd0], %r1; ld.global.b32 %r2, [%rd2];",
        GLOBAL + OTHER + "st.global.b32 [%rd0], %r1; bar.sync 0; ld.global.b32 %r2, [%rd2];",
    ),
    "global race: write after another warp's read": (
        GLOBAL + OTHER + "ld.global.b32 %r2, [%rd0]; st.global.b32 [%rd2], %r1;",
        GLOBAL + OTHER + "ld.global.b32 %r2, [%rd0]; bar.sync 0; st.global.b32 [%rd2], %r1;",
    ),
    "global race: write after another warp's write": (
        GLOBAL + OTHER + "st.global.b32 [%rd0], %r1; st.global.b32 [%rd2], %r1;",
        GLOBAL + OTHER + "st.global.b32 [%rd0], %r1; bar.sync 0; st.global.b32 [%rd2], %r1;",
    ),
    "through the cache of constants": (GLOBAL + "ld.global.nc.b32 %r2, [%rd0];", GLOBAL + "ld.global.b32 %r2, [%rd0];"),
    "local memory read before it was written": (
        STACK + "st.local.b32 [%rd5+8], %r1; ld.local.b32 %r2, [%rd5+4];",
        STACK + "st.local.b32 [%rd5+4], %r1; ld.local.b32 %r2, [%rd5+4];",
    ),
    "local access, or outside 16 bytes": (
        STACK + "st.local.b32 [%rd5+16], %r1;",
        STACK + "st.local.b32 [%rd5+12], %r1;",
    ),
    "misaligned local access": (STACK + "st.local.b32 [%rd5+2], %r1;", None),
    "outside 1024 bytes": (SHARED + "st.shared.b32 [%r2 + 772], %r1;", SHARED + "st.shared.b32 [%r2 + 768], %r1;"),
    "misaligned shared access of 4": (SHARED + "st.shared.b32 [%r2 + 2], %r1;", None),
    "shared memory read before it was written": (
        SHARED + "ld.shared.b32 %r4, [%r2];",
        SHARED + "st.shared.b32 [%r2], %r1; ld.shared.b32 %r4, [%r2];",
    ),
    "read after another warp's write": (
        SHARED + "st.shared.b32 [%r2], %r1; ld.shared.b32 %r4, [%r3];",
        SHARED + "st.shared.b32 [%r2], %r1; bar.sync 0; ld.shared.b32 %r4, [%r3];",
    ),
    "write after another warp's read": (
        SHARED + "st.shared.b32 [%r2], %r1; bar.sync 0; ld.shared.b32 %r4, [%r2]; st.shared.b32 [%r3], %r1;",
        SHARED + "st.shared.b32 [%r2], %r1; bar.sync 0; ld.shared.b32 %r4, [%r2]; bar.sync 0;st.shared.b32 [%r3], %r1;",
    ),
    "write after another warp's write": (
        SHARED + "st.shared.b32 [%r2], %r1; st.shared.b32 [%r3], %r1;",
        SHARED + "st.shared.b32 [%r2], %r1; bar.sync 0; st.shared.b32 [%r3], %r1;",
    ),
    "shared race: two lanes write different values": (
        SHARED + "and.b32 %r2, %r2, 124; st.shared.b32 [%r2], %r1;",
        SHARED + "st.shared.b32 [%r2], %r1;",
    ),
    "read while cp.async is in flight": (
        SHARED + COPY + COPIED + "ld.shared.b32 %r6, [%r4];",
        SHARED + COPY + COPIED + "cp.async.wait_group 0; ld.shared.b32 %r6, [%r4];",
    ),
    "written while cp.async is in flight": (
        SHARED + COPY + COPIED + "bar.sync 0; st.shared.b32 [%r4], %r1;",
        SHARED + COPY + COPIED + "cp.async.wait_group 0; bar.sync 0; st.shared.b32 [%r4], %r1;",
    ),
    # Waiting is for the thread's own copies: those of others need a barrier behind the wait.
    "shared race: read after another warp's write": (
        SHARED + COPY + COPIED + "bar.sync 0; cp.async.wait_group 0; ld.shared.b32 %r6, [%r5];",
        SHARED + COPY + COPIED + "cp.async.wait_group 0; bar.sync 0; ld.shared.b32 %r6, [%r5];",
    ),
    "bar.sync by a part of a block": (
        "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; @%p1 bra $A; bar.sync 0; $A: mov.u32 %r2, 1;",
        "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; @%p1 bra $A; mov.u32 %r2, 0; $A: bar.sync 0;",
    ),
    "shfl.sync by a part of a warp": (
        "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 48; @%p1 shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;",
        "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; @%p1 shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;",
    ),
    "shfl.sync by a part of a warp, at": (  # whose other threads are at another one; and where they come later
        "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 16; @%p1 bra $A; shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;"
        "bra.uni $B; $A: shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1; $B: mov.u32 %r3, 1;",
        "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 16; bra.uni $C; $A: mov.u32 %r3, 1;"
        "$B: shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1; bra.uni $D;"
        "$C: @%p1 bra $A; mov.u32 %r3, 2; bra.uni $B; $D: mov.u32 %r3, 3;",
    ),
    "redux.sync by a part of a warp": (
        "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 48; @%p1 redux.sync.add.s32 %r2, %r1, -1;",
        "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; @%p1 redux.sync.add.s32 %r2, %r1, -1;",
    ),
    "does not end": ("$A: bra $A;", None),
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_fault_is_noticed(message: str) -> None:
    wrong, right = BROKEN[message]
    with pytest.raises(Fault, match=message):
        attempt(wrong)
    if right is not None:
        attempt(right)


def test_what_a_kernel_reads_is_not_written() -> None:
    lines = GLOBAL + store("%r1")
    attempt(lines)
    with pytest.raises(Fault, match=r"global write to x, which the kernel must only read, at `st\.global\.b32"):
        attempt(lines, writable=False)


@pytest.mark.parametrize("what", ["ld.global.b32 %r2, [%rd0];", store("3")])
def test_blocks_do_not_share_what_one_writes(what: str) -> None:
    attempt(GLOBAL + "ld.global.b32 %r2, [%rd0];", blocks=2)
    first = "mov.u32 %r4, %ctaid.x; setp.eq.s32 %p1, %r4, 0; @%p1 " + store("3")
    with pytest.raises(Fault, match="what another block writes"):
        attempt(GLOBAL + first + what, blocks=2)


#: Each of two blocks writes 64 numbers, and the one that adds last reads those of the other.
ANNOUNCED = (
    "ld.param.b64 %rd0, [kernel_param_0]; ld.param.b64 %rd5, [kernel_param_1]; mov.u32 %r1, %tid.x;"
    "mov.u32 %r4, %ctaid.x; setp.eq.s32 %p1, %r1, 0; setp.eq.s32 %p2, %r4, 1; mov.u32 %r5, 1;"
    "mad.lo.s32 %r2, %r4, 64, %r1; mul.wide.u32 %rd1, %r2, 4; add.s64 %rd1, %rd0, %rd1;"
    "xor.b32 %r3, %r2, 64; mul.wide.u32 %rd2, %r3, 4; add.s64 %rd2, %rd0, %rd2;",
    "st.global.b32 [%rd1], %r2;",
    "bar.sync 0;",
    "@%p1 atom.global.gpu.acq_rel.add.u32 %r6, [%rd5], %r5;",
    "bar.sync 0;",
    "@%p2 ld.global.b32 %r7, [%rd2];",
)


def test_blocks_read_what_others_announced() -> None:
    attempt("".join(ANNOUNCED), blocks=2, size=512)
    attempt(
        "".join((*ANNOUNCED, "@%p2 st.global.b32 [%rd5], %r1;"))
        .replace("%p2 st", "%p3 st")
        .replace("mov.u32 %r5, 1;", "mov.u32 %r5, 1; and.pred %p3, %p1, %p2;"),
        blocks=2,
        size=512,
    )


@pytest.mark.parametrize("left_out", [2, 3, 4])
def test_without_a_part_of_it_they_must_not(left_out: int) -> None:
    with pytest.raises(Fault, match="global read of what another block writes"):
        attempt("".join(text for place, text in enumerate(ANNOUNCED) if place != left_out), blocks=2, size=512)


@pytest.mark.parametrize("order", ["release", "acquire", "relaxed"])
def test_an_addition_releases_and_acquires_as_it_says(order: str) -> None:
    """Each block adds once: the last must acquire what the first must have released."""
    with pytest.raises(Fault, match="global read of what another block writes"):
        attempt("".join(ANNOUNCED).replace("acq_rel", order), blocks=2, size=512)


@pytest.mark.parametrize("order", ["release", "relaxed"])
def test_who_reads_what_others_added_to_acquires_what_they_released(order: str) -> None:
    """Also through additions without order that stand between; and nothing of who did not release."""
    first, last = (f"@%p1 atom.global.gpu.{one}.add.u32 %r6, [%rd5], %r5;" for one in (order, "relaxed"))
    reads = "".join((*ANNOUNCED[:3], first, last, "@%p1 ld.global.gpu.acquire.b32 %r6, [%rd5];", *ANNOUNCED[4:]))
    if order == "release":
        attempt(reads, blocks=2, size=512)
    else:
        with pytest.raises(Fault, match="global read of what another block writes"):
            attempt(reads, blocks=2, size=512)


def test_the_first_to_announce_sees_nothing_of_the_other() -> None:
    with pytest.raises(Fault, match="global read of what another block writes"):
        attempt("".join(ANNOUNCED).replace("@%p2", "@!%p2"), blocks=2, size=512)
    count = "".join(ANNOUNCED) + "setp.eq.s32 %p3, %r4, 0; and.pred %p3, %p1, %p3; @%p3 st.global.b32 [%rd5], %r1;"
    with pytest.raises(Fault, match="global write of what another block writes"):
        attempt(count, blocks=2, size=512)


# -- dependent launches -----------------------------------------------------------------------------------------------

WAITS, LETS_IN = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
EARLY = {
    "read": GLOBAL + "ld.global.b32 %r2, [%rd0];" + WAITS,
    "write": GLOBAL + LETS_IN + "st.global.b32 [%rd0], 3;" + WAITS,
    "addition": "ld.param.b64 %rd5, [kernel_param_1]; atom.global.gpu.acq_rel.add.u32 %r6, [%rd5], 1;" + WAITS,
    "copy": SHARED + COPY + COPIED + WAITS,
    "read behind the wait of the other warp": GLOBAL
    + f"setp.lt.u32 %p1, %r1, 32; @%p1 {WAITS} ld.global.b32 %r2, [%rd0]; {WAITS}",
}


@pytest.mark.parametrize("what", EARLY)
def test_a_dependent_launch_touches_nothing_before_it_waits(what: str) -> None:
    attempt(EARLY[what])
    with pytest.raises(
        Fault, match=r"global access of a dependent launch before griddepcontrol\.wait, at `(ld|st|atom|cp)"
    ):
        attempt(EARLY[what], dependent=True)
    attempt(WAITS + LETS_IN + EARLY[what], dependent=True)


PREFETCH = "ld.param.b64 %rd0, [kernel_param_0]; cp.async.bulk.prefetch.L2.global [%rd0 + {}], {};"


def test_a_prefetch_may_stand_before_the_wait() -> None:
    attempt(PREFETCH.format(16, 240) + WAITS, writable=False, dependent=True)


@pytest.mark.parametrize(
    ("first", "size", "writable", "said"),
    [
        (8, 16, False, "misaligned prefetch"),
        (0, 24, False, "misaligned prefetch"),
        (16, 256, False, "prefetch out of bounds"),
        (-16, 16, False, "does not only read"),
        (0, 16, True, "does not only read"),
    ],
)
def test_a_prefetch_is_of_what_is_only_read(first: int, size: int, writable: bool, said: str) -> None:
    with pytest.raises(Fault, match=said):
        attempt(PREFETCH.format(first, size), writable=writable)


def test_all_threads_of_a_dependent_launch_wait() -> None:
    lines = "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 63; @%p1 " + WAITS
    attempt(lines)
    with pytest.raises(Fault, match=r"threads of a dependent launch end without griddepcontrol\.wait"):
        attempt(lines, dependent=True)
    attempt(lines + WAITS, dependent=True)


# -- wgmma -------------------------------------------------------------------------------------------------------------

OUT = ",".join(f"%r{n}" for n in range(10, 14))
FILL = "mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 4; mov.u32 %r3, 0;" + "".join(
    f"st.shared.v4.b32 [%r2 + {start}], {{%r3, %r3, %r3, %r3}};" for start in (0, 2048, 4096, 6144)
)
ZERO = "".join(f"mov.u32 %r{n}, 0;" for n in range(10, 14))
A_IN_REGISTERS = "".join(f"mov.u32 %r{n}, 0;" for n in range(20, 24))
NAME = f"mov.u64 %rd1, {3 << 62 | 16 << 32};"  # lines of 32 bytes: 64 rows of A are 2048 bytes, 8 of B 256
PRODUCT = f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{{OUT}}}, %rd1, %rd1, 1, 1, 1, 0, 0;"
FROM_REGISTERS = PRODUCT.replace("%rd1, %rd1", "{%r20,%r21,%r22,%r23}, %rd1").replace("1, 1, 1, 0, 0", "1, 1, 1, 0")
FENCE, BAR, ORDER = "fence.proxy.async.shared::cta;", "bar.sync 0;", "wgmma.fence.sync.aligned;"
COMMIT, WAIT = "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"
READY = FILL + ZERO + A_IN_REGISTERS + NAME + FENCE + BAR + ORDER

WGMMA = {
    "without fence.proxy.async": READY.replace(FENCE, "") + PRODUCT,
    "what was written since the last bar.sync": READY.replace(BAR, "") + PRODUCT,
    "the first wgmma of a kernel without wgmma.fence": READY.replace(ORDER, "") + PRODUCT,
    "%r21, which threads used since the last wgmma.fence": READY + "mov.u32 %r21, 1;" + FROM_REGISTERS,
    "%r13, which threads used since": READY + PRODUCT + COMMIT + WAIT + "add.s32 %r4, %r13, 1;" + PRODUCT,
    "reads shared memory before it was written": READY.replace("[%r2 + 0]", "[%r2 + 2048]") + PRODUCT,
    "outside shared memory": READY.replace(NAME, f"mov.u64 %rd1, {3 << 62 | 1000 << 32};") + PRODUCT,
    "differs within the warpgroup": READY + "cvt.u64.u32 %rd2, %r1; or.b64 %rd1, %rd1, %rd2;" + PRODUCT,
    "%r11 is read while wgmma in flight writes it": READY + PRODUCT + COMMIT + "add.s32 %r4, %r11, 1;",
    "%r11 is written while wgmma in flight uses it": READY + PRODUCT + COMMIT + "mov.u32 %r11, 1;",
    "%r22 is written while wgmma in flight uses it": READY + FROM_REGISTERS + COMMIT + "mov.u32 %r22, 1;",
    "%r12 is read while wgmma in flight": READY + PRODUCT + WAIT + COMMIT + "add.s32 %r4, %r12, 1;",
    "written while wgmma in flight reads it": READY + PRODUCT + COMMIT + BAR + "st.shared.b32 [%r2], %r1;",
    # Each warp waits for its own part of the product only.
    "write after another warp's read": READY + PRODUCT + COMMIT + BAR + WAIT + "st.shared.b32 [%r2], %r1;",
    "fence.proxy.async by a part of a block": READY + "setp.lt.u32 %p1, %r1, 32; @%p1 " + FENCE,
}
RIGHT = [
    READY + PRODUCT + COMMIT + WAIT + "add.s32 %r4, %r11, 1;",
    READY + FROM_REGISTERS + COMMIT + "add.s32 %r4, %r22, 1;" + WAIT + "mov.u32 %r22, 1;",
    READY + PRODUCT + PRODUCT + COMMIT + WAIT + BAR + "st.shared.b32 [%r2], %r1;",
    READY + PRODUCT + COMMIT + ORDER + FROM_REGISTERS + COMMIT + WAIT,
]


@pytest.mark.parametrize("message", WGMMA)
def test_a_product_out_of_order_is_noticed(message: str) -> None:
    with pytest.raises(Fault, match=message):
        run(WGMMA[message], threads=128, shared=8192)


@pytest.mark.parametrize("lines", RIGHT, ids=range(len(RIGHT)))
def test_products_in_order_pass(lines: str) -> None:
    run(lines, threads=128, shared=8192)


def test_copies_are_of_the_generic_proxy() -> None:
    """Triton 3.6.0 leaves out a fence between cp.async and wgmma, after the wait."""
    copied = "ld.param.b64 %rd0, [kernel_param_0];" + "".join(
        f"cp.async.cg.shared.global [%r2 + {start}], [%rd0 + 0], 0x10;" for start in (0, 2048)
    )
    wait = "cp.async.commit_group; cp.async.wait_group 0;"
    memory = GlobalMemory([Placed("x", np.zeros(16, np.uint8), False)])
    start = "mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 4;" + ZERO + NAME + copied
    run(start + wait + BAR + FENCE + ORDER + PRODUCT, threads=128, shared=8192, memory=memory)
    for wrong in (start + wait + BAR + ORDER + PRODUCT, start + FENCE + wait + BAR + ORDER + PRODUCT):
        with pytest.raises(Fault, match=r"without fence\.proxy\.async, at `wgmma"):
            run(wrong, threads=128, shared=8192, memory=memory)
