"""The causal convolution of each channel in front of the delta rule, where a row's past is its ancestors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from d2sd.plugins.cascade_attention.arguments import ChunkMask
from d2sd.plugins.cascade_attention.mask import AttnMask, allowed_of
from d2sd.plugins.delta_rule.cpu import LANES
from d2sd.plugins.delta_rule.reference.recurrence import parents_of
from d2sd.plugins.delta_rule.types import OP
from d2sd.plugins.dispatch import Implementation, op, pick

# Shape letters as in d2sd/plugins/delta_rule/__init__.py.


def _picked(x: Tensor, *_: object, **__: object) -> Implementation:
    return pick(OP, x, library=x.shape[-1] % LANES == 0)


@op(OP, picked=_picked)
def convolution(
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    slots: Tensor,
    mask: Tensor | AttnMask | ChunkMask,
    bias: Tensor | None = None,
    *,
    silu: bool = True,
) -> Tensor:
    """The causal convolution of every channel over a row and its nearest W - 1 ancestors, or its silu.

    In place of ancestors before the tree stand the last committed inputs. Bits depend on those inputs alone.

    Args:
        x: [B, T, C], of chunks [1, N, C].
        weight: [C, W], the row's own tap last.
        states: [P, C, W - 1], contiguous, of the layer, the last committed input last.
        slots: as of `tree_delta_rule`.
        mask: of a tree, as there, or of chunks, which are causal.
        bias: [C].

    Returns:
        As x, in its type; sums are fp32.
    """
    taps = weight.shape[1]
    if isinstance(mask, ChunkMask):
        parts = []
        for slot, span in zip(slots.tolist(), mask.spans(), strict=True):
            inputs = torch.cat([states[slot].to(x.dtype).T, x[0, span]])
            parts.append(_convolved(inputs.unfold(0, taps, 1), weight, bias, silu=silu))
        return torch.cat(parts)[None]
    inputs = torch.cat([states[slots].to(x.dtype).transpose(1, 2), x], 1)  # [B, W - 1 + T, C]
    # Row -1 is the last input of the state, row -2 the one before: a parent of a row below 0 is the row before it.
    at = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
    parents, window = parents_of(allowed_of(mask)), []
    for _ in range(taps):
        window.append(inputs.gather(1, (at + taps - 1)[..., None].expand_as(x)))
        at = torch.where(at >= 0, parents.gather(1, at.clamp(min=0)), at - 1)
    return _convolved(torch.stack(window[::-1], -1), weight, bias, silu=silu)


@op(OP)
def commit_convolution(x: Tensor, states: Tensor, slots: Tensor, path: Tensor, count: Tensor) -> None:
    """Keep the last W - 1 inputs of each request, in all layers, in place.

    Args:
        x: [L, B, T, C], inputs of the tree's rows.
        states: [L, P, C, W - 1], contiguous.
        slots, path, count: as of `commit_delta_rule`.
    """
    taps = states.shape[-1]
    inputs = torch.cat([states[:, slots].transpose(2, 3).to(x.dtype), x], 2)  # [L, B, W - 1 + T, C]
    # The last inputs of state and path: place n of both is row n of the state, or row path[n - (W - 1)].
    places = count[:, None] + torch.arange(taps, device=x.device)
    along = path.gather(1, (places - taps).clamp(0, path.shape[1] - 1)) + taps
    at = torch.where(places < taps, places, along)
    last = inputs.gather(2, at[None, ..., None].expand(len(x), -1, -1, x.shape[-1])).transpose(2, 3)
    states[:, slots] = torch.where((slots > 0)[:, None, None], last.to(states.dtype), states[:, slots])


def _convolved(window: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool) -> Tensor:
    """window [..., C, W], oldest input first, times weight [C, W]: products and sums in fp32, in this order."""
    total = window[..., 0].float() * weight[:, 0].float()
    for tap in range(1, weight.shape[1]):
        total = total + window[..., tap].float() * weight[:, tap].float()
    if bias is not None:
        total = total + bias.float()
    if not silu:
        return total.to(window.dtype)
    # In fp32 PyTorch's exponential has other last bits at the end of a tensor than inside of it.
    return F.silu(total.double()).float().to(window.dtype)
