"""Geometry of the heads that score candidates behind their parents, and their tensors by arithmetic.

The modules are in a file each, and are imported where a drafter is made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from d2sd.modeling.config import BodyConfig
from d2sd.modeling.shapes import LinearShape, Parts, below

if TYPE_CHECKING:
    from torch import Tensor, nn

    from d2sd.modeling.layers import Layer


class HeadConfig(ABC):
    """Geometry of a head and of what comes with it; subclasses are frozen dataclasses."""

    __slots__ = ()
    #: The name of its kind, and of the file of its modules in this folder.
    name: ClassVar[str]
    #: The drafter below was trained without it, so that an engine may leave it out.
    is_optional: ClassVar[bool] = False
    #: See `DraftConfig.graph_refusal`.
    graph_refusal: ClassVar[str | None] = None

    @property
    def code(self) -> Any:
        """The module of that file, which needs PyTorch."""
        return import_module(f"d2sd.modeling.drafters.{self.name}")

    def precision_refusal(self, precision: str) -> str | None:
        """See `DraftConfig.precision_refusal`."""
        return None

    def layer(self, body: BodyConfig) -> Layer:
        """A layer of the drafter."""
        from d2sd.modeling.layers import Layer

        return Layer(body)

    def layer_parts(self, body: BodyConfig) -> Parts:
        """The tensors that such a layer has and `Layer` has not."""
        return {}

    def of_rows(self, drafter: Any, positions: Tensor, size: int | None) -> tuple[Any, ...]:
        """More arguments of such layers of a drafter, for rows at `positions [B, T]`; see `Drafter.forward`."""
        return ()

    @abstractmethod
    def parts(self, body: BodyConfig, vocab_size: int) -> Parts:
        """The tensors of `modules`."""

    @abstractmethod
    def modules(self, body: BodyConfig, vocab_size: int) -> Iterator[tuple[str, nn.Module]]:
        """Modules that a drafter has in addition to its body, by their names in checkpoints; one is a `Head`."""


@dataclass(frozen=True, slots=True)
class MarkovConfig(HeadConfig):
    """Geometry of a Markov head."""

    name: ClassVar[str] = "dspark"
    rank: int
    gated: bool = False
    confidence: bool = False  # it has the network that predicts acceptance
    confidence_with_markov: bool = False  # which reads W1[p] too

    def parts(self, body: BodyConfig, vocab_size: int) -> Parts:
        tables: Parts = {f"markov_head.markov_{name}.weight": (vocab_size, self.rank) for name in ("w1", "w2")}
        if self.gated:
            tables["markov_head.gate_proj"] = LinearShape(body.hidden_size + self.rank, self.rank, bias=True)
        if self.confidence:
            inputs = body.hidden_size + self.rank * self.confidence_with_markov
            tables["confidence_head.proj"] = LinearShape(inputs, 1, bias=True)
        return tables

    def modules(self, body: BodyConfig, vocab_size: int) -> Iterator[tuple[str, nn.Module]]:
        yield "markov_head", self.code.MarkovHead(self, body.hidden_size, vocab_size)
        if self.confidence:
            inputs = body.hidden_size + self.rank * self.confidence_with_markov
            yield "confidence_head", self.code.ConfidenceHead(inputs)


@dataclass(frozen=True, slots=True)
class SelectorConfig(HeadConfig):
    """Geometry of a selector and of the convolutions."""

    name: ClassVar[str] = "dflash2"
    rank: int
    candidates: int  # of a slot, among which it selects
    taps: int
    group: int  # channels that share a dynamic coefficient

    def precision_refusal(self, precision: str) -> str | None:
        return "The convolutions of a DFlash 2 drafter exceed the range of fp16." if precision == "fp16" else None

    def layer(self, body: BodyConfig) -> Layer:
        layer: Layer = self.code.ConvolvedLayer(body, self.taps, self.group)
        return layer

    def layer_parts(self, body: BodyConfig) -> Parts:
        hidden = body.hidden_size
        convolution: Parts = {
            "base_kernel": (2, self.taps, hidden),
            "kernel_projection": LinearShape(hidden, 2 * self.taps * hidden // self.group),
        }
        return below("attention_conv", convolution) | below("mlp_conv", convolution)

    def of_rows(self, drafter: Any, positions: Tensor, size: int | None) -> tuple[Any, ...]:
        return (self.code.joined_rows(positions, size, self.taps),)

    def parts(self, body: BodyConfig, vocab_size: int) -> Parts:
        return below(
            "candidate_selector",
            {
                "predecessor_codebook": (vocab_size, self.rank),
                "successor_codebook": (vocab_size, self.rank),
                "hidden_projection": LinearShape(body.hidden_size, self.rank),
            },
        )

    def modules(self, body: BodyConfig, vocab_size: int) -> Iterator[tuple[str, nn.Module]]:
        yield "candidate_selector", self.code.CandidateSelector(self, body.hidden_size, vocab_size)


@dataclass(frozen=True, slots=True)
class PairConfig(HeadConfig):
    """Geometry of a pair head."""

    name: ClassVar[str] = "pair"
    is_optional: ClassVar[bool] = True
    rank: int
    candidates: int = 16  # of a slot, among which it chooses

    def parts(self, body: BodyConfig, vocab_size: int) -> Parts:
        return below(
            "pair_head",
            {
                "predecessor_projection": (self.rank, body.hidden_size),
                "successor_projection": (self.rank, body.hidden_size),
                "hidden_projection": LinearShape(body.hidden_size, self.rank),
            },
        )

    def modules(self, body: BodyConfig, vocab_size: int) -> Iterator[tuple[str, nn.Module]]:
        yield "pair_head", self.code.PairHead(self, body.hidden_size)


@dataclass(frozen=True, slots=True)
class InjectionConfig(HeadConfig):
    """Geometry of what DSpine's layers pass from slot to slot."""

    name: ClassVar[str] = "dspine"
    graph_refusal: ClassVar[str | None] = "DSpine drafters are not exported: their layers read the codes of tokens."
    rank: int  # numbers of a token's code
    message: int  # numbers of what a slot is given
    candidates: int  # of a slot, among which it chooses

    def layer(self, body: BodyConfig) -> Layer:
        layer: Layer = self.code.InjectedLayer(body)
        return layer

    def of_rows(self, drafter: Any, positions: Tensor, size: int | None) -> tuple[Any, ...]:
        rows: tuple[Any, ...] = drafter.injection.of_rows(positions, size)
        return rows

    def parts(self, body: BodyConfig, vocab_size: int) -> Parts:
        of_codes = LinearShape(self.rank, self.message)
        parts: Parts = {"transfer_codes": (vocab_size, self.rank), "bias": (self.message,)}
        parts |= dict.fromkeys(("message", "receiver_gate", "predecessor_gate"), of_codes)
        for layer in range(body.num_layers):
            parts[f"readouts.{layer}"] = LinearShape(body.hidden_size, self.rank)
            parts[f"writes.{layer}"] = LinearShape(self.message, body.hidden_size)
        return below("injection", parts)

    def modules(self, body: BodyConfig, vocab_size: int) -> Iterator[tuple[str, nn.Module]]:
        yield "injection", self.code.Injection(self, body, vocab_size)
