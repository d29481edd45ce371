"""The DFlash layout read: `config.json` with a body at the top level and a `dflash_config`.

z-lab, ModelOpt and SpecForge write it; what they do differently says nothing about the forward pass but for the role,
so one strict reader serves the three. A key that no reader of ours knows is refused: it may change what tensors mean.
"""

from __future__ import annotations

from d2sd.convert.checkpoint.hf_config import MAX_LAYERS, MAX_SIZE, HFConfig
from d2sd.convert.formats import specforge
from d2sd.convert.formats.backbone import INERT, READ, read_body
from d2sd.convert.formats.layer_ids import fault, from_convention, usual_ids
from d2sd.convert.formats.unsupported import KEYS
from d2sd.errors import CheckpointError
from d2sd.modeling.config import DrafterConfig, Role

_TOP = READ | INERT | KEYS | {"architectures", "block_size", "num_target_layers", "dflash_config"}
_INSIDE = (
    KEYS
    | specforge.TRAINING
    | {
        "mask_token_id", "target_layer_ids", "block_size", "num_target_layers",
        "mask_token",  # the id is what counts: the tokenizer may not know the token
    }
)  # fmt: skip


def read_layout(config: HFConfig, declared: Role | None = None) -> DrafterConfig:
    """Read a config of the DFlash layout, layer ids in the file's order; raises `CheckpointError`.

    `declared` is the role of a drafter that does not say its own.
    """
    dflash = config.part("dflash_config")
    for part, known in ((config, _TOP), (dflash, _INSIDE)):
        refuse_unknown(part, known)
    config.only("architectures", ["DFlashDraftModel"], [specforge.TARGETS_OWN])
    # Qwen3.5 drafters keep these two inside dflash_config.
    block_size = _either(config, dflash, "block_size", MAX_SIZE)
    num_target_layers = _either(config, dflash, "num_target_layers", MAX_LAYERS)
    body = read_body(config)
    role, base = specforge.read_role(dflash, declared)
    return DrafterConfig(
        body=body,
        vocab_size=config.size("vocab_size"),
        block_size=block_size,
        mask_token_id=mask_id(dflash, config.size("vocab_size")),
        target_layer_ids=_layer_ids(dflash, body.num_layers, num_target_layers),
        num_target_layers=num_target_layers,
        role=role,
        prefix_weight_base=base,
    )


def refuse_unknown(config: HFConfig, known: frozenset[str] | set[str]) -> None:
    """Refuse a key outside `known`."""
    unknown = sorted(config.values.keys() - known)
    if unknown:
        raise config.refuse("A drafter's config key is unknown, and may change its meaning.", unknown[0], "no such key")


def mask_id(config: HFConfig, vocab_size: int) -> int:
    """Read mask_token_id: of the config alone, because a tokenizer's mask token may be another one."""
    value = config.get("mask_token_id", int)
    if not 0 <= value < vocab_size:
        raise config.refuse("The mask token lies outside the vocabulary.", "mask_token_id", f"0 to {vocab_size - 1}")
    return value


def _layer_ids(dflash: HFConfig, num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    if dflash.values.get("target_layer_ids") is None:
        raise CheckpointError(
            "The drafter does not say which layers of the target it reads.",
            where=f"{dflash.where}: target_layer_ids", expected="a list of layer ids",
            fix=f"some readers then take {usual_ids(num_layers, num_target_layers)}; write that into the config if it "
            "was trained so",
        )  # fmt: skip
    ids = from_convention(dflash.integers("target_layer_ids"), "output_of_layer")
    expected = fault(ids, num_target_layers)
    if expected:
        raise dflash.refuse("The target layer ids are wrong.", "target_layer_ids", expected)
    return ids


def _either(config: HFConfig, dflash: HFConfig, key: str, most: int) -> int:
    """Return a size that may sit at the top level, inside dflash_config, or in both if they agree."""
    home = config if key in config.values else dflash
    value = home.size(key, most=most)
    if key in dflash.values and dflash.size(key) != value:
        raise dflash.refuse(f"{key} is written twice, differently.", key, value)
    return value
