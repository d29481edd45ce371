"""Models of a runner that have K/V pools, and layers of these with pages of their own: those with a window."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from d2sd.modeling.decoder import TargetModel
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.modeling.fp8 import kv_scales
from d2sd.modeling.kv_pool import KVPool, PoolSizes


@dataclass(frozen=True)
class PoolLayout:
    """The pools of a target and its drafters, in that order; their numbers have type `dtype` unless they are FP8."""

    target: TargetModel
    drafters: Collection[DraftModel]
    dtype: torch.dtype

    def make(self, sizes: PoolSizes, device: str) -> list[KVPool]:
        """A pool of these sizes for each model with context."""
        pools = []
        for model in self._with_pools:
            own = sizes if self._keeps_apart(model) else replace(sizes, windowed=None)
            pools.append(KVPool(model.config.body, own, self.dtype, device, kv_scales(model)))
        return pools

    def bytes(self, sizes: PoolSizes) -> int:
        """Bytes of the pages of these pools."""
        return sum(tensor.nbytes for pool in self.make(sizes, "meta") for tensor in pool.tensors)

    @property
    def state_bytes(self) -> int:
        """Bytes of one request's recurrent state."""
        return self.target.config.body.state_bytes(self.dtype.itemsize)

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
        forms = (form for reader in (model, *readers) for form in (reader, reader.compiled))
        return None not in windows or not any(form is not None and form.one_page_table for form in forms)
