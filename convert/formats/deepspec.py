"""DeepSpec's format of DFlash and DSpark drafters: a copy of the target's config with the drafter's keys among them.

    architectures             Qwen3DSparkModel, of both kinds: a plain DFlash drafter has markov_rank 0
    target_layer_ids          as in the DFlash layout; -1, the embedding's output, is not supported
    slots                     the anchor's row proposes: a block of B drafts B tokens

Tensors are those of the layout (`checkpoint/dflash.py`, `checkpoint/dspark.py`), and copies of the target's embedding
and head. Read only: it is written as SpecForge writes such drafters, without the copies.
"""

from __future__ import annotations

from d2sd.convert.checkpoint.dflash import read_layout
from d2sd.convert.checkpoint.dspark import DSPARK
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.modeling.config import DrafterConfig, Role

_OWN = DSPARK.keys | {"mask_token_id", "target_layer_ids"}
#: Of training, or of the target's own config.
_UNUSED = {"num_anchors", "architectures", "_attn_implementation", "attn_implementation"}


def read_deepspec(config: HFConfig, declared: Role | None = None) -> DrafterConfig:
    """Read the config, layer ids in the file's order; raises `CheckpointError` naming file and key."""
    own = {key: value for key, value in config.values.items() if key in _OWN}
    rest = {key: value for key, value in config.values.items() if key not in _OWN | _UNUSED}
    return read_layout(
        HFConfig(rest, config.where), declared, HFConfig(own | {"sample_from_anchor": True}, config.where)
    )
