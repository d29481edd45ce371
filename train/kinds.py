"""The kinds of drafters in training: one record for what differs. The loop, the loss and the stages are common to all.

What checkpoints of a kind are is in `d2sd.convert.kinds`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from torch import Tensor

from d2sd.convert.kinds import KINDS
from d2sd.modeling.config import DecoderConfig, DraftConfig
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.policies import DrafterRole, PolicyName
from d2sd.train.data.features import TrainingData
from d2sd.train.data.packing import Packed
from d2sd.train.dflash import block_hidden, drafter_config, first_drafter
from d2sd.train.flexdraft import flex_added, flex_config, flex_head, flex_hidden
from d2sd.train.objectives.head import Added
from d2sd.train_recipe import FlexGeometry, Geometry

Shape = TypeVar("Shape", bound=Geometry | FlexGeometry)
Model = TypeVar("Model", bound=DraftModel)


@dataclass(frozen=True, slots=True)
class TrainedKind(Generic[Shape, Model]):
    """A kind of drafter: its fields are what differs from kind to kind."""

    #: The config of a drafter; raises D2SDError if it does not fit the target.
    config: Callable[[Shape, DecoderConfig], DraftConfig]
    #: The initial drafter in fp32 on the CPU, from the target, data and a seed.
    start: Callable[[Shape, Decoder, TrainingData, int], Model]
    #: Hidden states [B, A, G, E] of packed blocks, for the target's embedding table and prefixes `visible [B, A]`.
    hidden: Callable[[Model, Tensor, Packed, Tensor], Tensor]
    #: What a network of its own adds to the logits of hidden states, for the same table and blocks.
    added: Callable[[Model, Tensor, Tensor, Packed], Added] | None = None
    #: Names of trained tensors that have a row for each token that it drafts, like a head.
    token_rows: tuple[str, ...] = ()


DFLASH: TrainedKind[Geometry, Drafter] = TrainedKind(drafter_config, first_drafter, block_hidden)
FLEXDRAFT: TrainedKind[FlexGeometry, FlexHead] = TrainedKind(
    flex_config, flex_head, flex_hidden, flex_added, ("calibration.outer.weight", "calibration.outer.bias")
)
#: The kind of the drafter in each place of a bundle.
TRAINED: Mapping[DrafterRole, TrainedKind[Any, Any]] = MappingProxyType(
    {DrafterRole.FIRST: DFLASH, DrafterRole.SECOND: DFLASH, DrafterRole.FLEX: FLEXDRAFT}
)
#: The policies that evaluate a drafter. One without it is a baseline: for the second, a second pass by the first.
METHODS: Mapping[DrafterRole, tuple[PolicyName, ...]] = MappingProxyType(
    {DrafterRole.FIRST: ("chain",), DrafterRole.SECOND: ("reanchor", "d2sd"), DrafterRole.FLEX: ("flex",)}
)


def trained_kind(drafter: DraftModel) -> TrainedKind[Any, Any]:
    """The kind of a drafter."""
    return next(kind for role, kind in TRAINED.items() if isinstance(drafter, KINDS[role].code().model))
