"""Memory, warps and matrices: each instruction against loops that follow the PTX manual's tables."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from functools import reduce

import numpy as np
import pytest

from tools.ptxsim import transfers
from tools.ptxsim.memory import GlobalMemory, Placed
from tools.ptxsim.tests.assembly import run
from tools.ptxsim.values import UNSIGNED, Array, decode, encode

DICE = np.random.default_rng(0)
LANES = range(32)


def memory_of(*tensors: Array) -> GlobalMemory:
    return GlobalMemory([Placed(f"t{n}", t.view(np.uint8).reshape(-1).copy(), True) for n, t in enumerate(tensors)])


def words(*shape: int) -> Array:
    return DICE.integers(0, 1 << 32, shape, dtype=np.uint64).astype(np.uint32)


@pytest.mark.parametrize(("count", "bits"), [(1, 8), (1, 16), (1, 32), (1, 64), (2, 32), (4, 32), (2, 64), (4, 16)])
@pytest.mark.parametrize("space", ["global", "shared"])
def test_loads_and_stores(count: int, bits: int, space: str) -> None:
    """Every other lane, from one tensor to another; through shared memory on the way or not."""
    given = words(32, count * bits // 32 or 1).view(UNSIGNED[bits])[:, :count].copy()
    memory = memory_of(given, np.zeros_like(given))
    prefix = {8: "%rs", 16: "%rs", 32: "%r", 64: "%rd"}[bits]
    registers = ", ".join(f"{prefix}{4 + n}" for n in range(count))
    vector, data = (f".v{count}" if count > 1 else ""), f"{{ {registers} }}"
    size = count * bits // 8
    through = f"st.shared{vector}.b{bits} [%r3], {data}; bar.sync 0; ld.shared{vector}.b{bits} {data}, [%r3];"
    run(
        f"""ld.param.b64 %rd0, [kernel_param_0]; ld.param.b64 %rd1, [kernel_param_1];
        mov.u32 %r1, %tid.x; mul.lo.s32 %r3, %r1, {size}; mul.wide.u32 %rd2, %r1, {size};
        add.s64 %rd0, %rd0, %rd2; add.s64 %rd1, %rd1, %rd2; sub.s64 %rd1, %rd1, 64; and.b32 %r2, %r1, 1;
        setp.ne.s32 %p1, %r2, 0;
        ld.global{vector}.b{bits} {data}, [ %rd0 + 0 ];
        {through if space == "shared" else ""}
        @%p1 st.global{vector}.b{bits} [ %rd1 + 64 ], {data};""",
        memory=memory,
        shared=32 * size,
    )
    found = memory.data(1).view(UNSIGNED[bits]).reshape(given.shape)
    assert (found[1::2] == given[1::2]).all()
    assert not found[::2].any()


@pytest.mark.parametrize("turn", [1, -1])
def test_additions_to_memory(turn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes of one number, one after the other; each learns what was there."""
    monkeypatch.setattr(transfers, "TURN", turn)
    memory = memory_of(np.array([7, 0xFFFFFFFF], np.uint32))
    lines = """ld.param.b64 %rd0, [kernel_param_0]; mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 1; mul.wide.u32 %rd1, %r2, 4;
        add.s64 %rd0, %rd0, %rd1; setp.lt.u32 %p1, %r1, 30; mov.u32 %r3, 0;
        @%p1 atom.global.gpu.acq_rel.add.u32 %r3, [ %rd0 + 0 ], %r1;"""
    found = run(lines, memory=memory).registers["%r3"]
    now, expected = [7, 0xFFFFFFFF], [0] * 32
    for lane in range(30)[::turn]:
        expected[lane] = now[lane % 2]
        now[lane % 2] = (now[lane % 2] + lane) % (1 << 32)
    assert found.tolist() == expected
    assert memory.data(0).view(np.uint32).tolist() == now


def test_signed_numbers_are_extended() -> None:
    memory = memory_of(np.array([-5], np.int32))
    lines = "ld.param.s32 %rd1, [kernel_param_0]; ld.param.b64 %rd0, [kernel_param_0]; ld.global.s32 %rd2, [%rd0];"
    machine = run(lines, memory=memory)
    assert (machine.registers["%rd2"].view(np.int64) == -5).all()
    low = memory.address(0) & 0xFFFFFFFF
    assert (machine.registers["%rd1"].view(np.int64) == low - (1 << 32) * (low >> 31)).all()


