"""The checkpoints that the shipped recipes name, without their weights: as headers of the true geometry, and shrunken.

Targets are as their config.json says. z-lab's drafters of Qwen3 are as SpecForge carries their configs. Of the Llama
drafter, sizes and block are public; its layer ids are taken to follow z-lab's rule, its RoPE to be the target's.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from d2sd.convert.checkpoint.layout import usual_ids
from d2sd.convert.checkpoint.target_shapes import target_shapes
from d2sd.convert.kinds import DFLASH
from d2sd.convert.kinds.dflash import config_fields
from d2sd.modeling.config import BodyConfig, DecoderConfig, DrafterConfig, Family, RopeConfig
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from tests.convert.helpers import hf_fields, write_target_dir
from tests.tiny import randomise


@dataclass(frozen=True)
class Checkpoints:
    """A target, its public first drafter, and where a recipe has them below `checkpoints`."""

    folders: tuple[str, str]
    target: DecoderConfig
    first: DrafterConfig
    tokens: int  # the tokenizer's; ids behind them only fill up the vocabulary

    @property
    def second(self) -> DrafterConfig:
        """The second drafter has the first one's shape, as `d2sd train` makes it."""
        return replace(self.first, role="variable_prefix", prefix_weight_base=0.9)

    def shrunken(self) -> Checkpoints:
        """The same family, block, ratios of heads and widths and rules for layer ids and mask; all else small."""
        target = replace(self.target, body=_shrunken(self.target.body, 8), vocab_size=320)
        first = replace(
            self.first,
            body=_shrunken(self.first.body, 2),
            vocab_size=320,
            mask_token_id=310,
            num_target_layers=8,
            target_layer_ids=tuple(usual_ids(5, 8)),
        )
        return Checkpoints(self.folders, target, first, 310 if self.tokens == self.first.mask_token_id else 320)


def _shrunken(body: BodyConfig, layers: int) -> BodyConfig:
    return replace(
        body,
        hidden_size=body.hidden_size // 64,
        intermediate_size=body.intermediate_size // 64,
        num_layers=layers,
        num_heads=body.num_heads // 8,
        num_kv_heads=body.num_kv_heads // 8,
        head_dim=body.head_dim // 8,
    )


def _body(family: Family, hidden: int, intermediate: int, layers: int, rope: RopeConfig, positions: int) -> BodyConfig:
    return BodyConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6 if family == "qwen3" else 1e-5,
        rope=rope,
        max_positions=positions,
        qk_norm=family == "qwen3",
        qkv_bias=False,
        o_bias=False,
    )


def _first(target: DecoderConfig, intermediate: int, block_size: int, mask: int) -> DrafterConfig:
    layers = target.body.num_layers
    return DrafterConfig(
        body=replace(target.body, intermediate_size=intermediate, num_layers=5, qk_norm=True),
        vocab_size=target.vocab_size,
        block_size=block_size,
        mask_token_id=mask,
        target_layer_ids=tuple(usual_ids(5, layers)),
        num_target_layers=layers,
        role="first",
    )


_ROPE = RopeConfig(1e6)
_LLAMA_ROPE = RopeConfig(5e5, "llama3", 8.0, 8192, 1.0, 4.0)
_QWEN3_4B = DecoderConfig("qwen3", _body("qwen3", 2560, 9728, 36, _ROPE, 40960), 151936, True)
_QWEN3_8B = DecoderConfig("qwen3", _body("qwen3", 4096, 12288, 36, _ROPE, 40960), 151936, False)
_LLAMA = DecoderConfig("llama", _body("llama", 4096, 14336, 32, _LLAMA_ROPE, 131072), 128256, False)
#: By recipe.
CHECKPOINTS = {
    "qwen3-4b": Checkpoints(
        ("Qwen3-4B", "Qwen3-4B-DFlash-b16"), _QWEN3_4B, _first(_QWEN3_4B, 9728, 16, 151669), 151669
    ),
    "qwen3-8b": Checkpoints(
        ("Qwen3-8B", "Qwen3-8B-DFlash-b16"), _QWEN3_8B, _first(_QWEN3_8B, 12288, 16, 151669), 151669
    ),
    "llama-3.1-8b": Checkpoints(
        ("Llama-3.1-8B-Instruct", "LLaMA3.1-8B-Instruct-DFlash-UltraChat"),
        _LLAMA,
        _first(_LLAMA, 12288, 10, 128002),
        128256,
    ),
}


def write_headers(folder: Path, name: str) -> None:
    """A recipe's checkpoints below `folder` in their true size: headers, and holes where weights would be."""
    found = CHECKPOINTS[name]
    target, first = (folder / path for path in found.folders)
    shapes = {n if n.startswith("lm_head") else f"model.{n}": s for n, s in target_shapes(found.target).items()}
    with torch.device("meta"):
        fields = hf_fields(Decoder(found.target))
    _holes(target, shapes, json.dumps(fields))
    for path, config in ((first, found.first), (folder / f"{name}-pair" / "second", found.second)):
        _holes(path, DFLASH.shapes(config), json.dumps(config_fields(config) | {"dtype": "bfloat16"}))


def _holes(folder: Path, shapes: dict[str, tuple[int, ...]], config: str) -> None:
    """A bf16 checkpoint whose tensors take no disk."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config)
    header, end = {}, 0
    for tensor, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def write_shrunken(folder: Path, name: str) -> None:
    """A recipe's checkpoints below `folder`, shrunken, with random weights."""
    found = CHECKPOINTS[name].shrunken()
    decoder, first, second = Decoder(found.target), Drafter(found.first), Drafter(found.second)
    # texts that wander: one that repeats a token fits drafters of every convention
    randomise(decoder, seed=0, residual_gain=2.0)
    randomise(first, seed=1, residual_gain=1.0)
    randomise(second, seed=2, residual_gain=1.0)
    target = write_target_dir(folder / found.folders[0], decoder)
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {word: token for word, token in words.items() if token < found.tokens}
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    for path, drafter in ((folder / found.folders[1], first), (folder / f"{name}-pair" / "second", second)):
        path.mkdir(parents=True)
        DFLASH.write(path, drafter.config, drafter.state_dict())
