"""Names and shapes of the models' tensors, by arithmetic from their geometry: no PyTorch, so plans count them at once.

A checkpoint is held to this table before any of it is read. Modules are built by code of their own; a test compares the
table with the tensors of every family, every kind of drafter, every head and every scheme of quantization.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from d2sd.modeling.config import BodyConfig, DecoderConfig, DrafterConfig, ExpertsConfig
    from d2sd.modeling.scheme import Scheme

# Shape letters: E hidden, I intermediate, Hq/Hkv heads, D head size, V vocabulary, X experts.

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear layer, which checkpoints may hold quantized."""

    inputs: int
    outputs: int
    bias: bool = False

    def tensors(self) -> dict[str, Shape]:
        """Tensors of a plain one: weight [outputs, inputs] and bias [outputs]."""
        return {"weight": (self.outputs, self.inputs)} | ({"bias": (self.outputs,)} if self.bias else {})


#: Linear layers and other tensors by their names in a module.
Parts = dict[str, "LinearShape | Shape"]
_PLAIN: Mapping[str, Scheme] = MappingProxyType({})


def shapes_of(parts: Parts, schemes: Mapping[str, Scheme] = _PLAIN) -> dict[str, Shape]:
    """Names and shapes of all tensors; `schemes` are those of the linear layers that are quantized."""
    shapes: dict[str, Shape] = {}
    for name, part in parts.items():
        if isinstance(part, LinearShape):
            tensors = schemes[name].tensors(part) if name in schemes else part.tensors()
            shapes |= {f"{name}.{tensor}": shape for tensor, shape in tensors.items()}
        else:
            shapes[name] = part
    return shapes


def linear_parts(parts: Parts) -> list[str]:
    """Names of the layers that can be quantized: all linear ones except the language-model head."""
    return [name for name, part in parts.items() if isinstance(part, LinearShape) and name != "lm_head"]


def below(name: str, parts: Parts) -> Parts:
    """The parts of a module under its name."""
    return {f"{name}.{part}": shape for part, shape in parts.items()}


def target_parts(config: DecoderConfig, *, fp8_cache: bool = False) -> Parts:
    """Parts of `Decoder`; with `fp8_cache`, scales of its K/V too."""
    body = config.body
    parts: Parts = {"embed_tokens.weight": (config.vocab_size, body.hidden_size)}
    for index in range(body.num_layers):
        parts |= below(f"layers.{index}", _layer(body, index, fp8_cache=fp8_cache))
    parts["norm.weight"] = (body.hidden_size,)
    if not config.tie_word_embeddings:
        parts["lm_head"] = LinearShape(body.hidden_size, config.vocab_size)
    return parts


def drafter_parts(config: DrafterConfig) -> Parts:
    """Parts of `Drafter`, and of its head."""
    body, head, hidden = config.body, config.head, config.body.hidden_size
    layer = attending(body) | _rest(body, 0) | ({} if head is None else head.layer_parts(body))
    parts: Parts = {"mask_embedding": (hidden,)} if config.mask_embedding else {}
    parts |= {"fc": LinearShape(len(config.target_layer_ids) * hidden, hidden), "hidden_norm.weight": (hidden,)}
    for index in range(body.num_layers):
        parts |= below(f"layers.{index}", layer)
    parts["norm.weight"] = (hidden,)
    return parts | ({} if head is None else head.parts(body, config.vocab_size))


def _layer(body: BodyConfig, index: int, *, fp8_cache: bool) -> Parts:
    """Layer `index` of a target."""
    recurrent = body.recurrent
    if recurrent is not None and index in recurrent.layers:
        return below(recurrent.module, recurrent.parts(body.hidden_size)) | _rest(body, index)
    cache: Parts = {f"self_attn.{kind}_cache.scale": () for kind in ("k", "v")} if fp8_cache else {}
    norms = ("pre_feedforward_layernorm", "post_feedforward_layernorm") if body.branch_norms else ()
    more: Parts = {f"{name}.weight": (body.hidden_size,) for name in norms}
    more |= {"layer_scalar": (1,)} if body.layer_scale else {}
    return attending(body.at(index)) | cache | _rest(body, index) | more


def attending(body: BodyConfig) -> Parts:
    """Parts of a layer's attention."""
    hidden, heads, keys = body.hidden_size, body.num_heads * body.head_dim, body.num_kv_heads * body.head_dim
    parts: Parts = {
        "q_proj": LinearShape(hidden, 2 * heads if body.output_gate else heads, body.qkv_bias),
        "k_proj": LinearShape(hidden, keys, body.qkv_bias),
        "v_proj": LinearShape(hidden, keys, body.qkv_bias),
        "o_proj": LinearShape(heads, hidden, body.o_bias),
    }
    if body.keys_are_values:
        del parts["v_proj"]
    if body.qk_norm:
        parts |= {"q_norm.weight": (body.head_dim,), "k_norm.weight": (body.head_dim,)}
    if body.sinks:
        parts["sinks"] = (body.num_heads,)
    return below("self_attn", parts)


def _rest(body: BodyConfig, index: int) -> Parts:
    """Feed-forward network of layer `index`, and the two norms that every layer has."""
    experts, hidden = body.experts, body.hidden_size
    if experts is None or index in experts.dense_layers:
        network = _mlp(hidden, body.intermediate_size)
    else:
        network = _experts(hidden, experts)
    norms: Parts = {f"{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    return below("mlp", network) | norms


def _mlp(hidden: int, inner: int) -> Parts:
    up = LinearShape(hidden, inner)
    return {"gate_proj": up, "up_proj": up, "down_proj": LinearShape(inner, hidden)}


def _experts(hidden: int, config: ExpertsConfig) -> Parts:
    count, inner = config.count, config.intermediate_size
    parts: Parts = {
        "router.weight": (count, hidden),
        "gate_up": (count, 2 * inner, hidden),
        "down": (count, hidden, inner),
    }
    if config.bias:
        parts |= {"router.bias": (count,), "gate_up_bias": (count, 2 * inner), "down_bias": (count, hidden)}
    if config.sigmoid:
        parts["router.choice_bias"] = (count,)
    if config.shared_size is not None:
        parts |= below("shared_expert", _mlp(hidden, config.shared_size))
        parts["shared_expert_gate"] = LinearShape(hidden, 1)
    return parts