@pytest.mark.parametrize("real", [0, 16])
def test_a_copy_lands_when_it_is_waited_for(real: int) -> None:
    given = words(32, 4)
    machine = run(
        f"""ld.param.b64 %rd0, [kernel_param_0]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd1, %r1, 16;
        add.s64 %rd0, %rd0, %rd1; shl.b32 %r2, %r1, 4; mov.u32 %r3, {real};
        cp.async.cg.shared.global [ %r2 + 0 ], [ %rd0 + 0 ], 0x10, %r3;
        cp.async.commit_group; cp.async.wait_group 0;
        ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r2];""",
        memory=memory_of(given),
        shared=512,
    )
    found = np.stack([machine.registers[f"%r{n}"] for n in range(4, 8)], 1)
    assert (found == (given if real else 0)).all()


def test_the_latest_groups_stay_in_flight() -> None:
    machine = run(
        """ld.param.b64 %rd0, [kernel_param_0]; mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 3;
        cp.async.ca.shared.global [%r2 + 0], [%rd0 + 0], 0x4; cp.async.commit_group;
        cp.async.ca.shared.global [%r2 + 4], [%rd0 + 0], 0x4; cp.async.commit_group;
        cp.async.wait_group 1; ld.shared.b32 %r3, [%r2];""",
        memory=memory_of(words(4)),
        shared=256,
    )
    assert len(machine.copies.flying) == 1
    assert machine.shared.copying.reshape(32, 2, 4).any((0, 2)).tolist() == [False, True]


def partner(mode: str, lane: int, by: int) -> int:
    wanted = {"bfly": lane ^ by, "idx": by, "up": lane - by, "down": lane + by}[mode]
    return wanted if 0 <= wanted < 32 else lane


@pytest.mark.parametrize("mode", ["bfly", "idx", "up", "down"])
@pytest.mark.parametrize("by", [1, 5, 16])
def test_shuffles(mode: str, by: int) -> None:
    given = words(64)
    machine = run(f"shfl.sync.{mode}.b32 %r1, %r0, {by}, {0 if mode == 'up' else 31}, -1;", {"%r0": given}, threads=64)
    expected = [given[32 * warp + partner(mode, lane, by)] for warp in range(2) for lane in LANES]
    assert machine.registers["%r1"].tolist() == [int(x) for x in expected]


def test_a_shuffle_stays_in_its_segment() -> None:
    given = words(32)
    machine = run(f"shfl.sync.down.b32 %r1, %r0, 5, {(32 - 8) << 8 | 31}, -1;", {"%r0": given})
    expected = [given[lane + 5 if lane % 8 < 3 else lane] for lane in LANES]
    assert machine.registers["%r1"].tolist() == [int(x) for x in expected]


@pytest.mark.parametrize("given", [np.arange(64) % 3 == 0, np.ones(64, bool), np.arange(64) < 32, np.zeros(64, bool)])
def test_votes(given: Array) -> None:
    lines = "vote.sync.ballot.b32 %r0, %p0, -1; vote.sync.any.pred %p1, %p0, -1; vote.sync.all.pred %p2, %p0, -1;"
    registers = run(lines, {"%p0": given}, threads=64).registers
    for warp in range(2):
        mine = given[32 * warp : 32 * warp + 32]
        assert int(registers["%r0"][32 * warp]) == sum(1 << lane for lane in LANES if mine[lane])
        assert (registers["%p1"][32 * warp], registers["%p2"][32 * warp]) == (mine.any(), mine.all())


# -- matrices ----------------------------------------------------------------------------------------------------------


REDUCTIONS: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "min": min,
    "max": max,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("kind", ["s32", "u32"])
def test_reductions(name: str, kind: str) -> None:
    given = words(64)
    if name in ("and", "or"):  # of few bits, or all of them are 0, or 1
        given = given | words(64) | words(64) if name == "and" else given & words(64) & words(64)
    to = "b32" if name in ("and", "or", "xor") else kind
    found = run(f"redux.sync.{name}.{to} %r2, %r1, -1;", {"%r1": given}, threads=64).registers["%r2"]
    for warp in range(2):
        numbers = [int(number) for number in decode(kind, given[32 * warp : 32 * warp + 32])]
        assert set(found[32 * warp : 32 * warp + 32].tolist()) == {reduce(REDUCTIONS[name], numbers) & 0xFFFFFFFF}


