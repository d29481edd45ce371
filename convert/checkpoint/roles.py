"""The role of a drafter, first or variable-prefix, from the keys that SpecForge's training writes into the config.

A run with `--loss-type vp_drafter` and a config without `training_mode` writes a variable-prefix drafter that looks
like a first one: the loss type is only in `training_state.pt`, a pickle, which is never opened. The user then has to
declare the role (`declared`).
"""

from __future__ import annotations

from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.modeling.config import Role

#: Values of `training_mode`, or of `loss_type` without it. D-PACE is a weighting of the first drafter's loss.
ROLES: dict[str, Role] = {
    "dflash": "first",
    "dpace": "first",
    "dpace-cumulative-confidence-only": "first",
    "dpace-continuation-value-only": "first",
    "vp_drafter": "variable_prefix",
}
#: Keys of `dflash_config` that training writes.
TRAINING = frozenset({"training_mode", "loss_type", "prefix_weight_base"})


def read_role(dflash: HFConfig, declared: Role | None) -> tuple[Role, float | None]:
    """Role and prefix weight base of a `dflash_config`; raises `CheckpointError` if they contradict each other."""
    key = "training_mode" if dflash.values.get("training_mode") is not None else "loss_type"
    mode = dflash.get(key, str, "")
    if mode and mode not in ROLES:
        raise dflash.refuse("This kind of drafter is not supported.", key, " or ".join(ROLES))
    role = ROLES.get(mode, declared or "first")
    if declared not in (None, role):
        raise dflash.refuse("The declared role contradicts the config.", key, f"no {key}, or {declared}")
    if dflash.values.get("prefix_weight_base") is None:
        return role, None
    if role == "first":
        raise dflash.refuse(
            "prefix_weight_base is set, but this is not a variable-prefix drafter.", "prefix_weight_base",
            "null, or training_mode vp_drafter", fix="declare it: --role variable_prefix",
        )  # fmt: skip
    return role, dflash.get("prefix_weight_base", float)
