"""The tokens behind which candidates are scored."""

from __future__ import annotations

import torch

from d2sd.plugins.pair_scores import parents_of


def test_parents() -> None:
    """The token at a slot's place, then the candidates of the slot before; of the first slot that token again."""
    blocks, tokens = torch.tensor([[[4, 9, 63]]]), torch.tensor([[[[1, 2], [3, 5]]]])
    assert parents_of(tokens, blocks).tolist() == [[[[4, 4, 4], [9, 1, 2]]]]