def test_warps_that_take_no_part_name_nobody() -> None:
    """Warps whose register of members was never written."""
    lines = """
        mov.u32 %r3, %tid.x; setp.ge.u32 %p1, %r3, 32; @%p1 bra $end;
        mov.b32 %r4, -1; redux.sync.max.u32 %r2, %r3, %r4; $end: ret;
    """
    assert set(run(lines, threads=64).registers["%r2"][:32].tolist()) == {31}


def test_local_memory_is_a_threads_own() -> None:
    """Addresses are of 64 bits, or of 32."""
    lines = """
        .local .align 4 .b8 stack[16];
        mov.b64 %rd1, stack; cvt.u32.u64 %r3, %rd1; mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 3; shl.b32 %r2, %r2, 2;
        add.s32 %r3, %r3, %r2; st.local.b32 [%r3], %r1; cvt.u64.u32 %rd2, %r2; add.s64 %rd2, %rd1, %rd2;
        ld.local.b32 %r4, [%rd2];
    """
    machine = run(lines)
    assert machine.registers["%r4"].tolist() == list(LANES)


def test_constants_of_a_module() -> None:
    numbers = words(2)
    table = f".global .align 4 .b8 table[8] = {{{', '.join(map(str, numbers.view(np.uint8)))}}};\n"
    memory = GlobalMemory([Placed("x", np.zeros(4, np.uint8), False), Placed("table", numbers.view(np.uint8), False)])
    machine = run(table + "mov.b64 %rd1, table; ld.global.nc.b32 %r1, [%rd1+4];", memory=memory)
    assert set(machine.registers["%r1"].tolist()) == {int(numbers[1])}


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_ldmatrix_and_stmatrix(count: int, trans: str) -> None:
    """Each is checked alone: memory is filled and read from outside."""
    matrices = DICE.integers(0, 1 << 16, (count, 8, 8)).astype(np.uint16)
    order = DICE.permutation(8 * count)  # rows lie anywhere
    rows = np.zeros((8 * count, 8), np.uint16)
    rows[order] = matrices.reshape(-1, 8)
    addresses = np.zeros(32, np.uint32)
    addresses[: 8 * count] = 16 * order
    names = [f"%r{n}" for n in range(1, count + 1)]
    lanes = np.zeros((count, 32), np.uint32)
    for number in range(count):
        for lane in LANES:
            r, c = lane // 4, lane % 4 * 2
            pair = (matrices[number, c : c + 2, r] if trans else matrices[number, r, c : c + 2]).astype(np.uint32)
            lanes[number, lane] = pair[0] | pair[1] << 16
    data = f"{{{', '.join(names)}}}"
    given = memory_of(rows)
    fill = (
        "ld.param.b64 %rd0, [kernel_param_0]; mov.u32 %r50, %tid.x; shl.b32 %r51, %r50, 4; mul.wide.u32 %rd1, %r50, 16;"
    )
    fill += f"add.s64 %rd0, %rd0, %rd1; setp.lt.u32 %p0, %r50, {8 * count};"
    fill += "@%p0 ld.global.v4.b32 {%r52, %r53, %r54, %r55}, [%rd0];"
    fill += "@%p0 st.shared.v4.b32 [%r51], {%r52, %r53, %r54, %r55};"
    loaded = run(
        fill + f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {data}, [%r0];",
        {"%r0": addresses},
        memory=given,
        shared=512,
    )
    assert (np.stack([loaded.registers[name] for name in names]) == lanes).all()
    registers = {"%r0": addresses, **dict(zip(names, lanes, strict=True))}
    stored = run(f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r0], {data};", registers, shared=512)
    assert (stored.shared.bytes[: 128 * count] == rows.view(np.uint8).reshape(-1)).all()


def a_place(lane: int, number: int) -> tuple[int, int]:
    """Row and column of number 0 .. 7 of A in a lane, from the manual."""
    row = lane // 4 + (8 if number in (2, 3, 6, 7) else 0)
    return row, lane % 4 * 2 + (number & 1) + (8 if number >= 4 else 0)


def b_place(lane: int, number: int) -> tuple[int, int]:
    return lane % 4 * 2 + (number & 1) + (8 if number >= 2 else 0), lane // 4


def c_place(lane: int, number: int) -> tuple[int, int]:
    return lane // 4 + (8 if number >= 2 else 0), lane % 4 * 2 + (number & 1)


