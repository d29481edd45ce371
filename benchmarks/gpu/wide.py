"""A model of another size that computes what a small trained one computes: real answers at the cost of large weights.

Whether a second drafter pays depends on how long a step takes and on how many tokens it commits. Random weights of a
large model show the first, a small trained pair the second; a widened pair shows both in one figure. Every channel
that the small model has is there with its weights. Weights that read other channels are random and multiply zeros;
those that would write to them are zero. Further layers add nothing. So all bytes are read and all products computed.

A norm divides by the mean over all channels, so its weights are scaled by √(small / large hidden size) and its epsilon
by the square of that. In bf16 this rounds once more: answers differ from the small model's at near-ties, but plain
decoding and speculation are of the same widened model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from d2sd.bundle.load import Bundle
from d2sd.convert.kinds import KINDS
from d2sd.modeling.config import BodyConfig, DecoderConfig
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.modeling.fp8 import IN_FP8, Fp8Linear
from d2sd.modeling.layers import RMSNorm
from d2sd.plugins.shared.fp8 import LARGEST
from d2sd.policies import DrafterRole

Model = TypeVar("Model", bound=nn.Module)
#: Standard deviation of weights that multiply zeros.
_NOISE = 0.02


@dataclass(frozen=True)
class Size:
    """Widths and depths; the head size stays that of the small model."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    layers: int
    drafter_layers: int


#: Qwen3-8B's and Qwen3-32B's with heads of 64 in place of 128, and drafters of five layers, as public ones have. The
#: vocabulary is the small model's.
SIZES = {"8b": Size(4096, 12288, 64, 16, 36, 5), "32b": Size(5120, 25600, 128, 16, 64, 5)}


def widened(
    bundle: Bundle, size: Size, device: str, target: Decoder | None = None, block_size: int | None = None
) -> Bundle:
    """The bundle with models of this size on `device`; `target` is one that was widened before. With another
    `block_size` than they were trained for, drafters are used without their calibration, which is of their slots.
    """
    small = bundle.target
    drafters: dict[DrafterRole, DraftModel] = {}
    with torch.no_grad():
        if target is None:
            target = _target(small, size, device)
        for role, drafter in bundle.drafters.items():
            drafters[role] = _drafter(cast("Drafter", drafter), target, size, device, block_size)
            KINDS[drafters[role].config.kind].attach(drafters[role], target)
    large = replace(bundle, target=target, drafters=drafters)
    return large if block_size is None else _in_blocks(large, block_size)


def _in_blocks(bundle: Bundle, block_size: int) -> Bundle:
    recipe = bundle.manifest.recipe
    recipe = recipe.model_copy(
        update={"tree": recipe.tree.model_copy(update={"block_size": block_size, "max_depth": None})}
    )
    return replace(bundle, manifest=bundle.manifest.model_copy(update={"recipe": recipe}), calibration=None)


def _target(small: Decoder, size: Size, device: str) -> Decoder:
    body = _body(small.config.body, size, size.layers)
    config = DecoderConfig(small.config.family, body, small.config.vocab_size, tie_word_embeddings=False)
    large = _empty(lambda: Decoder(config), small.head.dtype, device)
    places = _Places(small.config.body, body)
    large.embed_tokens.weight.zero_()[:, : places.hidden] = small.embedding.to(device)
    large.lm_head.weight.normal_(std=_NOISE)[:, : places.hidden] = small.head.to(device)
    _fill(small, large, places)
    return large


def _drafter(small: Drafter, target: Decoder, size: Size, device: str, block_size: int | None) -> Drafter:
    body = _body(small.config.body, size, size.drafter_layers)
    config = replace(
        small.config,
        body=body,
        num_target_layers=target.config.body.num_layers,
        block_size=block_size or small.config.block_size,
    )
    large = _empty(lambda: Drafter(config), small.norm.weight.dtype, device)
    _fill(small, large, _Places(small.config.body, body))
    setattr(large, IN_FP8, small.in_fp8)
    return large


def _body(small: BodyConfig, size: Size, layers: int) -> BodyConfig:
    assert not small.beyond_llama, f"widens dense layers alone, not {small.beyond_llama}"
    assert not small.qkv_bias, "widens layers without biases"
    assert not small.o_bias, "widens layers without biases"
    return replace(
        small,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_layers=layers,
        num_heads=size.heads,
        num_kv_heads=size.kv_heads,
        rms_norm_eps=small.rms_norm_eps * small.hidden_size / size.hidden,
    )


