"""The suite's own code around the kernels, under Triton's interpreter: tiny shapes, and no clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import ceilings, kernels, peers, replay, timing, writes
from benchmarks.gpu.call import Wrong, make_call
from benchmarks.gpu.cases import Skip
from benchmarks.gpu.shapes import Shape
from d2sd.plugins.cascade_attention import PagedContext
from d2sd.plugins.cascade_attention.triton.launch import cascade_attention_triton
from tests.plugins.kernels.calls import DEVICE

TINY = Shape((32, 32), 5, heads=6, kv_heads=2, size=16, kind="fp16")
#: What a function's times come to when nothing is timed.
ROW = {"ms": 0.5, "all_ms": [0.5] * timing.ROUNDS, "graph": True}


def once(run: Callable[[], Any]) -> tuple[float, bool]:
    run()
    return 0.5, True


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DEVICE == "cpu"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 1 << 30))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "once", once)


def nothing(*_: Any, **__: Any) -> None:
    pass


@pytest.mark.parametrize("shape", [replace(TINY, contexts=(37, 0)), replace(TINY, fp8=True, contexts=(20, 3))])
def test_the_kernel_passes_its_check(shape: Shape) -> None:
    errors = kernels.check(shape, nothing, "cpu")
    assert 0 < errors["error_of_budget"] < 1
    assert 0 < errors["relative_error_of_budget"] < 1


def test_a_wrong_kernel_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads one token of context too few: the smallest fault there is."""

    def short(q: Tensor, k: Tensor, v: Tensor, context: PagedContext, mask_words: Tensor) -> Tensor:
        return cascade_attention_triton(q, k, v, replace(context, context_len=context.context_len - 1), mask_words)

    monkeypatch.setattr(kernels, "cascade_attention_triton", short)
    with pytest.raises(Wrong):
        kernels.check(TINY, nothing, "cpu")


def test_peers_are_checked_before_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that a CPU cannot run have a reason; wrong ones have no time; the call goes on behind both."""
    row = kernels.time_shape(TINY, nothing, "cpu")
    assert set(row["times"]) == {"ours", "sdpa math", "flash, no mask", "gather"}, row["reasons"]
    assert set(row["reasons"]) == {"sdpa efficient", "sdpa cudnn", "flashinfer"}
    assert row["reasons"]["flashinfer"] == "Skip: flashinfer is not installed"
    assert all(len(found["all_ms"]) == timing.ROUNDS for found in row["times"].values())
    monkeypatch.setattr(peers, "bias", lambda call: torch.zeros(2, 1, 15, 37).half())  # no mask at all
    row = kernels.time_shape(TINY, nothing, "cpu")
    assert row["reasons"]["sdpa math"].startswith("Wrong: ")
    assert "sdpa math" not in row["times"]


def test_flex_is_timed_beside_ours() -> None:
    row = kernels.time_flex(TINY, nothing, "cpu")
    assert set(row["times"]) == {"ours", "gather", "flex"}
    assert row["reasons"] == {}


def test_what_does_not_fit_is_skipped_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (TINY.bytes_held(), 1 << 30))
    with pytest.raises(Skip, match="device memory"):
        kernels.time_shape(TINY, nothing, "cpu")


@pytest.mark.parametrize("stale", [False, True])
def test_a_replay_is_checked_at_every_length(stale: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the graph; a stale one gives what was captured whatever its memory holds now."""

    def stand_in(run: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
        out = run()
        first = out.clone()
        return (lambda: out.copy_(first if stale else run())), out

    monkeypatch.setattr(replay, "captured", stand_in)
    monkeypatch.setattr(replay, "LENGTHS", ((32, 32), (32, 1), (0, 32)))
    if stale:
        with pytest.raises(Wrong):
            replay.replayed(TINY, nothing, "cpu")
    else:
        assert replay.replayed(TINY, nothing, "cpu")["replays"] == 3


def test_writes_are_the_specifications() -> None:
    write = writes.Write(2, 4, 6, layers=2)
    arguments = writes.make_write(write, "cpu")
    found = writes.written(arguments)
    writes.assert_same(arguments, found)
    with pytest.raises(AssertionError, match="v_pages differ"):
        writes.assert_same(arguments, (found[0], found[1] + 1))
    row = writes.time_write(write, nothing, "cpu")
    assert row == {"bytes": write.bytes_moved(int(arguments["keep"].sum())), "times": {"ours": ROW}}


def test_a_copy_is_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 20, 1 << 20))
    row = ceilings.measure(nothing, "cpu")
    assert row["bytes"] == 2 << 17  # an eighth of the memory, read and written
    assert row["gb_per_s"] == 2 * 2**17 / 0.5e-3 / 1e9  # in half a millisecond
    assert row["times"] == {"copy": ROW, "least": ROW}


def test_calls_have_no_number_in_slots_of_nobody() -> None:
    call = make_call(replace(TINY, contexts=(20, 3)), "cpu")
    assert call.context.k_pages[0].isnan().all()
    assert int((~call.context.k_pages.isnan()).sum()) == 23 * 2 * 16
