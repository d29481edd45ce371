"""The part of a target that a rank of tensor parallelism has: its geometry, and what is read of each tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from d2sd.errors import D2SDError

if TYPE_CHECKING:
    from torch import Tensor

    from d2sd.modeling.config import BodyConfig, DecoderConfig

_WHERE = "tensor parallel"


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `size` equal parts of a target."""

    rank: int
    size: int

    def part(self, units: int) -> tuple[int, int]:
        """First and last unit, exclusive. Of fewer units than ranks each belongs to several ranks in a row."""
        if units % self.size == 0:
            share = units // self.size
            return self.rank * share, (self.rank + 1) * share
        first = self.rank * units // self.size
        return first, first + 1

    def rows_of_head(self, vocab_size: int) -> tuple[int, int]:
        """First and last row of the head, exclusive; the last ranks may have fewer rows, or none."""
        share = -(-vocab_size // self.size)
        return min(self.rank * share, vocab_size), min((self.rank + 1) * share, vocab_size)

    def body(self, body: BodyConfig) -> BodyConfig:
        """The geometry of this part of the layers."""
        first, last = self.part(body.num_kv_heads)
        experts = body.experts
        if experts is not None:
            experts = replace(experts, intermediate_size=experts.intermediate_size // self.size)
        return replace(
            body,
            experts=experts,
            num_heads=body.num_heads // self.size,
            num_kv_heads=last - first,
            intermediate_size=body.intermediate_size // self.size,
        )


def check_divisible(config: DecoderConfig, size: int) -> None:
    """Raise D2SDError unless `size` ranks can share a target of this geometry."""
    body = config.body
    if body.recurrent is not None:
        _refuse(f"{body.recurrent.name.capitalize()} are not divided among ranks.", size, "one rank")
    if body.global_heads is not None:
        _refuse("Heads of two sizes are not divided among ranks.", size, "one rank")
    columns = [body.intermediate_size] + ([body.experts.intermediate_size] if body.experts else [])
    for name, units in (("query heads", body.num_heads), *(("columns of the MLP", each) for each in columns)):
        if units % size:
            _refuse(f"The target's {units} {name} cannot be divided among the ranks.", size, f"a divisor of {units}")
    if body.num_kv_heads % size and size % body.num_kv_heads:
        _refuse(
            f"The target's {body.num_kv_heads} K/V heads can be neither divided among the ranks nor shared evenly.",
            size,
            f"a divisor or a multiple of {body.num_kv_heads}",
        )


def _refuse(what: str, size: int, expected: str) -> NoReturn:
    raise D2SDError(what, where=_WHERE, found=f"{size} ranks", expected=expected)


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a tensor that a rank has."""

    axis: int
    start: int
    stop: int

    def read(self, stored: Any) -> Tensor:
        """Take the part of a tensor, or of a slice of a safetensors file, which reads no more than it."""
        index = (slice(None),) * self.axis + (slice(self.start, self.stop),)
        part: Tensor = stored[index]
        return part
