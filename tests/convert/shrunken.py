"""The checkpoints that the shipped recipes name, without their weights: as headers of the true geometry, and shrunken.

What they are is what the recipes say of them.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from d2sd.convert.checkpoint.families import parse_target_config
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.checkpoint.layout import usual_ids
from d2sd.convert.checkpoint.target_shapes import target_shapes
from d2sd.convert.kinds import DFLASH
from d2sd.convert.kinds.dflash import config_fields, read_layout
from d2sd.modeling.config import BodyConfig, DecoderConfig, DrafterConfig
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.recipe import load_recipe
from tests.convert.helpers import hf_fields, write_target_dir
from tests.tiny import randomise


@dataclass(frozen=True)
class Checkpoints:
    """A target, its public first drafter, and where a recipe has them below `checkpoints`."""

    folders: tuple[str, str]
    target: DecoderConfig
    first: DrafterConfig

    @staticmethod
    def of(name: str, *folders: str) -> Checkpoints:
        """Make a recipe's, by its geometry; z-lab's drafters read evenly spaced layers."""
        recipe = load_recipe(Path(name))
        assert recipe.drafters.first is not None
        target, first = (HFConfig(dict(one.geometry or {}), name) for one in (recipe.target, recipe.drafters.first))
        found = Checkpoints((folders[0], folders[1]), parse_target_config(target), read_layout(first))
        assert list(found.first.target_layer_ids) == usual_ids(5, found.target.body.num_layers)
        return found

    @property
    def second(self) -> DrafterConfig:
        """The second drafter has the first one's shape, as `d2sd train` makes it."""
        return replace(self.first, role="variable_prefix", prefix_weight_base=0.9)

    @property
    def tokens(self) -> int:
        """The tokenizer's, shrunken: Qwen3's has no token for the mask, whose id only fills up the vocabulary."""
        return 310 if self.target.family == "qwen3" else 320

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
        return Checkpoints(self.folders, target, first)


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


#: By recipe.
CHECKPOINTS = {
    name: Checkpoints.of(name, *folders)
    for name, folders in {
        "qwen3-4b": ("Qwen3-4B", "Qwen3-4B-DFlash-b16"),
        "qwen3-8b": ("Qwen3-8B", "Qwen3-8B-DFlash-b16"),
        "llama-3.1-8b": ("Llama-3.1-8B-Instruct", "LLaMA3.1-8B-Instruct-DFlash-UltraChat"),
    }.items()
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
