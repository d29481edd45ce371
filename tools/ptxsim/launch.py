"""Triton kernels launched on CPU tensors, compiled as for a GPU and executed as its PTX.

    with executed_as_ptx(90) as launches:
        cascade_attention_triton(q, k, v, context, mask_words)  # the product's own launcher
    launches[0].counts["bar.sync"]

Triton specialises a kernel by its arguments as it does on a GPU. ptxas is left out: nothing below PTX is looked at.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]

from tools.ptxsim import machine, transfers
from tools.ptxsim.kept import FOLDER, Ended, kept, key_of
from tools.ptxsim.memory import FAR, GlobalMemory, Placed
from tools.ptxsim.program import execute, prepare

#: Changes PTX before it runs: (name of the kernel, PTX) -> PTX.
Edit = Callable[[str, str], str]
#: Address of a storage -> the parts of it that exist: first byte, and the first behind.
Sparse = Mapping[int, Sequence[tuple[int, int]]]


@dataclass(frozen=True)
class Launch:
    """One kernel that ran to its end."""

    name: str
    ptx: str
    counts: Counter[str]  # instructions that ran, by opcode
    executed: int
    cycles: int | None = None  # by `tools.ptxsim.clock`, where timed
    dependent: bool = False  # by programmatic dependent launch


def _without_ptxas(*arguments: Any) -> tuple[str, str] | None:
    """Triton's hook into its stages, and the key of what it changes."""
    if arguments:
        _, stages, *_ = arguments
        stages["cubin"] = lambda source, metadata: b""
    return "ptx", "ptx"


@contextmanager
def executed_as_ptx(
    capability: int,
    edit: Edit | None = None,
    limit: int = 3_000_000,
    *,
    timed: bool = False,
    sparse: Sparse | None = None,
) -> Iterator[list[Launch]]:
    """Runs every Triton kernel launched inside, as PTX for this capability (90 for 9.0); lists the launches, with their
    cycles by arithmetic if `timed`.

    `sparse`: of tensors that are larger than memory, the parts that kernels may touch.
    Raises Fault for what a kernel must not do, Unsupported for instructions that are not modelled.
    """
    launches: list[Launch] = []
    original, active = JITFunction.run, triton.runtime.driver._active

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = original(kernel, *args, grid=grid, warmup=True, **options)
        if not warmup:
            given = _flat(dict(zip(kernel.arg_names, args, strict=False)) | options)
            names = [name for name, kind in _flat(compiled.src.signature).items() if kind != "constexpr"]
            ptx = edit(kernel.__name__, compiled.asm["ptx"]) if edit else compiled.asm["ptx"]
            shape = grid(given) if callable(grid) else tuple(grid)
            values = {name: given[name] for name in names}
            ended = _launch(
                ptx,
                shape,
                values,
                _written(compiled.asm["ttir"], names),
                compiled.metadata.shared,
                limit,
                timed=timed,
                dependent=compiled.metadata.launch_pdl,
                sparse=sparse or {},
            )
            dependent = compiled.metadata.launch_pdl
            launches.append(Launch(kernel.__name__, ptx, ended.counts, ended.executed, ended.cycles, dependent))
        return compiled

    target = GPUTarget("cuda", capability, 32)
    fake = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_stream=lambda device: 0,
        get_current_device=lambda: capability,  # Triton keeps what it compiled by device
    )
    with triton.knobs.runtime.scope(), _results_begin_as_nan():
        triton.knobs.runtime.add_stages_inspection_hook = _without_ptxas
        JITFunction.run = run
        triton.runtime.driver.set_active(fake)
        try:
            yield launches
        finally:
            JITFunction.run, triton.runtime.driver._active = original, active


@contextmanager
def _results_begin_as_nan() -> Iterator[None]:
    """Memory that is only allocated has one content: NaN, or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # `torch.utils.deterministic.fill_uninitialized_memory`
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _flat(given: dict[str, Any]) -> dict[str, Any]:
    """With the parts of tuples by names of their own."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        found |= {f"{name}[{n}]": part for n, part in enumerate(value)} if isinstance(value, tuple) else {name: value}
    return found


def _written(ttir: str, names: list[str]) -> set[str]:
    """Arguments that a kernel stores to, all others are read-only: pointers are followed to where they come from."""
    _, _, rest = ttir.partition("tt.func public")
    header, _, body = rest.partition("\n")
    arguments = dict(zip(re.findall(r"(%\w+): ", header), names, strict=True))
    made: dict[str, str] = {}  # a value and its first operand; names come again where those before are out of scope
    found: set[str] = set()
    for line in body.splitlines():
        if value := re.search(r"(%\w+) = [\w.]+ (%\w+)", line):
            made[value[1]] = value[2]
        for pointer in re.findall(r"tt\.(?:store|atomic_\w+)[^%\n]* (%\w+)", line):
            while pointer in made:
                pointer = made[pointer]
            found.add(arguments[pointer])
    return found


