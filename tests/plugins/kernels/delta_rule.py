"""The kernels of the gated delta rule against its specification, and bit for bit against each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from d2sd.plugins.cascade_attention import ChunkMask
from d2sd.plugins.delta_rule import (
    chunk_convolution,
    chunk_delta_rule,
    commit_convolution,
    commit_delta_rule,
    convolution,
    tree_delta_rule,
)
from d2sd.plugins.delta_rule.types import DeltaRows
from tests.plugins.delta_rule.draws import Drawn, drawn, mask_of, path_to, tree
from tests.plugins.delta_rule.oracle import outputs, state_after
from tests.plugins.delta_rule.test_delta_rule import all_of, off, part
from tests.plugins.kernels.calls import INTERPRETED, there
from tests.plugins.on_kernels import run_kernels

#: Nodes, size of heads, depth, share of chains: one row, one tile, several of 64 (bf16) and of 32 (fp32).
TREES = ((1, 16, 2, 0.0), (21, 32, 8, 0.5), (70, 16, 40, 0.8))
MORE = ((16, 64, 4, 0.3), (64, 128, 64, 1.0), (150, 64, 32, 0.6))
TYPES = (torch.float32, torch.bfloat16)
#: Of products of 16 bits, and of a result in bf16, which the interpreter cuts off.
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2**-7 if INTERPRETED else 2**-8, torch.float16: 2**-10}


def check_tree(
    nodes: int,
    size: int,
    depth: int,
    chain: float,
    dtype: torch.dtype,
    exact: bool,
    gate: float,
    patch: pytest.MonkeyPatch,
) -> None:
    run_kernels(patch, "delta_rule")
    x = drawn(
        nodes, nodes, batch=2, most_depth=depth, chain=chain, heads=(1, 2), size=size, gate=gate, alike=0.5, dtype=dtype
    )
    q, rows, states, slots, mask = (there(y) for y in x[:5])
    found = tree_delta_rule(q, rows, states, slots, mask, exact=exact)
    assert found.dtype == dtype
    assert off(found.cpu(), outputs(x), x) < BOUND[dtype]
    assert states.cpu().equal(x.states)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("nodes", "size", "depth", "chain"), TREES)
def test_trees(
    nodes: int, size: int, depth: int, chain: float, dtype: torch.dtype, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if exact and nodes > 32:
        nodes = 32  # a walk has no tiles
    check_tree(nodes, size, depth, chain, dtype, exact, 20.0, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [*TYPES, pytest.param(torch.float16, marks=pytest.mark.full)])
@pytest.mark.parametrize(("nodes", "size", "depth", "chain"), MORE)
def test_larger_trees(
    nodes: int, size: int, depth: int, chain: float, dtype: torch.dtype, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_tree(nodes, size, depth, chain, dtype, exact, 0.1, monkeypatch)


def test_exact_trees_are_plain_decoding_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row a step, each committed, in two layers of which the second is decoded."""
    run_kernels(monkeypatch, "delta_rule")
    x = drawn(11, 21, batch=2, most_depth=6, heads=(1, 2), size=16)
    q, rows, states, slots, mask = (there(y) for y in x[:5])
    whole = tree_delta_rule(q, rows, states, slots, mask, exact=True)
    pools = torch.stack([states, states])
    for row in path_to(x.parents[1], 20):
        one = part(rows, slice(1, 2), slice(row, row + 1))
        itself = there(torch.ones(1, 1, 1, dtype=torch.bool))
        alone = tree_delta_rule(q[1:, row : row + 1], one, pools[1], slots[1:], itself, exact=True)
        assert alone[0, 0].equal(whole[1, row])
        both = DeltaRows(*(torch.stack([y, y]) for y in all_of(one)))
        commit_delta_rule(both, pools, slots[1:], there(torch.zeros(1, 2, dtype=torch.long)), there(torch.tensor([1])))
    at_once = torch.stack([states, states])
    path = path_to(x.parents[1], 20)
    nodes, count = torch.tensor([path]), torch.tensor([len(path)])
    second = DeltaRows(*(torch.stack([y[1:], y[1:]]) for y in all_of(rows)))
    commit_delta_rule(second, at_once, slots[1:], there(nodes), there(count))
    assert at_once.equal(pools)


