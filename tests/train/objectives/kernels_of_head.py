"""The kernels of a GPU against what they replace: started by test_head_triton.py under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import triton  # type: ignore[import-untyped]

from d2sd.train.objectives import head as module
from d2sd.train.objectives.head import Added, Head, Rows, head_stats
from d2sd.train.objectives.head_triton import gradient_triton, stats_triton

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
ROWS, HIDDEN = 9, 16


@pytest.mark.parametrize("added", [False, True], ids=["plain", "added"])
@pytest.mark.parametrize("ids", [5, 2048, 4500])
def test_kernels_are_what_pytorch_computes(ids: int, added: bool) -> None:
    """Rows that agree with the target or forbid their likeliest id, ids that are raised, and a part of a block."""
    draw = torch.Generator().manual_seed(ids)
    weight = torch.randn(ids, HIDDEN, generator=draw).to(DEVICE)
    hidden, target = torch.randn(2, ROWS, HIDDEN, generator=draw).to(DEVICE)
    hidden[0] = target[0]
    correction = torch.zeros(ids, device=DEVICE)
    correction[-(ids // 3) :] = 1.7
    labels = torch.randint(ids, (ROWS,), generator=draw).to(DEVICE)
    head = Head(weight, correction)
    banned = torch.full_like(labels, -1)
    banned[3:6] = torch.where(labels[3:6] == 0, 1, 0)
    banned[6:8] = head.logits(hidden[6:8], None).argmax(-1)
    banned = torch.where(banned == labels, -1, banned)
    more = None
    if added:
        inner = torch.randn(ROWS, 4, generator=draw).to(DEVICE)
        of_ids = torch.randn(ids, 5, generator=draw).to(DEVICE)
        more = Added(inner, of_ids[:, :4].contiguous(), of_ids[:, 4].contiguous())
    upstream = torch.randn(3, ROWS, generator=draw).to(DEVICE)

    rows = Rows(hidden, target, labels, head, banned, more)
    given = module._inputs(rows)
    columns, *norms = stats_triton(*given)
    expected = head_stats(rows)
    for name, found, wanted in zip(expected._fields, columns, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5, msg=name)
    wanted = module._gradient(rows, list(upstream))
    found = gradient_triton(*given, (norms[0], norms[1]), list(upstream), torch.float32)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
