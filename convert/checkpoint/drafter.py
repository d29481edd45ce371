"""Loads and writes drafters of bundles and of training: a directory in the DFlash layout, and its module.

Read: the DFlash layout, also in FP8; `formats/` reads every format, unquantized, and converts it to this one. Written:
z-lab's spelling, with every field. It has no key for a reduced draft vocabulary, nor for FP8 that only d2sd runs: both
are in separate files (`draft_vocab.py`, `fp8_inputs.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from d2sd.convert.checkpoint.dflash import config_text, read_layout
from d2sd.convert.checkpoint.draft_vocab import read_draft_vocabulary, write_draft_vocabulary
from d2sd.convert.checkpoint.fp8_inputs import read_fp8_inputs, write_fp8_inputs
from d2sd.convert.checkpoint.hf_config import HFConfig, rope_fields
from d2sd.convert.checkpoint.quantization import FILE, KEY, Quantization, described, read_quantization
from d2sd.convert.checkpoint.unsupported import refuse_unsupported
from d2sd.convert.checkpoint.weights import (
    check_headers,
    expected_shapes,
    fill,
    read_headers,
    read_tensors,
    stored_as,
    write_tensors,
)
from d2sd.errors import CheckpointError
from d2sd.io import write_json
from d2sd.modeling.config import DecoderConfig, DrafterConfig, Role, RopeConfig
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.fp8 import linear_names, make_fp8, round_to_fp8


def read_drafter_config(directory: Path, declared: Role | None = None) -> DrafterConfig:
    """Read a `config.json` of the DFlash layout and the draft vocabulary; raises `CheckpointError` naming file and key.

    `declared` is the role of a drafter whose config has none.
    """
    raw = HFConfig.read(directory)
    plain = HFConfig({key: value for key, value in raw.values.items() if key != KEY}, raw.where)
    refuse_unsupported(plain)
    if plain.values.get("speculators_model_type") is not None:
        raise CheckpointError(
            "A recipe's drafter must be in the DFlash layout, and this is a speculators checkpoint.",
            where=raw.where, fix="d2sd convert --to z-lab",
        )  # fmt: skip
    config = read_layout(plain, declared)
    _check_quantization(directory, raw, config.body.num_layers)
    ids = read_draft_vocabulary(directory, config.vocab_size, config.mask_token_id)
    return replace(config, draft_vocabulary=ids)


def _check_quantization(directory: Path, raw: HFConfig, layers: int) -> None:
    """Refuse an FP8 drafter that engines would misread."""
    quantization = read_quantization(directory, raw)
    if quantization is None:
        return
    sliced = (f"layers.{layer}.self_attn.{kind}_proj" for layer in range(layers) for kind in "qkv")
    narrow = quantization.of(("fc", *sliced))
    if narrow or quantization.kv:
        raise CheckpointError(
            "Engines do not support FP8 in these layers of a drafter.", where=f"{directory}: {FILE} or {KEY}",
            found=", ".join(narrow) or "K/V", expected="FP8 in o_proj and the MLP only, and more by d2sd_fp8.json",
            fix="use the unquantized drafter, and set fp8.drafters",
        )  # fmt: skip


def check_compatible(config: DrafterConfig, target: DecoderConfig, *, role: Role, block_size: int, where: Path) -> None:
    """Refuse a drafter that was not made for this target, this role or this block size.

    Such a drafter would run, and almost none of its tokens would be accepted.
    """
    if config.role != role:
        raise CheckpointError(
            "The drafter does not fit.", where=f"{where / 'config.json'}: dflash_config.training_mode",
            found=config.role, expected=role,
            fix="if it was trained on variable prefixes: d2sd convert --role variable_prefix"
            if role == "variable_prefix" else None,
        )  # fmt: skip
    check_target(config, target, where)
    ids = config.target_layer_ids
    if not all(a < b for a, b in pairwise(ids)):
        # fc's columns follow the config's order, and TensorRT-LLM sorts the ids: only ascending ids are unambiguous.
        raise CheckpointError(
            "The target layer ids are not in ascending order.",
            where=f"{where / 'config.json'}: dflash_config.target_layer_ids",
            found=list(ids), expected=sorted(ids), fix="d2sd convert --to z-lab, which also reorders the columns of fc",
        )  # fmt: skip
    if config.block_size != block_size:
        raise CheckpointError(
            "The drafter was trained for another block size.",
            where=f"{where / 'config.json'}: block_size", found=config.block_size, expected=block_size,
            fix=f"set tree.block_size to {config.block_size} in the recipe",
        )  # fmt: skip


def check_target(config: DrafterConfig, target: DecoderConfig, where: Path) -> None:
    """Refuse a drafter that was made for another target."""
    pairs: list[tuple[str, object, object]] = [
        ("hidden_size", config.body.hidden_size, target.body.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("num_target_layers", config.num_target_layers, target.body.num_layers),
    ]
    for key, found, expected in pairs:
        if found != expected:
            raise CheckpointError(
                "The drafter was made for another target.", where=f"{where / 'config.json'}: {key}",
                found=found, expected=expected, fix="use a drafter that was trained for this target",
            )  # fmt: skip
    check_rope(config.body.rope, target.body.rope, where)


def check_rope(found: RopeConfig, expected: RopeConfig, where: Path) -> None:
    """Refuse positions other than the target's: the drafter reads the target's features at them."""
    if rope_fields(found) == rope_fields(expected):  # what a kind does not use does not count
        return
    fix = "use a drafter that was trained for this target"
    if expected.kind == "yarn" and found == RopeConfig(theta=expected.theta):
        longest = f"{expected.original_max_positions:,} tokens"
        fix = (
            f"remove the scaling from the target's config.json, and serve contexts of up to {longest}; or train with it"
        )
    raise CheckpointError(
        "The drafter was made for another target: its positions (RoPE) differ.",
        where=f"{where / 'config.json'}: rope_theta and rope_scaling",
        found=json.dumps(rope_fields(found)), expected=json.dumps(rope_fields(expected)), fix=fix,
    )  # fmt: skip


def drafter_shapes(config: DrafterConfig, quantization: Quantization | None = None) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a drafter's tensors."""
    return expected_shapes(_empty(config, quantization))


