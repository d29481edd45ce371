"""Tensors in huge pages: apart, aligned, and freed when the last of a chunk is gone."""

from __future__ import annotations

import gc
import sys

import pytest
import torch

from d2sd.plugins.cpu import memory


def test_tensors_do_not_overlap() -> None:
    made = [memory.empty(shape, torch.bfloat16).fill_(n) for n, shape in enumerate([(3, 5), (7,), (0, 4), (2, 33)])]
    assert [tuple(one.shape) for one in made] == [(3, 5), (7,), (0, 4), (2, 33)]
    assert all((one == n).all() for n, one in enumerate(made))
    assert all(one.data_ptr() % 64 == 0 for one in made)


@pytest.mark.skipif(sys.platform != "linux", reason="maps memory as Linux does")
def test_a_chunk_is_freed_with_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """One larger than what is left begins a new chunk, and the old one lives as long as its tensors."""
    monkeypatch.setattr(memory, "_chunk", None)
    monkeypatch.setattr(memory, "_CHUNK", 1 << 20)
    small = memory.empty((1 << 16,), torch.uint8).fill_(1)
    large = memory.empty((1 << 22,), torch.uint8).fill_(2)
    assert (small == 1).all()
    assert (large == 2).all()
    mapped = memory._chunk
    assert mapped is not None
    assert mapped() is not None
    del large
    gc.collect()
    assert mapped() is None
    assert (small == 1).all()


@pytest.mark.skipif(sys.platform != "linux", reason="maps memory as Linux does")
def test_nothing_stays_mapped_behind_the_last_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk is freed when a model is closed; the next model begins a chunk of its own."""
    monkeypatch.setattr(memory, "_chunk", None)
    first = memory.empty((64,), torch.uint8)
    chunk = memory._chunk
    second = memory.empty((64,), torch.uint8)
    assert memory._chunk is chunk  # one chunk holds both
    del first, second
    gc.collect()
    assert chunk is not None
    assert chunk() is None
    assert (memory.empty((64,), torch.uint8).fill_(3) == 3).all()
