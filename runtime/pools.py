"""Which models of a runner have K/V pools, and which of their layers have pages of their own: those with a window."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from d2sd.modeling.decoder import TargetModel
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.modeling.fp8 import kv_scales
from d2sd.modeling.inference import takes_one_table
from d2sd.modeling.kv_pool import KVPool


@dataclass(frozen=True)
class PoolLayout:
    """The pools of a target and its drafters, in that order; their numbers have type `dtype` unless they are FP8."""

    target: TargetModel
    drafters: Collection[DraftModel]
    dtype: torch.dtype

    def make(self, pages: int, page_size: int, device: str, windowed_pages: int | None, slots: int = 1) -> list[KVPool]:
        """A pool for each model with context; `windowed_pages`: of layers with a window, None: as all others;
        `slots`: of recurrent state.
        """
        pools = []
        for model in self._with_pools:
            windowed = windowed_pages if self._keeps_apart(model) else None
            size = model.config.body, pages, page_size, self.dtype, device
            pools.append(KVPool(*size, kv_scales(model), windowed, slots))
        return pools

    def bytes(self, pages: int, page_size: int, windowed_pages: int | None) -> int:
        """Bytes of these pools."""
        pools = self.make(pages, page_size, "meta", windowed_pages)
        return sum(tensor.nbytes for pool in pools for tensor in pool.tensors)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot of recurrent state."""
        delta = self.target.config.body.delta
        return 0 if delta is None else delta.state_bytes(self.dtype.itemsize)

    @property
    def longest_window(self) -> int | None:
        """Most tokens that a row sees in the layers that can have pages of their own; None: there are none."""
        windows = [
            window for model in self._with_pools if self._keeps_apart(model) for window in model.config.body.windows
        ]
        return max((window for window in windows if window is not None), default=None)

    @property
    def _with_pools(self) -> list[TargetModel | DraftModel]:
        return [self.target, *(drafter for drafter in self.drafters if drafter.has_context)]

    def _keeps_apart(self, model: TargetModel | DraftModel) -> bool:
        """Whether the layers of a model that have a window can have pages of their own."""
        windows = model.config.body.windows
        readers = [drafter for drafter in self.drafters if model is self.target and not drafter.has_context]
        return None not in windows or not any(takes_one_table(reader) for reader in (model, *readers))
