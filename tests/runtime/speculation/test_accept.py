from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from d2sd.plugins.trees import accept, from_candidates, from_chain
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.speculation.accept import sample_target, unpack_bits
from tests.runtime import oracle
from tests.runtime.helpers import STEADY
from tests.runtime.oracle import walk


@STEADY
@given(st.data())
def test_equals_a_walk_from_the_root(data: st.DataObject) -> None:
    """Trees over two or three tokens, so that choices meet children often; one to three requests."""
    vocab, size, count = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    batch, budget = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 20))

    def tokens(length: int) -> list[int]:
        return data.draw(st.lists(st.integers(0, vocab), min_size=length, max_size=length))

    candidates = [[[0, *tokens(size - 1)] for _ in range(count)] for _ in range(batch)]
    chosen = [tokens(budget) for _ in range(batch)]
    tree = from_candidates(torch.tensor(candidates), torch.zeros(batch, count, size), budget)
    accepted = accept(tree, torch.tensor(chosen), size)
    assert accepted.path.shape == accepted.tokens.shape == (batch, size)
    for b in range(batch):
        nodes, _ = oracle.from_candidates(candidates[b], [[0.0] * size] * count, budget)
        path = walk(nodes, chosen[b])
        assert int(accepted.count[b]) == len(path)
        assert accepted.path[b].tolist() == path + [0] * (size - len(path))
        assert accepted.tokens[b, : len(path)].tolist() == [chosen[b][node] for node in path]
        assert int(accepted.accepted_branch[b]) == nodes[path[-1]].branch_id


@STEADY
@given(st.data())
def test_the_walk_level_by_level_accepts_the_same(data: st.DataObject) -> None:
    """Greedy, with a mask that allows everything: the path along which tokens are chosen is the one of the argmax."""
    size, count = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    batch, budget = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 20))
    dice = torch.Generator().manual_seed(data.draw(st.integers(0, 10_000)))
    candidates = torch.randint(0, 3, (batch, count, size), generator=dice)
    candidates[:, :, 0] = 0
    tree = from_candidates(candidates, torch.zeros(batch, count, size), budget)
    logits = torch.randn(batch, budget, 3, generator=dice)
    sampling = Sampling.of([SamplingParams()] * batch, 3, "cpu")
    mask = torch.full((batch, budget, 1), -1, dtype=torch.int32)
    longest = min(size, budget)
    plain = accept(tree, logits.argmax(-1), longest)
    walked = sample_target(tree, logits, torch.zeros(batch, dtype=torch.long), sampling, longest, mask)
    for row, n in enumerate(plain.count.tolist()):
        assert int(walked.count[row]) == n
        assert torch.equal(walked.path[row], plain.path[row])
        assert torch.equal(walked.tokens[row, :n], plain.tokens[row, :n])
        assert walked.accepted_branch[row] == plain.accepted_branch[row]


def test_a_mask_excludes_tokens_of_its_node_alone() -> None:
    """A chain of three; after its second node the draft's token is excluded, and the next best ends the path."""
    tree = from_chain(torch.tensor([[7, 1, 2]] * 2), torch.zeros(2, 3))
    logits = torch.tensor([[0.0, 3.0, 0.0, 1.0], [0.0, 1.0, 3.0, 2.0], [0.0, 0.0, 0.0, 9.0]]).expand(2, 3, 4)
    mask = torch.full((2, 3, 1), -1, dtype=torch.int32)
    mask[1, 1] = 0b1011
    sampling = Sampling.of([SamplingParams()] * 2, 4, "cpu")
    accepted = sample_target(tree, logits, torch.tensor([5, 5]), sampling, 3, mask)
    assert accepted.count.tolist() == [3, 2]
    assert [row[:n] for row, n in zip(accepted.tokens.tolist(), (3, 2), strict=True)] == [[1, 2, 3], [1, 3]]


def test_bits_are_unpacked_from_the_lowest() -> None:
    words = torch.tensor([[0b101, -(2**31)], [-1, 0]], dtype=torch.int32)
    bits = unpack_bits(words, 64)
    assert [row.nonzero().flatten().tolist() for row in bits] == [[0, 2, 63], list(range(32))]
    assert unpack_bits(words, 40).shape == (2, 40)
