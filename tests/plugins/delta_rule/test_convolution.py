"""The convolution over trees against loops along every path, its commits and chunks."""

from __future__ import annotations

import pytest
import torch

from d2sd.plugins.cascade_attention import ChunkMask
from d2sd.plugins.delta_rule import chunk_convolution, commit_convolution, convolution
from tests.plugins.delta_rule.draws import mask_of, path_to, tree
from tests.plugins.delta_rule.oracle import convolved

CHANNELS, TAPS = 48, 4


def inputs(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nodes", [1, 2, 30, 100])
def test_trees_equal_loops(nodes: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(nodes)
    parents = [tree(draw, nodes, 32, 0.5) for _ in range(2)]
    mask, slots = torch.stack([mask_of(one) for one in parents]), torch.tensor([3, 1])
    x, states = inputs(1, 2, nodes, CHANNELS, dtype=dtype), inputs(2, 4, CHANNELS, TAPS - 1, dtype=dtype)
    weight = inputs(3, CHANNELS, TAPS, dtype=dtype)
    expected = convolved(x, weight, states, slots, parents)
    bound = 1e-6 if dtype == torch.float32 else 2**-8
    assert torch.allclose(convolution(x, weight, states, slots, mask).double(), expected, rtol=bound, atol=bound)
    alone = convolution(x[1:, :1], weight, states, slots[1:], mask[1:, :1, :1])
    assert torch.equal(alone[0, 0], convolution(x, weight, states, slots, mask)[1, 0])


@pytest.mark.parametrize("taps", [2, 3, 4])
def test_random_trees_without_an_activation(taps: int) -> None:
    """Gated short convolutions have none: two thousand trees in all, each row within 1e-5 of the loops."""
    draw = torch.Generator().manual_seed(taps)
    for seed in range(334):
        nodes = 1 + seed % 12
        parents = [tree(draw, nodes, 8, 0.5) for _ in range(2)]
        mask, slots = torch.stack([mask_of(one) for one in parents]), torch.tensor([2, 1])
        x, states, weight = inputs(seed, 2, nodes, 16), inputs(seed + 1, 3, 16, taps - 1), inputs(seed + 2, 16, taps)
        found = convolution(x, weight, states, slots, mask, silu=False).double()
        expected = convolved(x, weight, states, slots, parents, silu=False)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_bias_is_added_before_the_activation() -> None:
    x, states = inputs(1, 1, 1, 8), torch.zeros(2, 8, 3)
    bias, weight, itself = inputs(4, 8), torch.zeros(8, 4), torch.ones(1, 1, 1, dtype=torch.bool)
    found = convolution(x, weight, states, torch.tensor([1]), itself, bias)
    assert torch.allclose(found[0, 0], torch.nn.functional.silu(bias), rtol=1e-6)


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_commit_keeps_the_last_inputs(length: int) -> None:
    """Paths shorter than the state move it up; padding's slot keeps its inputs."""
    x, states = inputs(5, 2, 2, 9, CHANNELS), inputs(6, 2, 4, CHANNELS, TAPS - 1)
    slots, path = torch.tensor([2, 0]), torch.tensor([[0, 2, 3, 7, 8], [0, 1, 4, 5, 6]])
    found = states.clone()
    commit_convolution(x, found, slots, path, torch.tensor([length, 2]))
    expected = states.clone()
    for layer in range(2):
        kept = [*states[layer, 2].T, *(x[layer, 0, row] for row in path[0, :length].tolist())]
        expected[layer, 2] = torch.stack(kept[-3:], -1)
    assert torch.equal(found, expected)


def test_chunks_are_trees_of_one_path_wherever_they_are_cut() -> None:
    lengths, slots = (2, 11), torch.tensor([3, 1])
    x, states, weight = inputs(7, 1, 13, CHANNELS), inputs(8, 4, CHANNELS, TAPS - 1), inputs(9, CHANNELS, TAPS)
    found, kept = states.clone(), states.clone()
    whole = chunk_convolution(x, weight, found, slots, ChunkMask(lengths, torch.tensor([0, 2, 13])))
    for request, span in enumerate((slice(0, 2), slice(2, 13))):
        chain = [*range(-1, lengths[request] - 1)]
        slot = slots[request : request + 1]
        alone = convolution(x[:, span], weight, states, slot, mask_of(chain)[None])
        assert torch.equal(whole[:, span], alone)
        path, count = torch.tensor([path_to(chain, len(chain) - 1)]), torch.tensor([len(chain)])
        commit_convolution(x[None, :, span], kept[None], slot, path, count)
    assert torch.equal(found, kept)
    again = states.clone()
    first = chunk_convolution(x[:, 2:5], weight, again, slots[1:], ChunkMask((3,), torch.tensor([0, 3])))
    rest = chunk_convolution(x[:, 5:], weight, again, slots[1:], ChunkMask((8,), torch.tensor([0, 8])))
    assert torch.equal(torch.cat([first, rest], 1), whole[:, 2:])
    assert torch.equal(again[1], found[1])
