"""Microseconds of kernels that are one chain of dependent instructions, by the executor's clock: of an H100."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the extra triton is not installed")

from d2sd.plugins import trees
from d2sd.plugins.trees import Branches, Draft, Source
from tools.ptxsim.launch import executed_as_ptx

#: The boost clock of an H100 SXM under load.
MEGAHERTZ = 1755
SLOTS, WIDTH, NODES, VOCABULARY = 15, 16, 64, 512


def draft(draw: torch.Generator, *shape: int, told: bool = False) -> Draft:
    """Distinct tokens a slot with falling probabilities."""
    tokens = torch.rand(*shape[:-1], VOCABULARY, generator=draw).argsort(-1)[..., : shape[-1]].contiguous()
    logprob = (2 * torch.randn(shape, generator=draw)).log_softmax(-1).sort(-1, descending=True).values
    behind = (2 * torch.randn(*shape[:-1], 1 + shape[-1], shape[-1], generator=draw)).log_softmax(-1) if told else None
    return Draft(tokens, logprob, behind)


def sources(branches: int, *, copied: bool = False, told: bool = False) -> list[Source]:
    """A first draft, a second one behind prefixes of its likely tokens, and a copy that agrees with the first."""
    draw = torch.Generator().manual_seed(0)
    found = [Source(first := draft(draw, 1, SLOTS, WIDTH, told=told))]
    if branches:
        ranks = torch.randint(2, (1, branches, SLOTS, 1), generator=draw)
        kept = first.tokens[:, None].expand(-1, branches, -1, -1).gather(-1, ranks)[..., 0].contiguous()
        length = torch.randint(5, (1, branches), generator=draw)
        at = Branches(kept, length, torch.full_like(length, -1))
        found.append(Source(draft(draw, 1, branches, SLOTS, WIDTH, told=told), at, replaces=True))
    if copied:
        copy = Draft(first.tokens[..., :1].contiguous(), first.logprob[..., :1].contiguous() - 0.1)
        found.append(Source(copy, follows=True))
    return found


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(
    ("branches", "copied", "told"),
    [(0, False, False), (4, False, False), (4, True, False), (7, True, False), (4, False, True)],
)
def test_growth(branches: int, copied: bool, told: bool) -> None:
    """Trees are as large as they are served; each node comes after the one before it."""
    anchor, given = torch.tensor([7]), sources(branches, copied=copied, told=told)
    with executed_as_ptx(90, timed=True) as launches:
        tree = trees.best_first_tree.triton(anchor, given, NODES)
    assert tree.valid.all()
    (launch,) = launches
    assert launch.cycles is not None
    assert launch.cycles / MEGAHERTZ <= 15
    assert not any(opcode.startswith("bar") for opcode in launch.counts)
