"""Where requests live: the pages of their tokens, and the states of their recurrent layers.

Layers whose rows see a window of the context may have pages of their own, so that those behind the window can be freed:

    pages      [B, M]   column j: the page of tokens j·Z .. j·Z + Z - 1 in the layers that see all of them
    windowed   [B, M]   the same of the layers with a window; 0 where the page is freed, which no row reads

Without `windowed` all layers have the pages of `pages`. What is made of one page table each, such as the pages of rows,
is a tuple of one or two, in the order of `tables`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

State = TypeVar("State", bound="DataclassInstance")

# Shape letters: B requests, M pages a request, Z tokens a page.


@dataclass(frozen=True, slots=True)
class Where:
    """The places of B requests."""

    pages: Tensor  # [B, M] int64, M at least 1: kernels read ids of pages ahead, where no token is committed too
    context_len: Tensor  # [B] int64, committed tokens
    windowed: Tensor | None = None  # [B, M] int64
    state_ids: Tensor | None = None  # [B] int64, of the states of hybrids, 0 in padding; None: there are none

    @staticmethod
    def scratch(
        requests: int, columns: int, context_len: int = 0, *, windowed: bool = False, states: bool = False
    ) -> Where:
        """Places on the host of requests that write to the scratch page 0 alone, in all M = `columns`."""
        zeros = torch.zeros(requests, dtype=torch.long)
        table = zeros[:, None].expand(-1, columns)
        return Where(table, zeros + context_len, table if windowed else None, zeros if states else None)

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """The page tables: `pages`, then `windowed`, if there is one."""
        return (self.pages,) if self.windowed is None else (self.pages, self.windowed)

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, in the order of the fields."""
        return tensors_of(self)

    def with_tensors(self, tensors: Iterable[Tensor]) -> Where:
        """The same places in other `tensors`, as on another device."""
        return with_tensors(self, tensors)

    def with_tables(self, tables: Iterable[Tensor]) -> Where:
        """The same requests in the pages of other `tables`."""
        pages, *windowed = tables
        return replace(self, pages=pages, windowed=windowed[0] if windowed else None)

    def map_tables(self, change: Callable[[Tensor], Tensor]) -> Where:
        """The same requests in other page tables, each made of the one that it replaces."""
        return self.with_tables(map(change, self.tables))

    def after(self, count: Tensor | int) -> Where:
        """The places behind `count` [B] more committed tokens, in the same pages."""
        return replace(self, context_len=self.context_len + count)


def tensors_of(state: DataclassInstance) -> list[Tensor]:
    """The fields of a dataclass that are tensors, in their order."""
    values = (getattr(state, field.name) for field in fields(state))
    return [value for value in values if isinstance(value, Tensor)]


def mapped(state: State, change: Callable[[Tensor], Tensor]) -> State:
    """The same dataclass with `change` of each of its `tensors_of`."""
    values = ((field.name, getattr(state, field.name)) for field in fields(state))
    changed: dict[str, Any] = {name: change(value) for name, value in values if isinstance(value, Tensor)}
    return replace(state, **changed)


def with_tensors(state: State, tensors: Iterable[Tensor]) -> State:
    """The same dataclass with other `tensors_of`; of an iterator as many are taken as it has."""
    left = iter(tensors)
    return mapped(state, lambda _: next(left))
