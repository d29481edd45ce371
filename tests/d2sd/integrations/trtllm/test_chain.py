"""The splice alone, on logits made by hand: [1, S, V] of three slots and four tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from d2sd.integrations.trtllm.worker import spliced

MASK = 3
ANCHOR = torch.tensor([2])


def logits(*sure: tuple[int, float]) -> Tensor:
    """(token, its probability) of every slot; the rest is shared evenly."""
    rows = torch.tensor([[p if token == t else (1 - p) / 3 for t in range(4)] for token, p in sure])
    return rows.log()[None]


def run(first: Tensor, second: Tensor, width: int = 4) -> tuple[Tensor, list[Tensor]]:
    blocks: list[Tensor] = []

    def again(tokens: Tensor) -> Tensor:
        blocks.append(tokens)
        return second

    return spliced(first, ANCHOR, MASK, width, again), blocks


def test_the_second_pass_continues_behind_the_likeliest_rejection() -> None:
    first = logits((0, 0.9), (1, 0.4), (1, 0.4))
    chain, (block,) = run(first, logits((2, 0.99), (0, 0.9), (2, 0.9)))
    assert block.tolist() == [[2, 0, MASK, MASK]]
    assert chain.argmax(-1).tolist() == [[0, 0, 2]]


def test_it_may_confirm_what_the_first_pass_said() -> None:
    first = logits((0, 0.9), (1, 0.4), (1, 0.4))
    chain, _ = run(first, logits((2, 0.99), (1, 0.9), (2, 0.9)))
    assert chain.argmax(-1).tolist() == [[0, 1, 2]]


def test_the_first_draft_stands_where_the_second_expects_less() -> None:
    first = logits((0, 0.9), (1, 0.45), (1, 0.45))
    chain, _ = run(first, logits((2, 0.99), (0, 0.4), (2, 0.4)))
    assert torch.equal(chain, first)


def test_a_draft_that_is_likely_right_is_left_whole() -> None:
    first = logits((0, 0.95), (1, 0.95), (1, 0.95))
    chain, (block,) = run(first, logits((2, 0.99), (0, 0.99), (2, 0.99)))
    assert block.tolist() == [[2, 0, 1, 1]]
    assert torch.equal(chain, first)


def test_a_shorter_draft_leaves_the_block_as_wide_as_it_was_captured() -> None:
    first = logits((0, 0.9), (1, 0.4), (1, 0.4))[:, :2].bfloat16()
    chain, (block,) = run(first, logits((2, 0.99), (0, 0.9)), width=5)
    assert block.tolist() == [[2, 0, MASK, MASK, MASK]]
    assert chain.shape == first.shape
    assert chain.dtype == torch.bfloat16
