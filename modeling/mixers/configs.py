"""Geometry of mixers with a recurrent state, which replace the attention of some layers: their tensors and states.

The modules are imported where a model is made: plans need no PyTorch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, cast

from d2sd.modeling.shapes import LinearShape, Parts

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from d2sd.modeling.config import BodyConfig
    from d2sd.modeling.fused_mixer import FusedMixer
    from d2sd.modeling.layers import Mixer
    from d2sd.modeling.mixers.delta_net import DeltaNet
    from d2sd.modeling.mixers.short_conv import ShortConv
    from d2sd.modeling.state_pool import StateRows


class StateShape(NamedTuple):
    """Part of a request's state in one layer."""

    shape: tuple[int, ...]
    wide: bool = False  # fp32, not the model's type


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
        return len(self.layers) * sum(math.prod(state.shape) * (4 if state.wide else itemsize) for state in self.states)

    @abstractmethod
    def mixer(self, body: BodyConfig) -> Mixer:
        """The module of a layer."""

    @abstractmethod
    def rows(self, shape: Sequence[int], like: Tensor) -> StateRows:
        """Room for what rows [...] of this shape write into states, in the type and on the device of a tensor."""

    @abstractmethod
    def fused(self, mixer: Mixer, dtype: torch.dtype, *, exact: bool) -> FusedMixer:
        """A mixer on CUDA; its weights become views."""


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

    def mixer(self, body: BodyConfig) -> Mixer:
        from d2sd.modeling.mixers.delta_net import DeltaNet, JoinedDeltaNet

        return (JoinedDeltaNet if self.joined else DeltaNet)(body.hidden_size, self, body.rms_norm_eps)

    def rows(self, shape: Sequence[int], like: Tensor) -> StateRows:
        from d2sd.modeling.mixers.delta_net import DeltaStateRows

        return DeltaStateRows.empty(self, shape, like)

    def fused(self, mixer: Mixer, dtype: torch.dtype, *, exact: bool) -> FusedMixer:
        from d2sd.modeling.mixers.delta_net import FusedDeltaNet

        return FusedDeltaNet(cast("DeltaNet", mixer), self, dtype, exact=exact)


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

    def mixer(self, body: BodyConfig) -> Mixer:
        from d2sd.modeling.mixers.short_conv import ShortConv

        return ShortConv(body.hidden_size, self)

    def rows(self, shape: Sequence[int], like: Tensor) -> StateRows:
        from d2sd.modeling.mixers.short_conv import ConvolutionRows

        return ConvolutionRows(like.new_empty(*shape, self.channels))

    def fused(self, mixer: Mixer, dtype: torch.dtype, *, exact: bool) -> FusedMixer:
        from d2sd.modeling.mixers.short_conv import FusedShortConv

        return FusedShortConv(cast("ShortConv", mixer), dtype, exact=exact)


#: All kinds.
RECURRENT: tuple[type[RecurrentConfig], ...] = (DeltaConfig, ShortConvConfig)
