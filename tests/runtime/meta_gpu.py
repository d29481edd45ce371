"""Engines on PyTorch's meta device, in seconds and in the process of the test: they launch what a GPU's would.

Shapes, types, strides and offsets are those of CUDA, and there are no values. `fake_day.py` has fake CUDA tensors, of
which operators cost many times as much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partialmethod
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]

from d2sd.modeling import product
from d2sd.modeling.drafters.head_configs import HeadConfig
from d2sd.plugins import dispatch
from d2sd.policies import PolicyName
from d2sd.runtime.decode import StepResult
from d2sd.runtime.engine import Engine
from d2sd.runtime.grammar.step import NoGrammar, StepGrammar
from d2sd.runtime.request import Limits
from d2sd.runtime.speculation.policy import make_policy
from d2sd.runtime.staging import Staging
from tests.runtime.specialisations import Specialisations, launched
from tests.tiny import runner_of, tiny_decoder, tiny_drafter
from tools.cuda.fake import Captures, unpack

BLOCK, BRANCHES, NODES = 4, 2, 8


class MetaCaptures(Captures):
    """Nothing can be copied from the meta device."""

    def fetch(self, tensor: Tensor) -> Callable[[], Tensor]:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        return lambda: copy


@contextmanager
def meta_gpu(asked: Specialisations) -> Iterator[None]:
    """The meta device is an H100, whose launches are noted."""
    with (
        patch.object(dispatch, "use_kernels", lambda op, x, **_: x.device.type == "meta"),
        patch.object(dispatch, "use_fused_layers", lambda weight, size, *, fp8, unlike: unlike is None),
        patch.object(product, "_equal", lambda scales: True),
        patch.object(JITFunction, "run", partialmethod(launched, asked)),
        patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        patch.object(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132)),
        patch.object(torch.cuda, "device_of", lambda _: nullcontext()),
        patch.object(StepResult, "unpack", unpack),
        patch.object(StepGrammar, "of", lambda sequences: NoGrammar()),
    ):
        yield


def meta_engine(policy: PolicyName, limits: Limits, *, lookup: bool = False, head: HeadConfig | None = None) -> Engine:
    """An engine of tiny models; call it and use it inside `meta_gpu`."""
    made = make_policy(policy, block_size=BLOCK, branches=BRANCHES, row_budget=NODES, lookup=lookup)
    target = tiny_decoder("qwen3", layers=1, hidden=64, heads=4, kv_heads=2, head_dim=16)
    first, second = (
        tiny_drafter(target.config, role=role, layers=1, head=head) for role in ("first", "variable_prefix")
    )
    runner = runner_of(target.to("meta"), first.to("meta"), second.to("meta"))
    runner.capture = MetaCaptures("meta")
    runner.staging = Staging("meta", runner.capture.mark)
    return Engine(runner, made.among(runner.drafters), limits)
