"""The handover of steps in plain PyTorch: the specification."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from d2sd.plugins.dispatch import op

OP = "the handover of steps"


@op(OP, launcher="kernel")
def begin(
    anchor: Tensor, context_len: Tensor, active: Tensor, late: Tensor, source: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Anchors, context lengths [B] int64 and which rows are active [B] bool: of the batch's own, or of the state's rows
    `source` [B] int64 where `late` [B] bool.
    """
    inputs = torch.stack([anchor, context_len, active])
    anchor, context_len, active = torch.where(late, state[:, source], inputs)
    return anchor, context_len, active.bool()


@op(OP, launcher="kernel")
def end(
    context_len: Tensor, active: Tensor, tokens: Tensor, count: Tensor, limit: Tensor, stop: Tensor, state: Tensor
) -> None:
    """Write the state of the step's rows: its tokens [B, G], of which `count` [B] are new. A row ends at the context
    length `limit` [B] or at a token of `stop` [B, S], among which is every one below 0.
    """
    anchor, length, still_active = state[:, : len(count)]
    last = torch.gather(tokens, 1, count[:, None] - 1)[:, 0]
    torch.clamp(last, min=0, out=anchor)  # below 0: `stop` ends the row
    torch.add(context_len, count, out=length)
    new = torch.arange(tokens.shape[1], device=tokens.device) < count[:, None]
    stopped = ((tokens[..., None] == stop[:, None]).any(-1) & new).any(-1)
    torch.gt(active, stopped | (length >= limit), out=still_active)


@op(OP, launcher="kernel")
def commit(
    path: Tensor,
    count: Tensor,
    active: Tensor,
    context_len: Tensor,
    features: Tensor,
    tables: Sequence[Tensor] = (),
    into: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows that a step commits: features [B, G, F], positions [B, G] int64, and whether each is kept [B, G] bool.

    They are those of the nodes `path` [B, G] among `features` [B, N, F], the first `count` [B] of each `active` [B]
    request, behind its `context_len` [B]. Rows that are not kept have features and positions as if they were.

    Args:
        tables: [B, M] int64, page tables to copy; only with `into`.
        into: features [B, G', F], positions and `keep` [B, G'], G' ≥ G, and copies of the tables. Their first G rows
            receive the result and are returned, and in the others `keep` becomes false. None: new tensors.
    """
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
