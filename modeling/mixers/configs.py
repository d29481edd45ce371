"""Geometry of mixers with a recurrent state, which replace the attention of some layers: their tensors and states.

The modules are imported where a model is made: plans need no PyTorch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from d2sd.modeling.shapes import LinearShape, Parts

if TYPE_CHECKING:
    from d2sd.modeling.config import BodyConfig
    from d2sd.modeling.fused_layer import FusedMixer
    from d2sd.modeling.layers import Mixer
    from d2sd.modeling.state_pool import StateRows


class StateShape(NamedTuple):
    """Part of a request's state in one layer."""

    shape: tuple[int, ...]
    wide: bool = False  # fp32, not the model's type


class Mixing(NamedTuple):
    """The modules of a kind of mixer."""

    mixer: Callable[[Any, BodyConfig], Mixer]  # of a layer, by its config
    rows: type[StateRows]
    fused: Callable[..., FusedMixer]  # on CUDA, of a mixer and its config, as `FusedAttention`; its weights are views


class RecurrentConfig(ABC):
    """Geometry of such a mixer; subclasses are frozen dataclasses."""

    __slots__ = ()
    #: The name of several, for people.
    name: ClassVar[str]
    #: Its name in a layer, as in checkpoints.
    module: ClassVar[str]
    layers: tuple[int, ...]  # ascending

    @abstractmethod
    def parts(self, hidden_size: int) -> Parts:
        """The tensors of one."""

    @property
    @abstractmethod
    def states(self) -> tuple[StateShape, ...]:
        """The state of a request in one layer."""

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of a request's states in all layers, of a model whose numbers have `itemsize` bytes."""
        return len(self.layers) * sum(math.prod(shape) * (4 if wide else itemsize) for shape, wide in self.states)

    @property
    @abstractmethod
    def rows(self) -> tuple[StateShape, ...]:
        """The tensors of the mixer's `StateRows`: each row's part in a state of one layer."""

    @property
    @abstractmethod
    def code(self) -> Mixing:
        """The modules, which need PyTorch."""


@dataclass(frozen=True, slots=True)
class DeltaConfig(RecurrentConfig):
    """Gated delta nets."""

    name: ClassVar[str] = "gated delta nets"
    module: ClassVar[str] = "linear_attn"
    layers: tuple[int, ...]
    key_heads: int
    value_heads: int  # a multiple of the key heads
    key_size: int
    value_size: int
    taps: int = 4  # of the short convolution, a row's own included
    joined: bool = False  # two projections make what Qwen3.5 makes by four (Qwen3-Next)

    @property
    def channels(self) -> int:
        """Inputs of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    def parts(self, hidden_size: int) -> Parts:
        heads, values = self.value_heads, self.value_heads * self.value_size
        if self.joined:
            outputs = {"in_proj_qkvz": self.channels + values, "in_proj_ba": 2 * heads}
        else:
            outputs = {"in_proj_qkv": self.channels, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
        parts: Parts = {name: LinearShape(hidden_size, size) for name, size in outputs.items()}
        return parts | {
            "conv1d.weight": (self.channels, 1, self.taps),
            "A_log": (heads,),
            "dt_bias": (heads,),
            "norm.weight": (self.value_size,),
            "out_proj": LinearShape(values, hidden_size),
        }

    @property
    def states(self) -> tuple[StateShape, ...]:
        """The matrix of each head, and the last inputs of the convolution."""
        recurrent = StateShape((self.value_heads, self.key_size, self.value_size), wide=True)
        return recurrent, StateShape((self.channels, self.taps - 1))

    @property
    def rows(self) -> tuple[StateShape, ...]:
        """The input of the convolution, then k, v, g and β of `DeltaRows`."""
        k, v, heads = (self.key_heads, self.key_size), (self.value_heads, self.value_size), (self.value_heads,)
        return *map(StateShape, ((self.channels,), k, v)), StateShape(heads, wide=True), StateShape(heads)

    @property
    def code(self) -> Mixing:
        from d2sd.modeling.mixers.delta_net import DeltaNet, DeltaStateRows, FusedDeltaNet, JoinedDeltaNet

        return Mixing(JoinedDeltaNet if self.joined else DeltaNet, DeltaStateRows, FusedDeltaNet)


@dataclass(frozen=True, slots=True)
class ShortConvConfig(RecurrentConfig):
    """Gated short convolutions, of as many channels as the model is wide."""

    name: ClassVar[str] = "gated short convolutions"
    module: ClassVar[str] = "conv"
    layers: tuple[int, ...]
    channels: int
    taps: int  # of the convolution, a row's own included
    bias: bool = False  # of the convolution and of both projections

    def parts(self, hidden_size: int) -> Parts:
        parts: Parts = {
            "in_proj": LinearShape(hidden_size, 3 * self.channels, self.bias),
            "conv.weight": (self.channels, 1, self.taps),
            "out_proj": LinearShape(self.channels, hidden_size, self.bias),
        }
        return parts | ({"conv.bias": (self.channels,)} if self.bias else {})

    @property
    def states(self) -> tuple[StateShape, ...]:
        """The last inputs of the convolution."""
        return (StateShape((self.channels, self.taps - 1)),)

    @property
    def rows(self) -> tuple[StateShape, ...]:
        """The input of the convolution."""
        return (StateShape((self.channels,)),)

    @property
    def code(self) -> Mixing:
        from d2sd.modeling.mixers.short_conv import ConvolutionRows, FusedShortConv, ShortConv

        return Mixing(ShortConv, ConvolutionRows, FusedShortConv)


#: All kinds.
RECURRENT: tuple[type[RecurrentConfig], ...] = (DeltaConfig, ShortConvConfig)