def _empty(make: Callable[[], Model], dtype: torch.dtype, device: str) -> Model:
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = make()
    finally:
        torch.set_default_dtype(default)
    return model.to(device).eval().requires_grad_(False)


class _Places:
    """Where the channels of a small model are in a large one."""

    def __init__(self, small: BodyConfig, large: BodyConfig) -> None:
        self.hidden, self.wide = small.hidden_size, large.hidden_size
        self.ratio = (small.hidden_size / large.hidden_size) ** 0.5
        head, group = large.head_dim, large.num_heads // large.num_kv_heads
        few = small.num_heads // small.num_kv_heads
        assert few <= group, "every K/V head keeps its queries"
        heads = [group * (index // few) + index % few for index in range(small.num_heads)]
        #: Rows of queries: of those that are there, and of all whose K/V head is; the latter have outputs.
        self.queries = torch.cat([torch.arange(head * index, head * (index + 1)) for index in heads])
        self.answering = head * group * small.num_kv_heads
        self.gates = small.intermediate_size


def _fill(small: nn.Module, large: nn.Module, places: _Places) -> None:
    """Weights of layers, norms and heads, from those of the same name."""
    others = dict(small.named_modules())
    for name, module in list(large.named_modules()):
        other = others.get(name)
        if isinstance(module, RMSNorm) and len(module.weight) == places.wide:
            module.weight.zero_()
            if other is not None:
                scaled = places.ratio * cast("Tensor", other.weight).float()
                module.weight[: places.hidden] = scaled.to(module.weight)
        elif isinstance(module, RMSNorm) and other is not None:  # of heads
            module.weight.copy_(cast("Tensor", other.weight))
        elif isinstance(module, nn.Linear) and name != "lm_head":
            _fill_linear(name, module, cast("nn.Linear | Fp8Linear | None", other), places)
            if isinstance(other, Fp8Linear) or (other is None and getattr(small, IN_FP8, False)):
                _round(name, large, module, other)
        elif other is not None and hasattr(module, "successor_projection"):
            for key in ("predecessor_projection", "successor_projection"):  # of embeddings, divided by their RMS
                weight, scaled = getattr(module, key), places.ratio * getattr(other, key).float()
                weight.normal_(std=_NOISE)[:, : places.hidden] = scaled.to(weight)


def _fill_linear(name: str, large: nn.Linear, small: nn.Linear | Fp8Linear | None, places: _Places) -> None:
    """One linear layer; `small` None: of a layer that adds nothing."""
    weight, last = large.weight, name.rpartition(".")[2]
    limit = None if not isinstance(small, Fp8Linear) else float(LARGEST * small.weight_scale)
    weight.normal_(std=_NOISE if limit is None else min(_NOISE, limit / 6))
    if small is None:
        if last in ("v_proj", "up_proj"):
            weight.zero_()
        return
    given = small.dequantized() if isinstance(small, Fp8Linear) else small.weight
    given = given.to(device=weight.device, dtype=weight.dtype)
    rows, read = _rows_and_columns(last, given, places)
    if last in ("v_proj", "up_proj"):  # what else they make would not be zero
        weight.zero_()
    if last in ("o_proj", "down_proj", "fc"):
        weight[:, read] = 0
        if last == "o_proj":
            weight[:, : places.answering] = 0
    weight[rows[:, None].to(weight.device), read.to(weight.device)] = given


def _rows_and_columns(last: str, given: Tensor, places: _Places) -> tuple[Tensor, Tensor]:
    """Where the weights of the small layer are in the large one."""
    hidden = torch.arange(places.hidden)
    parts = given.shape[1] // places.hidden  # of `fc`
    columns = torch.cat([places.wide * part + hidden for part in range(parts)]) if last == "fc" else hidden
    places_of: Mapping[str, tuple[Tensor, Tensor]] = {
        "q_proj": (places.queries, hidden),
        "o_proj": (hidden, places.queries),
        "down_proj": (hidden, torch.arange(places.gates)),
        "fc": (hidden, columns),
    }
    return places_of.get(last, (torch.arange(len(given)), hidden))


def _round(name: str, large: nn.Module, layer: nn.Linear, small: Fp8Linear | None) -> None:
    """Put FP8 in the place of a layer, with the small one's scales."""
    parent, _, last = name.rpartition(".")
    one = torch.ones((), dtype=torch.float32, device=layer.weight.device)
    scales = (one, one / 1024) if small is None else (small.input_scale.to(one), small.weight_scale.to(one))
    setattr(large.get_submodule(parent), last, Fp8Linear.of(layer, *scales))
