"""The gated delta rule over a whole tree from one committed state: no state per node, and products in place of steps.

With S the committed state, G_i the sum of log gates of row i and its ancestors, and j <= i for j an ancestor of i or i
itself (TreeWY, arXiv 2608.20961; with a causal mask the chunk form of Gated DeltaNet, arXiv 2412.06464):

    A_ij    = beta_i e^(G_i - G_j) (k_i · k_j)  for j < i, else 0
    Delta   = (I + A)^-1 beta (v - e^G Sᵀ k)
    o_i     = e^(G_i) Sᵀ q_i + sum over j <= i of e^(G_i - G_j) (k_j · q_i) Delta_j

A is strictly lower triangular wherever ancestors come before their descendants. G may reach thousands while a
difference of two of them is small: sums are fp64, and e is raised to differences alone, which are at most 0. A row that
is not finite makes its descendants NaN, and no other row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from d2sd.plugins.cascade_attention.arguments import ChunkMask
from d2sd.plugins.delta_rule.reference.recurrence import normed
from d2sd.plugins.delta_rule.types import DeltaRows

# Shape letters as in d2sd/plugins/delta_rule/__init__.py.

#: Rows of a chunk that are computed at once: its products grow with their square.
CHUNK = 64
#: Log gates below it are taken as it: fp32 has no number for their exponential.
LEAST = -104


def tree_closed_form(q: Tensor, rows: DeltaRows, states: Tensor, slots: Tensor, attn_mask: Tensor) -> Tensor:
    """`tree_delta_rule` on any device."""
    return _rows_after(q, rows, states[slots].float(), attn_mask)[0]


def chunk_closed_form(q: Tensor, rows: DeltaRows, states: Tensor, slots: Tensor, chunks: ChunkMask) -> Tensor:
    """`chunk_delta_rule` on any device: pieces of `CHUNK` rows, each from the state after the one before."""
    out = torch.empty_like(rows.v)
    for request, span in enumerate(chunks.spans()):
        slot = slots[request : request + 1]
        state = states[slot].float()
        for start in range(span.start, span.stop, CHUNK):
            piece = slice(start, min(start + CHUNK, span.stop))
            some = DeltaRows(*(x[:, piece] for x in (rows.k, rows.v, rows.g, rows.beta)))
            causal = torch.ones(1, *2 * (some.k.shape[1],), dtype=torch.bool, device=q.device).tril()
            out[:, piece], state = _rows_after(q[:, piece], some, state, causal)
        states[slot] = torch.where(slot[:, None, None, None] > 0, state, states[slot])
    return out


def _rows_after(q: Tensor, rows: DeltaRows, state: Tensor, attn_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, Hv, Dv] from states [B, Hv, Dk, Dv], and the states after the last row and its ancestors."""
    group = rows.v.shape[2] // rows.k.shape[2]
    mask = attn_mask[:, None].tril()
    keys = normed(rows.k).repeat_interleave(group, 2).transpose(1, 2)  # [B, Hv, T, Dk]
    queries = normed(q).repeat_interleave(group, 2).transpose(1, 2).double() * q.shape[-1] ** -0.5
    beta, gate = rows.beta.transpose(1, 2)[..., None], rows.g.clamp(min=LEAST).transpose(1, 2)[..., None]
    given = keys, rows.v.transpose(1, 2), gate, beta
    # Rows that are not seen weigh 0, which times NaN is NaN; and nothing that fp32 holds overflows in fp64.
    broken = torch.stack([~x.isfinite().all(-1) for x in given]).any(0)  # [B, Hv, T]
    keys, values, gate, beta = (x.double().masked_fill(broken[..., None], 0) for x in given)
    state, gates = state.double(), mask.double() @ gate  # G, [B, Hv, T, 1]
    decay = (gates - gates.mT).masked_fill(~mask, float("-inf")).exp()  # e^(G_i - G_j), 0 where not j <= i
    since = gates.exp()
    a = (beta * decay * (keys @ keys.mT)).tril(-1)
    right = beta * (values - since * (keys @ state))
    delta = torch.linalg.solve_triangular(a, right, upper=False, unitriangular=True)
    out = since * (queries @ state) + (decay * (queries @ keys.mT)) @ delta
    after = since[:, :, -1:] * state + (decay[:, :, -1, :, None] * keys).mT @ delta
    reached = (mask & broken[:, :, None]).any(-1)[..., None]  # [B, Hv, T, 1]
    out, after = out.masked_fill(reached, torch.nan), after.masked_fill(reached[:, :, -1:], torch.nan)
    return out.transpose(1, 2).to(rows.v.dtype), after.float()
