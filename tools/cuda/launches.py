"""Tell which operators of PyTorch run something on the device."""

from __future__ import annotations

from typing import Any

from torch import Tensor

#: Make tensors without running anything on the device, or are shapes only.
FREE = ("aten.empty", "aten.new_empty", "aten.expand", "aten._unsafe_view", "prim.")


def launches(func: Any, given: list[Tensor], made: list[Tensor]) -> bool:
    """Whether an operator runs something on the device."""
    storages = {storage_of(x) for x in given}
    view = all(storage_of(x) in storages for x in made) and not func._schema.is_mutable
    return not view and not str(func).startswith(FREE)


def storage_of(tensor: Tensor) -> int:
    """A number of the memory that views share."""
    found: int = tensor.untyped_storage()._cdata
    return found
