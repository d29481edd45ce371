"""The ops that gated attention and gated delta nets have besides those of `layer_ops`, a kernel each, on CUDA.

    delta_heads.py   parameters of what comes in front of the delta rule
    reference.py     the specification in plain PyTorch, in the order of rounding of `modeling/`
    triton/          the kernels and their launchers

    op               takes the place of                                         products and ops around it
    gate_heads       heads times sigmoid(gate), quantisation                    attention  ->  o
    delta_inputs     convolution and silu, log gates, sigmoid(b)                joint      ->  the delta rule
    gated_norm       RMSNorm of heads times silu(z), quantisation               the delta rule  ->  out

Each op picks its implementation as those of `layer_ops` do.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from d2sd.plugins import dispatch
from d2sd.plugins.cascade_attention import AttnMask, ChunkMask
from d2sd.plugins.delta_rule import DeltaRows
from d2sd.plugins.dispatch import Implementation
from d2sd.plugins.gated_layers import reference
from d2sd.plugins.gated_layers.delta_heads import DeltaHeads
from d2sd.plugins.layer_ops import OP, Heads

__all__ = ["DeltaHeads", "delta_inputs", "gate_heads", "gated_norm"]

# Shape letters: R rows, B requests, T rows of each, N rows of chunks, Hq query heads, D head size; of gated delta nets
# Hk/Hv heads of keys and of values, Dk/Dv their sizes, C channels and W taps of the convolution, P slots of states.


def _implementation(x: Tensor) -> ModuleType:
    if dispatch.pick(OP, x, loaded=True) is Implementation.REFERENCE:
        return reference
    from d2sd.plugins.gated_layers.triton import launch

    return launch


def gate_heads(
    x: Tensor, product: Tensor, heads: Heads, *, scale: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Heads [R, Hq, D] behind attention, times the sigmoids of their gates -> [R, Hq·D].

    Args:
        product: [R, 2·Hq·D + ...], of which `qk_norm_rope` took the queries; strided by row.
        heads: of one layer, `gated`.
        scale: 0-dim fp32; with it the result is quantized.
        out: [R, Hq·D], contiguous, of the result's type; receives the result. None: a new tensor.
    """
    gated: Tensor = _implementation(x).gate_heads(x, product, heads, scale=scale, out=out)
    return gated


def delta_inputs(
    product: Tensor,
    gates: Tensor,
    heads: DeltaHeads,
    states: Tensor,
    slots: Tensor,
    mask: AttnMask | ChunkMask,
    inputs: Tensor,
    rows: DeltaRows,
) -> Tensor:
    """Queries [B, T, Hk, Dk] of a gated delta net, of chunks [1, N, Hk, Dk], and what its rows write into states.

    The convolution is `d2sd.plugins.delta_rule.tree_convolution`, or `chunk_convolution` without its commit; log gates
    are decay · softplus(a + bias), and the weights of new values sigmoid(b).

    Args:
        product: [R, C + Hv·Dv], q, k, v and z of the rows, strided by row; or as `heads.grouped` says. Fp32 sums of FP8
            values where `heads.scales`, as `gates`.
        gates: [R, 2·Hv], b and a, strided by row.
        states: [P, C, W - 1] of the convolution, of this layer; read at `slots` [B].
        mask: of a tree, whose ancestors come before their descendants, or of chunks.
        inputs: [B, T, C], receives what the convolution reads.
        rows: of one layer, receive the rest.
    """
    q: Tensor = _implementation(product).delta_inputs(product, gates, heads, states, slots, mask, inputs, rows)
    return q


def gated_norm(
    x: Tensor,
    product: Tensor,
    weight: Tensor,
    eps: float,
    heads: DeltaHeads,
    *,
    scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """RMSNorm of each head of x [R, Hv, Dv], times silu(z) -> [R, Hv·Dv].

    Args:
        product: as of `delta_inputs`.
        weight: [Dv].
        scale, out: as of `gate_heads`.
    """
    given = x, product, weight, eps, heads
    gated: Tensor = _implementation(x).gated_norm(*given, scale=scale, out=out)
    return gated
