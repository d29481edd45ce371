"""The tensors of a target's checkpoint: their names and shapes, by its config alone, and whether a folder has them.

Tensors have Hugging Face's names; the module's names are the same without the leading `model.`, except the K/V scales
and experts, which are stacked (`experts.py`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from d2sd.convert.checkpoint.experts import ExpertMap, layout_in
from d2sd.convert.checkpoint.families import FAMILIES
from d2sd.convert.checkpoint.headers import Rename, check_headers, read_headers
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.checkpoint.quantization import Quantization, read_quantization
from d2sd.convert.checkpoint.schemes import MXFP4
from d2sd.errors import CheckpointError
from d2sd.modeling.config import DecoderConfig
from d2sd.modeling.scheme import Scheme
from d2sd.modeling.shapes import LinearShape, linear_parts, shapes_of, target_parts

#: Scales of K and V: ModelOpt's, compressed-tensors' own and those of its first versions.
_KV_SCALE = re.compile(r"\b(?:([kv])_proj\.(?:\1_scale|output_scale)|(?<=self_attn\.)([kv])_scale)$")
_MXFP4 = re.compile(r"(?<=mlp\.experts\.)(gate_up_proj|down_proj)_(blocks|scales)$")


def target_shapes(
    config: DecoderConfig, quantization: Quantization | None = None, names: Iterable[str] = ()
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint's tensors, without the leading `model.`; a tied head counts once.

    `names`: those in the checkpoint, which say how experts are stored; (): as the family usually has them.
    """
    experts = experts_of(config, names)
    parts = target_parts(config, fp8_cache=quantization is not None and quantization.kv)
    schemes = {} if quantization is None else quantization.schemes(linear_parts(parts), "model.")
    shapes = experts.stored(shapes_of(parts, schemes))
    for name, (scheme, layer, count) in quantized_experts(experts, quantization).items():
        shapes.pop(f"{name}.weight", None)
        shapes.pop(name, None)  # of those that are one tensor
        shapes |= {f"{name}.{tensor}": shape for tensor, shape in scheme.tensors(layer, *count).items()}
    return shapes


def check_target_tensors(directory: Path, config: DecoderConfig) -> Quantization | None:
    """Check names, shapes and types from headers alone. Return how the target is quantized."""
    headers = read_headers(directory)
    quantization = read_quantization(directory, HFConfig.read(directory))
    check_headers(directory, headers, target_shapes(config, quantization, headers), our_name(config))
    return quantization


def left_out(directory: Path, config: DecoderConfig) -> dict[str, int]:
    """Parts of a checkpoint that are not the text model, and how many tensors they have."""
    names = [name for name in read_headers(directory) if FAMILIES[config.family].rename(name) is None]
    kinds = {"vis": "images", "audio": "audio"}
    return dict(Counter(next((kinds[mark] for mark in kinds if mark in name), name.split(".")[0]) for name in names))


def experts_of(config: DecoderConfig, names: Iterable[str]) -> ExpertMap:
    """How a checkpoint with tensors of these names stores experts."""
    return ExpertMap(config.body, layout_in(names, FAMILIES[config.family].experts))


def quantized_experts(
    experts: ExpertMap, quantization: Quantization | None
) -> dict[str, tuple[Scheme, LinearShape, tuple[int, ...]]]:
    """Experts that a checkpoint holds quantized, which our module stacks: scheme, size, and how many are one tensor."""
    if quantization is None:
        return {}
    products = {name.removesuffix(".weight"): part.shape for name, part in experts.parts.items()}
    shapes = {name: shape for name, shape in products.items() if name.endswith("_proj")}
    schemes = quantization.schemes(shapes, "model.")
    for name, scheme in schemes.items():
        if (len(shapes[name]) == 3) != (scheme == MXFP4):
            raise CheckpointError(
                "Experts of this family are not read in this quantization.",
                where=f"model.{name}",
                found=scheme.name,
                expected=MXFP4.name if len(shapes[name]) == 3 else "a quantization of linear layers",
            )
    found = {}
    for name, scheme in schemes.items():
        *count, first, last = shapes[name]  # stacked ones are stored [X, in, out], others [out, in]
        size = LinearShape(first, last) if count else LinearShape(last, first)
        found[name] = scheme, size, tuple(count)
    return found


def our_name(config: DecoderConfig) -> Rename:
    """Names of a checkpoint's tensors -> those without `model.`; None for what is not read."""

    def rename(stored: str) -> str | None:
        if stored.endswith("rotary_emb.inv_freq"):
            return None  # early Llama checkpoints store what RoPE computes
        name = FAMILIES[config.family].rename(stored)
        if name is None:
            return None
        if name == "lm_head.weight":
            return None if config.tie_word_embeddings else name  # see _check_tied_head
        ours = name[len("model.") :] if name.startswith("model.") else f"outside model.: {name}"
        ours = _MXFP4.sub(r"\1.\2", ours)
        return _KV_SCALE.sub(lambda found: f"{found[1] or found[2]}_cache.scale", ours)

    return rename
