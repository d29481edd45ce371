"""Extra tensors of a speculators checkpoint: copies of the target's embedding and head, and the draft vocabulary.

Versions up to 0.7 write both copies, versions from 0.8 only the head of a reduced vocabulary; t2d and d2t are present
if the vocabulary is reduced.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from d2sd.convert.checkpoint.draft_vocab import check_ids
from d2sd.convert.checkpoint.weights import TensorInfo, read_tensor
from d2sd.convert.formats.shared_tensors import EMBEDDING, HEAD, TargetParts, check_copies, shared_copies
from d2sd.convert.formats.vocabulary import from_tensors, to_tensors
from d2sd.errors import CheckpointError
from d2sd.modeling.config import DrafterConfig

EXTRA = (EMBEDDING, HEAD, "t2d", "d2t")
_TYPES = {"t2d": "BOOL", "d2t": "I64"}


def read_extra(
    config: DrafterConfig, size: int, found: Mapping[str, TensorInfo], target: TargetParts | None,
    dtype: torch.dtype, where: str,
) -> tuple[tuple[int, ...] | None, list[str]]:  # fmt: skip
    """Return the draft vocabulary, and notes on the copies; raises `CheckpointError`.

    `found` are the extra tensors' headers, `size` is draft_vocab_size of the config at `where`, `dtype` the drafter's.
    """
    _check_headers(config, size, found)
    missing = [name for name in ("t2d", "d2t") if name not in found]
    if missing and (size != config.vocab_size or len(missing) == 1):
        raise CheckpointError(
            "A draft vocabulary needs both of its tensors.", where=f"{where}: draft_vocab_size", found=size,
            expected=f"{' and '.join(missing)} among the tensors, or {config.vocab_size} as vocab_size",
        )  # fmt: skip
    copies = {name: read_tensor(info.file, name) for name, info in found.items()}
    ids = None
    if not missing:
        file = str(found["d2t"].file)
        ids = from_tensors(copies, size, config.vocab_size, file)
        if size == config.vocab_size:
            ids = None  # all tokens, which needs no vocabulary
        else:
            check_ids(f"{file}: d2t", list(ids), config.vocab_size, config.mask_token_id)
    dropped = [name for name in (EMBEDDING, HEAD) if name in copies]
    if not dropped:
        return ids, []
    if target is None:
        return ids, [f"{' and '.join(dropped)}: dropped unchecked; pass --target to compare with the target's"]
    check_copies(copies, target, ids, dtype, str(found[dropped[0]].file))
    return ids, [f"{' and '.join(dropped)}: equal to the target's, dropped"]


def extra_tensors(
    config: DrafterConfig, names: frozenset[str], target: TargetParts | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Make the extra tensors of `names`; copies need the `target`."""
    made: dict[str, Tensor] = {}
    if target is not None:
        made |= shared_copies(target, config.draft_vocabulary, dtype)
    made |= to_tensors(config.draft_vocabulary or tuple(range(config.vocab_size)), config.vocab_size)
    return {name: made[name] for name in sorted(names)}


def _check_headers(config: DrafterConfig, size: int, found: Mapping[str, TensorInfo]) -> None:
    hidden = config.body.hidden_size
    shapes = {EMBEDDING: (config.vocab_size, hidden), HEAD: (size, hidden), "t2d": (config.vocab_size,), "d2t": (size,)}
    for name, info in found.items():
        kind = _TYPES.get(name, info.dtype)
        if info.shape != shapes[name] or info.dtype != kind:
            raise CheckpointError(
                "A tensor has the wrong shape or type.", where=f"{info.file}: {name}",
                found=f"{info.dtype} {list(info.shape)}", expected=f"{kind} {list(shapes[name])}",
            )  # fmt: skip
