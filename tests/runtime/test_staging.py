"""Host tensors reach the device in one copy, of a buffer that no pass overwrites while that copy may be outstanding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from d2sd.runtime.staging import ALIGNMENT, BUFFERS, Staging


class Device:
    """Copies are done when somebody waits for them, not when they are ordered."""

    def __init__(self) -> None:
        self.waited: list[int] = []
        self.marks = 0

    def mark(self) -> Callable[[], None]:
        number, self.marks = self.marks, self.marks + 1
        return lambda: self.waited.append(number)


def inputs(value: int) -> list[Tensor]:
    return [
        torch.full((5,), value),
        torch.full((3, 1), value % 2 == 0),
        torch.full((), value, dtype=torch.int32),
        torch.full((2, 7), value + 0.5),
        torch.empty(0, 4),
    ]


def test_values_types_and_shapes_arrive_aligned() -> None:
    staging = Staging("cpu", Device().mark)
    found = staging(inputs(6))
    for tensor, wanted in zip(found, inputs(6), strict=True):
        assert tensor.dtype == wanted.dtype
        assert torch.equal(tensor, wanted)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == 1, "one copy"
    assert all(tensor.storage_offset() * tensor.element_size() % ALIGNMENT == 0 for tensor in found)
    kept = [tensor.clone() for tensor in found]
    staging(inputs(9))
    assert all(map(torch.equal, found, kept)), "a later pass has memory of its own"


def test_a_buffer_is_written_again_behind_its_last_copy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is `BUFFERS` passes ahead of the device before it waits, and then for the oldest of them."""
    device = Device()
    staging = Staging("cpu", device.mark)
    for number in range(5):
        staging(inputs(number))
        assert device.waited == list(range(number + 1 - BUFFERS))
    written: list[int] = []
    monkeypatch.setattr(device, "waited", written)
    copied = staging._copied[(staging._turn + 1) % BUFFERS]
    host = staging._hosts[(staging._turn + 1) % BUFFERS]
    before = host.clone()

    def wait() -> None:
        copied()
        assert torch.equal(host, before), "nothing is written before the wait"

    staging._copied[(staging._turn + 1) % BUFFERS] = wait
    staging(inputs(7))
    assert written == [5 - BUFFERS]
    assert not torch.equal(host, before)


def test_larger_inputs_take_larger_buffers_once_all_copies_are_done() -> None:
    device = Device()
    staging = Staging("cpu", device.mark)
    staging(inputs(1))
    large = torch.arange(10_000)
    assert torch.equal(staging([large])[0], large)
    assert device.waited == [0]
    staging(inputs(2))
    staging([large])
    assert device.waited == [0, 1]
