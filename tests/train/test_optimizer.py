"""Muon and AdamW side by side: who gets what, what is remembered, and that both learn."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from d2sd.train.state import Optimizer
from tests.train.helpers import BLOCK, exact_features, greedy_responses, greedy_tau, new_drafter, settings
from tests.train.test_loop import quiet, trainer


def stepped(optimizer: Optimizer, drafter: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.update(1e-2)
    assert all(parameter.grad is None for parameter in drafter.parameters())


def test_muon_takes_the_matrices_and_adamw_the_rest() -> None:
    """Muon's step is orthogonal: the rows of a wide matrix move in directions at right angles."""
    drafter = new_drafter()
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    stepped(Optimizer(drafter, settings(optimizer="muon", weight_decay=0)), drafter, 0)
    for name, parameter in drafter.named_parameters():
        moved = (parameter.detach() - before[name]).float()
        if moved.dim() == 1:
            assert torch.allclose(moved.abs(), torch.full_like(moved, 1e-2), rtol=1e-3), "AdamW's first step"
            continue
        spectrum = torch.linalg.svdvals(moved)
        # five Newton-Schulz iterations leave singular values between 0.7 and 1.2 of their aim
        assert float(spectrum.max() / spectrum.min()) < 2.5, name
        assert 0.1e-2 < float(moved.square().mean().sqrt()) < 0.3e-2, "as large as AdamW's, in its authors' measure"


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_what_is_remembered_survives(kind: str) -> None:
    drafter = new_drafter()
    optimizer = Optimizer(drafter, settings(optimizer=kind))
    stepped(optimizer, drafter, 0)
    saved, twin = copy.deepcopy(optimizer.tensors()), copy.deepcopy(drafter)
    stepped(optimizer, drafter, 1)
    other = Optimizer(twin, settings(optimizer=kind))
    other.restore(saved)
    stepped(other, twin, 1)
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), twin.parameters(), strict=True))
    forgetful, third = Optimizer(new_drafter(), settings(optimizer=kind)), copy.deepcopy(twin)
    assert not forgetful.tensors()
    stepped(Optimizer(third, settings(optimizer=kind)), third, 2)
    stepped(optimizer, drafter, 2)
    assert not all(torch.equal(a, b) for a, b in zip(drafter.parameters(), third.parameters(), strict=True))


def test_muon_overfits_responses(tmp_path: Path) -> None:
    known = exact_features(greedy_responses()).split(2)[0]
    made = trainer(known, optimizer="muon", steps=40, learning_rate=4e-2, blocks=16, negatives=16)
    made.run(tmp_path, quiet)
    assert greedy_tau(made.drafter, known) > 0.9 * BLOCK
