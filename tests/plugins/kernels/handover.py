"""The handover's kernels against their specification: equal to the bit."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from d2sd.modeling.where import Where
from d2sd.plugins import handover as kernels
from d2sd.plugins.trees import Accepted
from d2sd.runtime.batch import Batch
from d2sd.runtime.cuda_graphs.inputs import STOP_TOKENS, Link
from d2sd.runtime.cuda_graphs.steps import Handover
from d2sd.token_codes import NOT_FINITE
from tests.plugins.kernels import calls
from tests.plugins.kernels.calls import there
from tests.plugins.on_kernels import run_kernels

#: Rows of the state, of the step, block size: fewer than it has, one, and all; no power of two.
SIZES = ((5, 3, 4), (1, 1, 1), pytest.param(40, 33, 16, marks=pytest.mark.slow), (7, 7, 5))


def drawn(rows: int, size: int, block: int, seed: int) -> tuple[Tensor, Batch, Link, Any]:
    """A state, a batch, what links them, and a step's result over few tokens."""
    draw = torch.Generator().manual_seed(seed)

    def upto(most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape, generator=draw)

    state = upto(50, 3, rows)
    state[2] = upto(2, rows)
    batch = Batch.dummy(Where.scratch(size, 1), 9, "cpu")
    anchor, where = upto(2**40, size), replace(batch.where, context_len=upto(2**33, size))
    batch = replace(batch, anchor=anchor, where=where, active=upto(3, size) > 0)
    stop = upto(12, size, STOP_TOKENS)
    stop = torch.where(upto(4, size, STOP_TOKENS) > seed % 2 * 4, -1, stop)  # few, or as many as there is room for
    limit = batch.where.context_len + upto(2 * block, size)
    link = Link(upto(2, size) > 0, upto(rows, size), limit, stop)
    count, tokens = 1 + upto(block, size), upto(13, size, block) - 1  # -1: no token, at which a row ends
    stop[:, -1] = NOT_FINITE
    path = torch.zeros_like(tokens)
    row = torch.cat([count[:, None], count[:, None], tokens], 1)
    accepted = Accepted(path, row[:, 0], row[:, 2:], count)  # as the kernel of acceptance leaves them
    return state, batch, link, SimpleNamespace(accepted=accepted, packed=accepted.packed())


def run(
    monkeypatch: pytest.MonkeyPatch, fused: bool, state: Tensor, batch: Batch, link: Link, result: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """Return what the step is given, and the state after it."""
    run_kernels(monkeypatch, "handover", on=fused)
    where = there if fused else lambda given: given
    handover = Handover(state.shape[1], calls.DEVICE if fused else "cpu")
    handover._state.copy_(state)
    made = SimpleNamespace(accepted=where(result.accepted), packed=where(result.packed))
    given = handover.begin(batch.to(calls.DEVICE if fused else "cpu"), where(link))
    handover.end(given, where(link), made)  # type: ignore[arg-type]
    assert [x.dtype for x in (given.anchor, given.where.context_len, given.active)] == [
        torch.long,
        torch.long,
        torch.bool,
    ]
    return [x.tolist() for x in (given.anchor, given.where.context_len, given.active)], handover._state.tolist()


@pytest.mark.parametrize(("rows", "size", "block"), SIZES)
def test_handover(rows: int, size: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(6):
        state, batch, link, result = drawn(rows, size, block, seed)
        expected = run(monkeypatch, False, state, batch, link, result)
        assert run(monkeypatch, True, state, batch, link, result) == expected


@pytest.mark.parametrize(
    ("size", "block", "nodes", "width", "tables"), [(3, 4, 7, 5, 2), (1, 16, 16, 2100, 1), (2, 1, 1, 0, 0)]
)
def test_commit(size: int, block: int, nodes: int, width: int, tables: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into new tensors, and into the first rows of larger ones, whose others keep what they hold."""
    draw = torch.Generator().manual_seed(1)
    path, count = torch.randint(nodes, (size, block), generator=draw), 1 + torch.randint(block, (size,), generator=draw)
    counts = torch.stack([count, count], 1)[:, 0]  # among other numbers
    active, context_len = torch.arange(size) != 1, torch.randint(2**40, (size,), generator=draw)
    features = torch.randn(size, nodes, width, generator=draw).bfloat16()
    pages = [torch.randint(99, (size, 2050), generator=draw) for _ in range(tables)]
    given = path, counts, active, context_len, features

    def larger() -> list[Tensor]:
        rows = (size, block + 2)
        kept = [torch.ones(*rows, width).bfloat16(), torch.ones(rows, dtype=torch.long), torch.ones(rows).bool()]
        return [*kept, *map(torch.zeros_like, pages)]

    run_kernels(monkeypatch, "handover", on=False)
    expected, into = kernels.commit(*given), larger()
    kernels.commit(*given, pages, into)
    run_kernels(monkeypatch, "handover")
    found, also = kernels.commit(*map(there, given)), there(larger())
    on_device: list[Any] = [*map(there, given), there(pages), also]
    kernels.commit(*on_device)
    assert all(torch.equal(one, other.cpu()) for one, other in zip(expected, found, strict=True))
    assert all(torch.equal(one, other.cpu()) for one, other in zip(into, also, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(pages, into[3:], strict=True))
    for one, other in zip(expected, into, strict=False):
        assert torch.equal(one, other[:, :block])
    assert not into[2][:, block:].any()
    assert all((x[:, block:] == 1).all() for x in into[:2])