def check_drafter_tensors(directory: Path, config: DrafterConfig) -> Quantization | None:
    """Check names, shapes and types of a drafter's tensors from headers alone. Return how it is quantized."""
    quantization = read_quantization(directory, HFConfig.read(directory))
    check_headers(directory, read_headers(directory), drafter_shapes(config, quantization), lambda name: name)
    return quantization


def drafter_fp8_inputs(directory: Path, config: DrafterConfig) -> dict[str, float]:
    """Input scales of the layers that are stored in 16 bits and run in FP8; none for other drafters."""
    quantization = read_quantization(directory, HFConfig.read(directory))
    names = linear_names(_empty(config, None)) if quantization else []
    return read_fp8_inputs(directory, sorted(set(names) - set(quantization.of(names) if quantization else ())))


def load_drafter(directory: Path, dtype: torch.dtype, declared: Role | None = None) -> Drafter:
    """Read a drafter onto the CPU in `dtype`, in eval mode and without gradients; for `declared` see above."""
    module = _stored(directory, dtype, declared)
    round_to_fp8(module, drafter_fp8_inputs(directory, module.config))
    return module


def copy_drafter(source: Path, directory: Path, dtype: torch.dtype, declared: Role | None = None) -> None:
    """Write the drafter of `source` with every field explicit, in `dtype`; FP8 stays as it is."""
    module = _stored(source, dtype, declared)
    quantization = read_quantization(source, HFConfig.read(source))
    scales = drafter_fp8_inputs(source, module.config)
    write_drafter(directory, module.config, module.state_dict(), quantization, scales)


def _stored(directory: Path, dtype: torch.dtype, declared: Role | None) -> Drafter:
    config = read_drafter_config(directory, declared)
    module = _empty(config, read_quantization(directory, HFConfig.read(directory)))
    tensors: dict[str, Tensor] = {}
    for _, part in read_tensors(directory, expected_shapes(module), dtype):
        tensors |= part
    fill(module, tensors)
    return module


def write_drafter(
    directory: Path,
    config: DrafterConfig,
    tensors: Mapping[str, Tensor],
    quantization: Quantization | None = None,
    input_scales: Mapping[str, float] | None = None,
) -> None:
    """Write a drafter's directory; `tensors` is `Drafter.state_dict()`, of one dtype except FP8 tensors.

    `input_scales`: of layers in 16 bits that d2sd runs in FP8.
    """
    expected = drafter_shapes(config, quantization)
    given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert given == expected, f"not this drafter's tensors: {sorted(given.items() ^ expected.items())}"
    (dtype,) = {tensor.dtype for name, tensor in tensors.items() if stored_as(name, expected) == "unquantized"}
    write_tensors(directory / "model.safetensors", tensors)
    separate, inline = described(quantization) if quantization else (None, None)
    (directory / "config.json").write_text(config_text(config, dtype, inline), "utf-8")
    if separate is not None:
        write_json(directory / FILE, separate)
    write_fp8_inputs(directory, input_scales or {})
    write_draft_vocabulary(directory, config.draft_vocabulary, config.vocab_size)


def _empty(config: DrafterConfig, quantization: Quantization | None) -> Drafter:
    with torch.device("meta"):
        module = Drafter(config)
        if quantization is not None:
            make_fp8(module, quantization.of(linear_names(module)))
    return module


def fingerprint(drafter: Drafter) -> str:
    """SHA-256 of a drafter's weights in bf16, by name, and of its draft vocabulary: all that determines its output.

    It is the same for a drafter loaded in fp32 and in bf16.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(drafter.state_dict().items()):
        digest.update(f"{name} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    if drafter.config.draft_vocabulary is not None:
        digest.update(f"draft_vocabulary {list(drafter.config.draft_vocabulary)}".encode())
    return digest.hexdigest()
