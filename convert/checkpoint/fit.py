"""Checks that every kind of drafter shares: it was made for this target and this block size."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from d2sd.convert.checkpoint.hf_config import rope_fields
from d2sd.errors import CheckpointError
from d2sd.modeling.config import DecoderConfig, RopeConfig
from d2sd.modeling.drafters.interface import DraftConfig

_FIX = "use a drafter that was trained for this target"


def check_geometry(
    pairs: Iterable[tuple[str, object, object]], config: DraftConfig, target: DecoderConfig, where: Path
) -> None:
    """Refuse a drafter of another target: where a key's value, in `pairs`, is not the target's, or the positions."""
    for key, found, expected in pairs:
        if found != expected:
            raise CheckpointError(
                "The drafter was made for another target.", where=f"{where / 'config.json'}: {key}",
                found=found, expected=expected, fix=_FIX,
            )  # fmt: skip
    _check_rope(config.body.rope, target.body.rope, where)


def _check_rope(found: RopeConfig, expected: RopeConfig, where: Path) -> None:
    """Refuse positions other than the target's: the drafter reads the target's features at them."""
    if rope_fields(found) == rope_fields(expected):  # what a kind does not use does not count
        return
    fix = _FIX
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


def check_block_size(config: DraftConfig, block_size: int, where: Path) -> None:
    """Refuse a drafter of another block size."""
    if config.block_size != block_size:
        raise CheckpointError(
            "The drafter was trained for another block size.",
            where=f"{where / 'config.json'}: block_size", found=config.block_size, expected=block_size,
            fix=f"set tree.block_size to {config.block_size} in the recipe",
        )  # fmt: skip