def _launch(
    ptx: str,
    grid: tuple[int, ...],
    values: dict[str, Any],
    written: set[str],
    shared: int,
    limit: int,
    *,
    timed: bool,
    dependent: bool,
    sparse: Sparse,
) -> Ended:
    regions = _regions({name: value for name, value in values.items() if isinstance(value, Tensor)})
    parts = [
        (region, number * FAR + region.start % 256 if region.storage in sparse else None, *part)
        for number, region in enumerate(regions, 1)
        for part in region.parts(sparse)
    ]
    placed = [region.placed(written, first, stop, far) for region, far, first, stop in parts]
    offsets = {
        name: (number, tensor.data_ptr() - region.start - first)
        for number, (region, _, first, _) in enumerate(parts)
        for name, tensor in region.tensors.items()
    }
    arguments = {name: offsets[name] if name in offsets else int(value) for name, value in values.items()}

    def run() -> Ended:
        constants = prepare(ptx).kernel.constants.items()
        memory = GlobalMemory(
            [*placed, *(Placed(name, np.frombuffer(data, np.uint8), False) for name, data in constants)]
        )
        words = [
            memory.address(value[0]) + value[1] if isinstance(value, tuple) else value for value in arguments.values()
        ]
        words += [0, 0]  # scratch memory, never touched
        ran = execute(ptx, grid, words, memory, shared, limit, timed=timed, dependent=dependent)
        cycles = None if ran.clock is None else ran.clock.cycles
        return Ended([memory.data(number) for number in range(len(parts))], ran.counts, ran.executed, cycles)

    writable = [bool(np.any(tensor.writable)) for tensor in placed]
    if os.environ.get(FOLDER) and not (timed or sparse or machine.CHOOSE or transfers.TURN != 1):
        ended = kept(key_of(ptx, placed, grid, arguments, shared, limit, dependent), run, writable)
    else:
        ended = run()
    for (region, _, first, stop), data, one in zip(parts, ended.memory, writable, strict=True):
        if one:
            region.bytes()[first:stop] = data
    return ended


@dataclass
class _Region:
    """Memory of the host from one tensor's first byte to its last, or of several that overlap."""

    start: int
    stop: int
    tensors: dict[str, Tensor]

    @property
    def storage(self) -> int:
        """Address of the storage."""
        return next(iter(self.tensors.values())).untyped_storage().data_ptr()

    @property
    def shift(self) -> int:
        """Address modulo 256 on a GPU, where storages begin at multiples of it; Triton saw the host's modulo 16."""
        return (self.start - self.storage + self.storage % 16) % 256

    def parts(self, sparse: Sparse) -> list[tuple[int, int]]:
        """First byte and the first behind, of what exists."""
        size = self.stop - self.start
        if self.storage not in sparse:
            return [(0, size)]
        before = self.start - self.storage
        parts = ((max(first - before, 0), min(stop - before, size)) for first, stop in sparse[self.storage])
        return [(first, stop) for first, stop in parts if first < stop]

    def placed(self, written: set[str], first: int, stop: int, far: int | None) -> Placed:
        """Some of its bytes; all of them are numbers where it is `far`."""
        if far is not None:
            data, is_written = self.bytes()[first:stop].copy(), not written.isdisjoint(self.tensors)
            return Placed(" ".join(self.tensors), data, is_written, (far + first) % 256, far=far + first)
        used, writable = np.zeros((2, self.stop - self.start), bool)
        for name, tensor in self.tensors.items():
            self._numbers(tensor, used)
            if name in written:
                self._numbers(tensor, writable)
        return Placed(" ".join(self.tensors), self.bytes().copy(), writable, self.shift, used)

    def bytes(self) -> Any:
        """View as a NumPy array of the same memory."""
        storage = next(iter(self.tensors.values())).untyped_storage()
        found: np.ndarray[Any, Any] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        return found[self.start - storage.data_ptr() : self.stop - storage.data_ptr()]

    def _numbers(self, tensor: Tensor, marks: Any) -> None:
        """Marks the bytes of a tensor's numbers, not those between them."""
        size = tensor.element_size()
        axes = [(length, stride) for length, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
        shape, strides = [n for n, _ in axes], [stride * size for _, stride in axes]
        at = tensor.data_ptr() - self.start if tensor.numel() else 0
        torch.from_numpy(marks).as_strided((*shape, size), (*strides, 1), at).fill_(True)


def _regions(tensors: dict[str, Tensor]) -> list[_Region]:
    found: list[_Region] = []
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_ptr()):
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr()
        stop = start + (last + 1) * tensor.element_size() if tensor.numel() else start
        if found and start < found[-1].stop:
            found[-1].stop = max(stop, found[-1].stop)
            found[-1].tensors[name] = tensor
        else:
            found.append(_Region(start, stop, {name: tensor}))
    return sorted(found, key=lambda region: min(map([*tensors].index, region.tensors)))  # not as the host has them
