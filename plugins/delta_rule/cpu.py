"""The ops as calls of the compiled library: tensors on a CPU, arguments as of the specifications.

The rule is always the recurrence, so all of it is `exact`.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from ctypes import Structure, byref, c_long, c_void_p
from dataclasses import replace

import torch
from torch import Tensor

from d2sd.plugins.cascade_attention.arguments import ChunkMask
from d2sd.plugins.cascade_attention.mask import allowed_of
from d2sd.plugins.cpu.library import TYPES, address, functions
from d2sd.plugins.delta_rule.types import DeltaRows

# Shape letters as in d2sd/plugins/delta_rule/__init__.py.

#: Columns of a state that are computed at once, and channels.
LANES = 16


class Rule(Structure):
    """`struct delta_rule`."""

    _fields_ = [
        *((name, c_long) for name in ("layers", "batch", "rows", "keys", "heads", "key_size", "size")),
        *((name, c_long) for name in ("slot_count", "type")),
        *((name, c_void_p) for name in ("q", "k", "v", "g", "beta", "states", "slots", "starts")),
        *((name, c_void_p) for name in ("mask", "path", "count")),
        ("width", c_long),
        ("out", c_void_p),
    ]


class Convolution(Structure):
    """`struct convolution`."""

    _fields_ = [
        *((name, c_long) for name in ("batch", "rows", "channels", "taps", "type", "silu")),
        *((name, c_void_p) for name in ("x", "weight", "bias", "past", "starts", "mask", "out", "parent")),
    ]


def supported(rows: DeltaRows, states: Tensor) -> bool:
    """Whether the library takes these rows and states."""
    types = rows.k.dtype == rows.v.dtype and rows.k.dtype in TYPES and states.dtype == torch.float32
    return types and rows.v.shape[-1] % LANES == 0 and states.is_contiguous()


def tree_delta_rule(q, rows, states, slots, attn_mask, *, exact=False):
    batch, count = q.shape[:2]
    return _outputs(q, rows, states, slots, torch.arange(batch + 1) * count, allowed_of(attn_mask).contiguous())


def chunk_delta_rule(q, rows, states, slots, chunks, *, exact=False):
    return _outputs(q, rows, states, slots, chunks.starts.long().contiguous(), None)


def _outputs(q: Tensor, rows: DeltaRows, states: Tensor, slots: Tensor, starts: Tensor, mask: Tensor | None) -> Tensor:
    out = torch.empty(rows.v.shape, dtype=rows.v.dtype)
    stacked = DeltaRows(rows.k[None], rows.v[None], rows.g[None], rows.beta[None])
    _run(stacked, states[None], slots, starts, q=q, mask=mask, out=out)
    return out


def commit_delta_rule(rows, states, slots, path, count):
    batch, each = rows.k.shape[1:3]
    starts = torch.arange(batch + 1) * each
    _run(rows, states, slots, starts, path=path.long().contiguous(), count=count.long().contiguous())


def _run(
    rows: DeltaRows,
    states: Tensor,
    slots: Tensor,
    starts: Tensor,
    *,
    q: Tensor | None = None,
    mask: Tensor | None = None,
    path: Tensor | None = None,
    count: Tensor | None = None,
    out: Tensor | None = None,
) -> None:
    """Rows [L, B, T, ...] and states [L, P, ...]; the other arguments as in the structure."""
    one = replace(rows, g=rows.g.float(), beta=rows.beta.float())
    given = [x.contiguous() for x in (one.k, one.v, one.g, one.beta)]  # alive until the call
    q, slots = None if q is None else q.contiguous(), slots.long().contiguous()
    layers, *several, keys, key_size = rows.k.shape
    heads, size = rows.v.shape[-2:]
    assert q is None or q.dtype == rows.k.dtype
    assert mask is None or mask.dtype == torch.bool
    assert states.shape == (layers, states.shape[1], heads, key_size, size)
    sizes = layers, len(slots), several[0] * several[1], keys, heads, key_size, size, states.shape[1]
    pointers = map(address, (q, *given, states, slots, starts, mask, path, count))
    width = 0 if path is None else path.shape[1]
    call = Rule(*sizes, TYPES[rows.k.dtype], *pointers, width, address(out))
    functions().d2sd_delta_rule(byref(call), torch.get_num_threads())


def convolution(x, weight, states, slots, mask, bias=None, *, silu=True):
    taps, count = weight.shape[1], x.shape[0] * x.shape[1]
    starts = mask.starts.long() if isinstance(mask, ChunkMask) else torch.arange(len(slots) + 1) * x.shape[1]
    allowed = None if isinstance(mask, ChunkMask) else allowed_of(mask).contiguous()
    past = states[slots].to(x.dtype).float().transpose(1, 2).contiguous()
    inputs = x.contiguous(), weight.float().T.contiguous(), None if bias is None else bias.float().contiguous()
    out, parent = torch.empty_like(inputs[0]), torch.empty(count, dtype=torch.int32)
    assert past.shape == (len(slots), taps - 1, x.shape[2])
    pointers = map(address, (*inputs, past, starts.contiguous(), allowed, out, parent))
    call = Convolution(len(slots), count, x.shape[2], taps, TYPES[x.dtype], silu, *pointers)
    functions().d2sd_convolution(byref(call), torch.get_num_threads())
    return out