def packed(matrix: Array, place: object, numbers: int) -> Array:
    """Registers [numbers / 2, 32] of 16-bit numbers, two a register."""
    found = np.zeros((numbers // 2, 32), np.uint32)
    for lane in LANES:
        for number in range(numbers):
            bits = np.uint32(matrix[place(lane, number)])  # type: ignore[operator]
            found[number // 2, lane] |= bits << np.uint32(16 * (number % 2))
    return found


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_mma(kind: str) -> None:
    a, b = (encode(kind, DICE.normal(size=shape)) for shape in ((16, 16), (16, 8)))
    c = DICE.normal(size=(16, 8)).astype(np.float32)
    registers = dict(zip(("%r10", "%r11", "%r12", "%r13"), packed(a, a_place, 8), strict=True))
    registers |= dict(zip(("%r20", "%r21"), packed(b, b_place, 4), strict=True))
    for number in range(4):
        registers[f"%r{30 + number}"] = np.array([c[c_place(lane, number)] for lane in LANES]).view(np.uint32)
    text = f"""mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%r0, %r1, %r2, %r3}},
        {{%r10, %r11, %r12, %r13}}, {{%r20, %r21}}, {{%r30, %r31, %r32, %r33}};"""
    found = run(text, registers).registers
    expected = decode(kind, a).astype(np.float64) @ decode(kind, b) + c
    for number in range(4):
        for lane in LANES:
            value = found[f"%r{number}"][lane : lane + 1].view(np.float32)[0]
            assert value == np.float32(expected[c_place(lane, number)])


def test_mma_of_e4m3() -> None:
    """Four numbers a register, neighbours in a row of A and in a column of B."""
    a, b = (encode("e4m3", DICE.normal(size=shape)) for shape in ((16, 32), (32, 8)))
    registers = {f"%r{30 + number}": np.zeros(32, np.uint32) for number in range(4)}
    for lane in LANES:
        row, column = lane // 4, 4 * (lane % 4)
        for number in range(4):
            part = a[row + 8 * (number % 2), column + 16 * (number // 2) :][:4]
            registers.setdefault(f"%r{10 + number}", np.zeros(32, np.uint32))[lane] = part.view(np.uint32)[0]
        for number in range(2):
            part = np.ascontiguousarray(b[column + 16 * number :, row][:4])
            registers.setdefault(f"%r{20 + number}", np.zeros(32, np.uint32))[lane] = part.view(np.uint32)[0]
    text = """mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%r0, %r1, %r2, %r3},
        {%r10, %r11, %r12, %r13}, {%r20, %r21}, {%r30, %r31, %r32, %r33};"""
    found = run(text, registers).registers
    expected = decode("e4m3", a).astype(np.float64) @ decode("e4m3", b)
    for number in range(4):
        for lane in LANES:
            value = found[f"%r{number}"][lane : lane + 1].view(np.float32)[0]
            assert value == np.float32(expected[c_place(lane, number)])


def swizzled(matrix: Array, line: int, turned: bool) -> tuple[Array, int]:
    """Bytes of [rows, 16] 16-bit numbers as a tensor map of `line` bytes lays them out, and its descriptor.

    Pieces of 16 bytes of a line are exchanged with the bits of the line's number, in groups of 8 lines; for narrower
    lines two or four of them share a number, since 128 bytes do.
    """
    rows = len(matrix)
    each = line // 2
    found, written = np.zeros(1 << 14, np.uint16), set()
    for row in range(rows):
        for column in range(16):
            along, across = (row, column) if turned else (column, row)  # numbers of a line are contiguous
            number, block = across % 8, across // 8
            start = (along // each * 2048 + block * 8 * line) if turned else block * 8 * line
            byte = number * line + along % each * 2
            mixed = byte ^ ((byte // 128) % (line // 16)) * 16
            found[(start + mixed) // 2] = matrix[row, column]
            written.add(start + mixed)
    assert len(written) == rows * 16
    mode = {128: 1, 64: 2, 32: 3}[line]
    leading, stride = (2048 if turned else 16), 8 * line
    return found.view(np.uint8), mode << 62 | stride >> 4 << 32 | leading >> 4 << 16


def written(data: Array, threads: int) -> Iterator[str]:
    yield "ld.param.b64 %rd0, [kernel_param_0]; mov.u32 %r90, %tid.x; mul.wide.u32 %rd1, %r90, 16;"
    yield "shl.b32 %r91, %r90, 4; add.s64 %rd0, %rd0, %rd1;"
    for start in range(0, data.size, threads * 16):
        yield f"ld.global.v4.b32 {{%r92, %r93, %r94, %r95}}, [%rd0 + {start}];"
        yield f"st.shared.v4.b32 [%r91 + {start}], {{%r92, %r93, %r94, %r95}};"
    yield "fence.proxy.async.shared::cta; bar.sync 0; wgmma.fence.sync.aligned;"


@pytest.mark.parametrize("line", [128, 64, 32])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("from_registers", [False, True])
@pytest.mark.parametrize("teams", [1, 2])
def test_wgmma(line: int, turned: bool, from_registers: bool, teams: int) -> None:
    """64 x 16 of each warpgroup times 16 x 32, the second time added to what is there."""
    kind, columns, threads = "bf16", 32, 128 * teams
    a, b = (encode(kind, DICE.normal(size=(rows, 16))) for rows in (64 * teams, columns))
    (b_bytes, b_name), *lefts = (swizzled(part, line, turned) for part in (b, *np.split(a, teams)))
    data = np.concatenate([b_bytes, *(part for part, _ in lefts)])
    a_names = [name | (turn + 1) * b_bytes.size >> 4 for turn, (_, name) in enumerate(lefts)]
    registers = {"%rd2": np.repeat(np.array(a_names, np.uint64), 128), "%rd3": np.full(threads, b_name, np.uint64)}
    warps = [packed(a[16 * warp : 16 * warp + 16], a_place, 8) for warp in range(4 * teams)]
    registers |= {f"%r{60 + n}": np.concatenate([warp[n] for warp in warps]) for n in range(4)}
    outputs = ",".join(f"%r{n}" for n in range(16))
    left = "{%r60,%r61,%r62,%r63}" if from_registers else "%rd2"
    flags = f"1, 1, {int(turned)}" if from_registers else f"1, 1, {int(turned)}, {int(turned)}"
    name = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind}"
    lines = (
        "\n".join(written(data, threads))
        + f"""
        {name} {{{outputs}}}, {left}, %rd3, 0, {flags};
        {name} {{{outputs}}}, {left}, %rd3, 1, {flags};
        wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"""
    )
    found = run(lines, registers, threads=threads, memory=memory_of(data), shared=data.size).registers
    product = decode(kind, a).astype(np.float64) @ decode(kind, b).T.astype(np.float64)
    expected = (product.astype(np.float32) + product).astype(np.float32)
    for number in range(16):
        for thread in range(threads):
            row, column = c_place(thread % 32, number % 4)
            value = found[f"%r{number}"][thread : thread + 1].view(np.float32)[0]
            assert value == expected[16 * (thread // 32) + row, 8 * (number // 4) + column]


def cut(value: float, largest: float) -> float:
    """To 13 bits behind the first of the largest."""
    last = 2.0 ** (math.frexp(largest)[1] - 14)
    return math.trunc(value / last) * last


def test_wgmma_of_e4m3_keeps_14_bits() -> None:
    """64 x 32 times 32 x 16, the second time added to what is there: the places are those of 16-bit numbers."""
    columns, numbers = 16, encode("e4m3", np.abs(DICE.normal(size=(80, 32))) + 0.1)
    a, b = numbers[:64], numbers[64:]
    (b_bytes, b_name), (a_bytes, a_name) = (swizzled(part.view(np.uint16), 32, False) for part in (b, a))
    data = np.concatenate([b_bytes, a_bytes])
    names = {"%rd2": a_name | b_bytes.size >> 4, "%rd3": b_name}
    registers = {name: np.full(128, value, np.uint64) for name, value in names.items()}
    outputs = ",".join(f"%r{n}" for n in range(8))
    name = f"wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.e4m3.e4m3"
    lines = (
        "\n".join(written(data, 128))
        + f"""
        {name} {{{outputs}}}, %rd2, %rd3, 0, 1, 1;
        {name} {{{outputs}}}, %rd2, %rd3, 1, 1, 1;
        wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"""
    )
    found = run(lines, registers, threads=128, memory=memory_of(data), shared=data.size).registers
    rows, turned = decode("e4m3", a).astype(float).tolist(), decode("e4m3", b).astype(float).tolist()
    inexact = 0
    for number in range(8):
        for thread in range(0, 128, 7):
            row, column = c_place(thread % 32, number % 4)
            row, column = row + 16 * (thread // 32), column + 8 * (number // 4)
            expected = 0.0
            for _ in range(2):
                addends = [x * y for x, y in zip(rows[row], turned[column], strict=True)] + [expected]
                expected = sum(cut(addend, max(addends)) for addend in addends)
                expected = cut(expected, expected)
            value = found[f"%r{number}"][thread : thread + 1].view(np.float32)[0]
            assert value == expected
            inexact += expected != 2 * sum(addends[:-1])
    assert inexact > 100
