"""A step of training has all its tensors on the GPU: shown on fake CUDA tensors.

Run by tests/runtime/test_fake_cuda.py. Its backward pass, which needs a device, is left out.
"""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from d2sd.convert.kinds import DFLASH
from d2sd.train import loop
from d2sd.train.data.draws import PrefixDraws
from d2sd.train.data.features import TrainingData
from d2sd.train.data.packing import Packed
from d2sd.train.data.responses import Response
from d2sd.train.loop import Drawn, Trainer
from d2sd.train.objectives import head as head_module
from d2sd.train.objectives.head import Head
from d2sd.train.objectives.loss import Candidates
from d2sd.train_recipe import SecondSettings, TrainSettings
from tests.cuda.models import VOCABULARY, models
from tools.cuda import guard
from tools.cuda.fake import Watch

HIDDEN = 64
SETTINGS: dict[str, Any] = {
    "steps": 1, "batch": 8, "micro_batch": 8, "blocks": 6, "frequent": 64, "negatives": 16,
    "objective": {"slots": "dpace", "ce": 0.3, "kl": 0.7, "focal": 0.3, "chain": 4},
}  # fmt: skip


def stats(drafted: Tensor, target: Tensor, *others: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
    """In place of a kernel, which is no operator: what it may rely on."""
    assert all(part.is_contiguous() for part in (drafted, target, *others))
    assert {part.device.type for part in (drafted, target, *others)} == {"cuda"}
    columns = [torch.empty(len(drafted), device="cuda") for _ in range(6)]
    return [*columns[:4], torch.empty(len(drafted), dtype=torch.long, device="cuda")], columns[4], columns[5]


def drawn_step(trainer: Trainer, mode: FakeTensorMode) -> tuple[Drawn, int]:
    """The first step's data, drawn on the host, on the fake device; and how many slots are trained at most."""
    device_head, trainer._head = trainer._head, torch.zeros(VOCABULARY, HIDDEN)
    drawn = trainer._prepare(0)
    trainer._head = device_head
    slots = sum(int(packed.inside[..., 1:].sum()) for packed, _ in drawn.batches)

    def there(part: Any) -> Any:
        return mode.from_tensor(part).to("cuda") if isinstance(part, Tensor) else part

    with mode:
        batches: list[tuple[Packed, PrefixDraws | None]] = []
        for packed, draws in drawn.batches:
            moved = Packed(*(there(getattr(packed, field.name)) for field in fields(packed)))
            batches.append((moved, None if draws is None else PrefixDraws(there(draws.length), there(draws.chance))))
        ids, index, head = drawn.candidates.ids, drawn.candidates.index, drawn.candidates.head
        candidates = Candidates(there(ids), there(index), Head(there(head.weight), there(head.correction)))
    return Drawn(batches, candidates), slots


@pytest.fixture(autouse=True)
def guarded() -> None:
    guard.load(Path(os.environ["D2SD_CUDA_GUARD"]))


@pytest.mark.parametrize("name", ["first", "second", "flex"])
def test_nothing_crosses_in_a_step(name: str) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=False)
    layers = 1 if name == "flex" else 2  # auxiliary ones
    responses = [Response(f"a{i}", list(range(5 + 3 * i)), list(range(40))) for i in range(12)]
    rows = [torch.zeros(len(r.prompt_ids) + 40, (layers + 1) * HIDDEN, dtype=torch.bfloat16) for r in responses]
    data = TrainingData(responses, layers, rows.__getitem__)
    chosen = SecondSettings(**SETTINGS, on_correction=0.25) if name == "second" else TrainSettings(**SETTINGS)
    frequent = data.frequent(64, VOCABULARY)
    with mode:
        target, first, second, flex = models(2, 2, dtype=torch.float32)
        drafter = {"first": first, "second": second, "flex": flex}[name]
        drafter.requires_grad_(True)
        with patch.object(loop, "digest_of", lambda *_: ""), patch.object(data, "frequent", lambda *_: None):
            trainer = Trainer(target, drafter, data, chosen, first if name == "second" else None)
        for each in (first, second):
            DFLASH.attach(each, target)
    trainer._frequent = frequent
    drawn, slots = drawn_step(trainer, mode)

    def backward(_: Tensor) -> None:
        for parameter in drafter.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None

    kernels = SimpleNamespace(stats_triton=stats)
    values: dict[str, Any] = {
        "nonzero": lambda x: torch.zeros(slots, x.dim(), dtype=torch.long, device=x.device),
        "tolist": lambda x: [1.0] * len(x),
        "item": lambda _: 1.0,
        "backward": backward,
    }
    trainer._drawn = lambda: drawn  # type: ignore[method-assign]
    triton = patch.object(head_module, "_triton", lambda: kernels)
    host = patch.object(loop, "on_host", lambda values: values.tolist)
    with mode, patch.multiple(Tensor, **values), triton, host, (watch := Watch()):
        trainer._update()
    assert watch.crossing == {}
    assert watch.launches.total() > 300
