"""The kinds of drafters in training: one record for what differs. The loop, the loss and the stages are common to all.

What checkpoints of a kind are is in `d2sd.convert.kinds`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from torch import Tensor

from d2sd.modeling.config import DecoderConfig, DraftConfig
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.policies import DrafterRole, PolicyName
from d2sd.train.data.features import TrainingData
from d2sd.train.data.packing import Packed
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


#: The policies that evaluate a drafter. One without it is a baseline: for the second, a second pass by the first.
METHODS: Mapping[DrafterRole, tuple[PolicyName, ...]] = MappingProxyType(
    {DrafterRole.FIRST: ("chain",), DrafterRole.SECOND: ("reanchor", "d2sd")}
)


def trained_kind(name: str) -> TrainedKind[Any, Any]:
    """The kind of this name, as configs and shapes have it: `TRAINED` of the module of this folder that has it too."""
    found: TrainedKind[Any, Any] = import_module(f"d2sd.train.{name}").TRAINED
    return found
