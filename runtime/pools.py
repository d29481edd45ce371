"""Models of a runner that have K/V pools, and layers of these with pages of their own: those with a window."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from d2sd.modeling.decoder import TargetModel
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.modeling.fp8 import kv_scales
from d2sd.modeling.kv_pool import KVPool, PoolSizes
from d2sd.runtime.memory import PoolBytes, WindowedLayers


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

    def bytes_of(self, page_size: int) -> PoolBytes:
        """Bytes of a page of `page_size` tokens and of a state, in the pools of all models."""
        layers = [
            window for model in self._with_pools if self._keeps_apart(model) for window in model.config.body.windows
        ]
        longest = max((window for window in layers if window is not None), default=None)
        windowed = None if longest is None else WindowedLayers(longest, self._bytes(PoolSizes(0, page_size, 1)))
        return PoolBytes(self._bytes(PoolSizes(1, page_size)), windowed, self.state_bytes)

    @property
    def state_bytes(self) -> int:
        """Bytes of one request's recurrent state."""
        return self.target.config.body.state_bytes(self.dtype.itemsize)

    def _bytes(self, sizes: PoolSizes) -> int:
        return sum(tensor.nbytes for pool in self.make(sizes, "meta") for tensor in pool.tensors)

    @property
    def _with_pools(self) -> list[TargetModel | DraftModel]:
        return [self.target, *(drafter for drafter in self.drafters if drafter.has_context)]

    def _keeps_apart(self, model: TargetModel | DraftModel) -> bool:
        """Whether the layers of a model that have a window can have pages of their own."""
        windows = model.config.body.windows
        readers = [drafter for drafter in self.drafters if model is self.target and not drafter.has_context]
        forms = (form for reader in (model, *readers) for form in (reader, reader.compiled))
        return None not in windows or not any(form is not None and form.one_page_table for form in forms)
