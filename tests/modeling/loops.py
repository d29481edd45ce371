"""A decoder layer and a drafter by their architecture's description, sharing no line with the product: loops over rows,
heads and keys in float64, on plain NumPy vectors.

Shape letters: E hidden, D head size, n auxiliary layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from d2sd.modeling.config import BodyConfig

Vector = NDArray[np.float64]
#: Of a layer by name, such as "self_attn.q_proj.weight".
Weights = Mapping[str, Vector]
#: Window and causality of a layer.
View = tuple[int | None, bool]
EVERYTHING: View = (None, False)


def rms_norm(x: Vector, weight: Vector, eps: float) -> Vector:
    mean_square = sum(float(value) ** 2 for value in x) / len(x)
    return x / math.sqrt(mean_square + eps) * weight


def rope(x: Vector, position: int, theta: float, *, neighbours: bool = False) -> Vector:
    """Coordinates i and i + D/2, or `neighbours` 2i and 2i + 1, rotate together by position · theta^(-2i/D)."""
    half, out = len(x) // 2, np.empty_like(x)
    for i in range(half):
        one, other = (2 * i, 2 * i + 1) if neighbours else (i, i + half)
        angle = position * theta ** (-2 * i / len(x))
        out[one] = x[one] * np.cos(angle) - x[other] * np.sin(angle)
        out[other] = x[other] * np.cos(angle) + x[one] * np.sin(angle)
    return out


def of_layer(weights: Weights, layer: int) -> Weights:
    return {name.removeprefix(f"layers.{layer}."): x for name, x in weights.items() if f"layers.{layer}." in name}


def heads(name: str, x: Vector, place: int, w: Weights, body: BodyConfig, *, neighbours: bool = False) -> Vector:
    """[H, D] of "q", "k" or "v" of a row; q and k are normed where there are weights for it, and rotated."""
    made = w[f"self_attn.{name}_proj.weight"] @ x + w.get(f"self_attn.{name}_proj.bias", np.zeros(1))
    parts = list(made.reshape(-1, body.head_dim))
    if name != "v":
        if (norm := w.get(f"self_attn.{name}_norm.weight")) is not None:
            parts = [rms_norm(part, norm, body.rms_norm_eps) for part in parts]
        parts = [rope(part, place, body.rope.theta, neighbours=neighbours) for part in parts]
    return np.array(parts)


def attention(q: Vector, keys: Sequence[Vector], values: Sequence[Vector], w: Weights, body: BodyConfig) -> Vector:
    """[E] of a row with these queries that sees these tokens, each [Hkv, D]; a layer may have sinks."""
    sinks, attended = w.get("self_attn.attention_sink_bias"), []
    for index, query in enumerate(q):
        group = index * body.num_kv_heads // body.num_heads
        chances = [math.exp(query @ key[group] / math.sqrt(body.head_dim)) for key in keys]
        total = sum(chances) + (0 if sinks is None else math.exp(sinks[index]))
        attended.append(sum(c / total * value[group] for c, value in zip(chances, values, strict=True)))
    out: Vector = w["self_attn.o_proj.weight"] @ np.concatenate(attended)
    return out


def mlp(x: Vector, w: Weights) -> Vector:
    gate, up = w["mlp.gate_proj.weight"] @ x, w["mlp.up_proj.weight"] @ x
    out: Vector = w["mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
    return out


def behind_attention(x: Vector, w: Weights, body: BodyConfig) -> Vector:
    """A row with what its MLP adds."""
    return x + mlp(rms_norm(x, w["post_attention_layernorm.weight"], body.rms_norm_eps), w)


def convolved(rows: list[Vector], inputs: list[Vector], base: Vector, projection: Vector, side: int) -> list[Vector]:
    """Short convolutions over the rows of a block: number by number, with coefficients that each row's input gives."""
    taps, hidden = base.shape[1:]
    groups = projection.shape[0] // (2 * taps)
    out = []
    for t in range(len(rows)):
        given = projection @ inputs[t]
        row = np.zeros(hidden)
        for channel in range(hidden):
            group = channel // (hidden // groups)
            for tap in range(min(taps, t + 1)):  # nothing is before the block
                dynamic = given[(side * taps + tap) * groups + group]
                row[channel] += (base[side, tap, channel] + dynamic) * rows[t - tap][channel]
        out.append(row)
    return out


def draft(
    weights: Weights,
    body: BodyConfig,
    features: Sequence[Vector],
    context_positions: list[int],
    block: Sequence[Vector],
    block_positions: list[int],
    *,
    views: Sequence[View] = (),
    neighbours: bool = False,
) -> list[Vector]:
    """One block of one request. features: one [n·E] per context token. block: the target's embedding of each slot.

    `views`: what the rows of each layer see, by default everything.
    """
    eps = body.rms_norm_eps

    def around(w: Weights, part: str, rows: list[Vector], inputs: list[Vector], side: int) -> list[Vector]:
        """Behind the convolution before (0) or behind (1) a part of a layer, if there is one."""
        if f"{part}_conv.base_kernel" not in w:
            return rows
        return convolved(rows, inputs, w[f"{part}_conv.base_kernel"], w[f"{part}_conv.kernel_projection.weight"], side)

    context = [rms_norm(weights["fc.weight"] @ f, weights["hidden_norm.weight"], eps) for f in features]
    places, stream = context_positions + block_positions, list(block)
    for layer in range(body.num_layers):
        w, (window, causal) = of_layer(weights, layer), views[layer] if views else EVERYTHING
        before = [rms_norm(x, w["input_layernorm.weight"], eps) for x in stream]
        normed = around(w, "attention", before, before, 0)
        # Keys and values: the context as it is, the block after its input norm, through the same weights.
        rows = list(zip(context + normed, places, strict=True))
        keys = [heads("k", x, place, w, body, neighbours=neighbours) for x, place in rows]
        values = [heads("v", x, place, w, body) for x, place in rows]
        attended = []
        for x, place in zip(normed, block_positions, strict=True):
            seen = [n for n, at in enumerate(places) if (window is None or place - at < window)]
            seen = [n for n in seen if not causal or places[n] <= place]
            q = heads("q", x, place, w, body, neighbours=neighbours)
            attended.append(attention(q, [keys[n] for n in seen], [values[n] for n in seen], w, body))
        stream = [x + y for x, y in zip(stream, around(w, "attention", attended, before, 1), strict=True)]
        before = [rms_norm(x, w["post_attention_layernorm.weight"], eps) for x in stream]
        added = [mlp(x, w) for x in around(w, "mlp", before, before, 0)]
        stream = [x + y for x, y in zip(stream, around(w, "mlp", added, before, 1), strict=True)]
    return [rms_norm(x, weights["norm.weight"], eps) for x in stream]