@pytest.mark.parametrize("dtype", TYPES)
def test_commits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers; of three requests one is padding, whose slot keeps what it holds, as do those of nobody."""
    run_kernels(monkeypatch, "delta_rule")
    x = drawn(13, 12, batch=3, chain=0.9, heads=(1, 2), size=16, dtype=dtype)._replace(slots=torch.tensor([3, 0, 1]))
    states = torch.stack([x.states, 2 * x.states])
    paths = [path_to(parents, 11) for parents in x.parents]
    count, path = torch.tensor([len(one) for one in paths]), torch.zeros(3, 12, dtype=torch.long)
    for request, nodes in enumerate(paths):
        path[request, : len(nodes)] = torch.tensor(nodes)
    found = there(states.clone())
    other = drawn(14, 12, batch=3, heads=(1, 2), size=16, dtype=dtype)
    rows = DeltaRows(*(torch.stack(pair) for pair in zip(all_of(x.rows), all_of(other.rows), strict=True)))
    commit_delta_rule(there(rows), found, there(x.slots), there(path), there(count))
    assert found[:, [0, 2, 4]].cpu().equal(states[:, [0, 2, 4]])
    for layer in range(2):
        one = x._replace(states=states[layer], rows=(x, other)[layer].rows)
        for request in (0, 2):
            for head in range(2):
                expected = torch.from_numpy(state_after(one, request, head, paths[request]))
                torch.testing.assert_close(
                    found[layer, x.slots[request], head].cpu().double(), expected, rtol=1e-5, atol=1e-5
                )


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("lengths", "dtype"), [((37, 1, 9), torch.float32), ((70, 1, 5), torch.bfloat16)])
def test_chunks(lengths: tuple[int, ...], dtype: torch.dtype, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles, one row, and padding."""
    run_kernels(monkeypatch, "delta_rule")
    x = drawn(17, sum(lengths), batch=1, chain=1.0, most_depth=999, gate=2.0, size=16, dtype=dtype)
    slots, chunks = torch.tensor([2, 1, 0]), ChunkMask(lengths, there(torch.tensor([0, *lengths]).cumsum(0)))
    states = there(x.states.clone())
    found = chunk_delta_rule(there(x.q), there(x.rows), states, there(slots), chunks, exact=exact).cpu()
    assert states[0].cpu().equal(x.states[0])
    for request, span in enumerate(chunks.spans()[:2]):
        parents = [[*range(-1, lengths[request] - 1)]]
        rows, slot = part(x.rows, slice(None), span), slots[request : request + 1]
        one = Drawn(x.q[:, span], rows, x.states, slot, x.mask, parents)
        assert off(found[:, span], outputs(one), one) < BOUND[dtype]
        for head in range(2):
            expected = torch.from_numpy(state_after(one, 0, head, [*range(lengths[request])]))
            bound = 2e-5 if exact or dtype == torch.float32 else 1e-3
            torch.testing.assert_close(states[slots[request], head].cpu().double(), expected, rtol=bound, atol=bound)


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("nodes", [1, 40])
@pytest.mark.parametrize("silu", [True, False])
def test_convolution(nodes: int, dtype: torch.dtype, silu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees and chunks, with channels of no power of two, and what is kept of a path and of the chunks."""
    run_kernels(monkeypatch, "delta_rule")
    draw, channels = torch.Generator().manual_seed(nodes), 48
    parents = [tree(draw, nodes, 32, 0.5) for _ in range(2)]
    mask, slots, chunks = (
        torch.stack([*map(mask_of, parents)]),
        torch.tensor([3, 0]),
        torch.tensor([0, nodes, nodes + 2]),
    )
    x, states = numbers(1, 2, 2, nodes, channels, dtype=dtype), numbers(2, 2, 4, channels, 3, dtype=dtype)
    weight, bias, row = numbers(3, channels, 4, dtype=dtype), numbers(4, channels), numbers(5, 1, nodes + 2, channels)
    path = torch.arange(nodes).expand(2, nodes)
    count, lengths = torch.tensor([nodes, 1]), (nodes, 2)

    def run(put: object) -> list[Tensor]:
        x_, states_, weight_, bias_, row_, mask_, slots_, path_, count_, chunks_ = (
            there(y.clone()) if put else y.clone()
            for y in (x, states, weight, bias, row.to(dtype), mask, slots, path, count, chunks)
        )
        out = [convolution(x_[0], weight_, states_[0], slots_, mask_, bias_, silu=silu)]
        commit_convolution(x_, states_, slots_, path_, count_)
        out += [
            states_.clone(),
            chunk_convolution(row_, weight_, states_[1], slots_, ChunkMask(lengths, chunks_), silu=silu),
            states_,
        ]
        return [y.cpu() for y in out]

    found = run(there)
    run_kernels(monkeypatch, "delta_rule", on=False)
    for result, expected in zip(found, run(None), strict=True):
        bound = 2**-7 if dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(result, expected, rtol=bound, atol=bound)
