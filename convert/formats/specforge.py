"""SpecForge's dialect of the DFlash layout: its training writes the role into the config, or forgets to.

Beside the weights lies `training_state.pt`, a pickle that holds the command line's loss type: it is never opened. A run
that was started with `--loss-type vp_drafter` and a config without `training_mode` therefore leaves a variable-prefix
drafter that looks like a first one; only its owner can say so (`declared`).
"""

from __future__ import annotations

from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.modeling.config import Role

#: `training_mode`, or `loss_type` where there is none. D-PACE weighs the loss of a first drafter, no more.
ROLES: dict[str, Role] = {
    "dflash": "first",
    "dpace": "first",
    "dpace-cumulative-confidence-only": "first",
    "dpace-continuation-value-only": "first",
    "vp_drafter": "variable_prefix",
}
#: Keys of `dflash_config` that tell of the training.
TRAINING = frozenset({"training_mode", "loss_type", "prefix_weight_base"})
#: `architectures` where the draft config was a copy of a Qwen3 target's.
TARGETS_OWN = "Qwen3ForCausalLM"
#: Files beside the weights that are never opened.
PICKLES = ("training_state.pt",)


def looks_like(config: HFConfig) -> bool:
    """Whether a DFlash layout speaks of its training, or has the target's own architecture (trained without a config).

    d2sd's z-lab files speak of it too; they are told by `is_causal`, which stands beside it there alone.
    """
    dflash = config.values.get("dflash_config")
    inside = dflash.keys() if isinstance(dflash, dict) else set()
    speaks = bool(TRAINING & inside) and "is_causal" not in inside
    return speaks or config.values.get("architectures") == [TARGETS_OWN]


def read_role(dflash: HFConfig, declared: Role | None) -> tuple[Role, float | None]:
    """Role and prefix weight base of a `dflash_config`; raises `CheckpointError` where they contradict each other."""
    key = "training_mode" if dflash.values.get("training_mode") is not None else "loss_type"
    mode = dflash.get(key, str, "")
    if mode and mode not in ROLES:
        raise dflash.refuse("This kind of drafter is not supported.", key, " or ".join(ROLES))
    role = ROLES.get(mode, declared or "first")
    if declared not in (None, role):
        raise dflash.refuse(
            "The drafter is declared to be of another role than it says.", key, f"no {key}, or {declared}"
        )
    if dflash.values.get("prefix_weight_base") is None:
        return role, None
    if role == "first":
        raise dflash.refuse(
            "The drafter has the base of prefix weights, but is no variable-prefix drafter.", "prefix_weight_base",
            "null, or training_mode vp_drafter", fix="declare it: --role variable_prefix",
        )  # fmt: skip
    return role, dflash.get("prefix_weight_base", float)
