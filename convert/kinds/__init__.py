"""The kinds of drafters: every module of this folder is one, and its `KIND` the record.

A module has the layout of its checkpoints, which it reads, checks and writes; a model of that kind is in
`d2sd.modeling.drafters`, and the training in `d2sd.train`, in modules of the same name. A checkpoint says its kind
(`read_kind`); a recipe says the place that a drafter has in a bundle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.drafter_kind import DrafterKind
from d2sd.convert.kinds.dflash import KIND as DFLASH
from d2sd.modeling.config import DrafterConfig

if TYPE_CHECKING:
    import torch

    from d2sd.modeling.drafters.interface import DraftModel

__all__ = ["DFLASH", "KINDS", "load_drafter", "read_kind"]


def _kinds() -> Iterator[tuple[str, DrafterKind[Any, Any]]]:
    """DFlash is the last: a checkpoint is of it that has no other kind's mark."""
    for name in sorted((module.name for module in iter_modules(__path__)), key=lambda name: name == DrafterConfig.kind):
        yield name, import_module(f"{__name__}.{name}").KIND


#: The kinds by the name that their configs have (`DraftConfig.kind`); the first whose mark a checkpoint has is its own.
KINDS: Mapping[str, DrafterKind[Any, Any]] = MappingProxyType(dict(_kinds()))


def read_kind(directory: Path) -> str:
    """The kind of the drafter in a folder, by its config.json; raises `CheckpointError` as `HFConfig.read` does."""
    config = HFConfig.read(directory)
    return next(name for name, kind in KINDS.items() if kind.is_marked(config))


def load_drafter(directory: Path, dtype: torch.dtype) -> DraftModel:
    """`DrafterKind.load` of the kind that the folder's config says."""
    drafter: DraftModel = KINDS[read_kind(directory)].load(directory, dtype)
    return drafter
