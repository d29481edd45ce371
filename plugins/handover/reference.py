"""The handover of steps in plain PyTorch: the specification."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def begin_reference(
    anchor: Tensor, context_len: Tensor, active: Tensor, late: Tensor, source: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`begin`."""
    inputs = torch.stack([anchor, context_len, active])
    anchor, context_len, active = torch.where(late, state[:, source], inputs)
    return anchor, context_len, active.bool()


def end_reference(
    context_len: Tensor, active: Tensor, tokens: Tensor, count: Tensor, limit: Tensor, stop: Tensor, state: Tensor
) -> None:
    """`end`."""
    anchor, length, still_active = state[:, : len(count)]
    last = torch.gather(tokens, 1, count[:, None] - 1)[:, 0]
    torch.clamp(last, min=0, out=anchor)  # below 0: `stop` ends the row
    torch.add(context_len, count, out=length)
    new = torch.arange(tokens.shape[1], device=tokens.device) < count[:, None]
    stopped = ((tokens[..., None] == stop[:, None]).any(-1) & new).any(-1)
    torch.gt(active, stopped | (length >= limit), out=still_active)


def commit_reference(
    path: Tensor,
    count: Tensor,
    active: Tensor,
    context_len: Tensor,
    features: Tensor,
    tables: Sequence[Tensor],
    into: Sequence[Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`commit`."""
    steps = torch.arange(path.shape[1], device=path.device)
    keep = (steps < count[:, None]) & active[:, None]
    of_rows = torch.arange(len(path), device=path.device)[:, None]
    found = features[of_rows, path], context_len[:, None] + steps, keep
    if into is None:
        return found
    into[2][:, len(steps) :].zero_()
    for target, given in zip((*(x[:, : len(steps)] for x in into[:3]), *into[3:]), (*found, *tables), strict=True):
        target.copy_(given)
    return into[0][:, : len(steps)], into[1][:, : len(steps)], into[2][:, : len(steps)]
