"""Which sequences a step takes, and that no random choice hangs on another."""

from __future__ import annotations

import torch

from d2sd.train.data.draws import SeededOrder
from d2sd.train.dist import Dist


def test_processes_share_every_step() -> None:
    alone = SeededOrder(0, 10, 6, Dist())
    parts = [SeededOrder(0, 10, 6, Dist(rank, 3)) for rank in range(3)]
    for step in range(5):
        shares = [list(part.numbers(step)) for part in parts]
        assert [len(share) for share in shares] == [2, 2, 2]
        assert sorted(number for share in shares for number in share) == list(alone.numbers(step))
        assert all(part.index(n) == alone.index(n) for part, share in zip(parts, shares, strict=True) for n in share)


def test_epochs_are_different_shuffles() -> None:
    draws = SeededOrder(3, 20, 1, Dist())
    epochs = [[draws.index(epoch * 20 + place) for place in range(20)] for epoch in range(4)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert SeededOrder(4, 20, 1, Dist()).index(0) != draws.index(0) or SeededOrder(4, 20, 1, Dist()).index(
        1
    ) != draws.index(1)


def test_every_purpose_place_and_seed_has_a_stream_of_its_own() -> None:
    """Also far apart: PyTorch looks at the lowest 32 bits of a seed alone."""
    streams = {
        tuple(torch.rand(4, generator=SeededOrder(seed, 5, 1, Dist()).generator(purpose, number)).tolist())
        for seed in (0, 1)
        for purpose in ("anchors", "prefixes", "candidates", "epoch")
        for number in (0, 1, 1 << 32, 1 << 40)
    }
    assert len(streams) == 32
    assert torch.equal(
        torch.rand(4, generator=SeededOrder(0, 5, 1, Dist()).generator("anchors", 7)),
        torch.rand(4, generator=SeededOrder(0, 9, 2, Dist()).generator("anchors", 7)),
    )
