"""Engines on fake CUDA tensors: shapes, types and devices are real, values are not, and no GPU is needed.

    python -m tests.runtime.fake_cuda FOLDER POLICY KIND ...

Prints a JSON line for each policy and kind of sampling: operators of the captured step, and every operator on tensors
of both host and device, of the capture and of a step that replays it. FOLDER has the device guard of
tools/cuda/guard.py, which other tests' processes must not load. tests/cuda counts launches; this shows what the engine
does around a graph.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from d2sd.modeling.config import BodyConfig, DecoderConfig, DrafterConfig, FlexConfig, RopeConfig
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.plugins import dispatch
from d2sd.runtime import model_runner
from d2sd.runtime.decode import Committed, StepResult
from d2sd.runtime.engine import Engine
from d2sd.runtime.request import Limits, Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.speculation.policy import make_policy
from tests.tiny import of_case, policy_name, runner_of
from tools.cuda import guard

T = TypeVar("T")
BLOCK, BRANCHES, NODES, STEPS = 8, 3, 16, 4
KINDS = {"greedy": SamplingParams(), "hot": SamplingParams(1.0), "narrow": SamplingParams(0.7, top_p=0.9, top_k=20)}
KINDS["windows"] = KINDS["hot"]  # of other models


class Watch(TorchDispatchMode):
    """Counts operators, and those between host and device by name: a copy for which the host waits is "waits"."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators = 0
        self.crossing: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operators += 1
        if len({t.device.type for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)}) > 1:
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            self.crossing[func.overloadpacket.__name__ if given.get("non_blocking") else "waits"] += 1
        return out


class Captures:
    """A `Capture` that runs the function once more under a watch, and replays nothing."""

    def __init__(self, device: str) -> None:
        self.watches: list[Watch] = []

    def __call__(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        run()
        self.watches.append(watch := Watch())
        with watch:
            out = run()
        return out, lambda: None

    def fetch(self, tensor: Tensor) -> Callable[[], Tensor]:
        copy = tensor.to("cpu", non_blocking=True)
        return lambda: copy

    def mark(self) -> Callable[[], None]:
        return lambda: None


def unpack(result: StepResult, host: Tensor) -> list[Committed]:
    """Unpack as `StepResult.unpack` does, with counts and tokens that the fake tensors do not have."""
    batch, longest = result.accepted.tokens.shape
    counts = [random.randint(1, longest) for _ in range(batch)]
    return [Committed(count, 0, [random.randrange(400) for _ in range(count)], [], None) for count in counts]


def models(*, windowed: bool) -> list[Any]:
    """`windowed`: layers with a window in the target and the second drafter, some or all."""
    body = BodyConfig(64, 128, 2, 4, 2, 16, 1e-6, RopeConfig(1e6), 4096, qk_norm=True, qkv_bias=False, o_bias=False)
    behind = replace(body, windows=(8, 9)) if windowed else body
    first = DrafterConfig(body, 512, BLOCK, 511, (0, 1), 2, "first")
    second = DrafterConfig(behind, 512, BLOCK, 511, (0, 1), 2, "variable_prefix", 0.9)
    body = replace(body, windows=(None, 8)) if windowed else body
    with torch.device("cuda"):
        target = Decoder(DecoderConfig("qwen3", body, 512, False))
        head = FlexHead(FlexConfig("qwen3", replace(body, num_layers=1, windows=body.windows[1:]), 512, BLOCK, 2, 16))
        made = [target, Drafter(first), Drafter(second), head]
    head.join(target)
    for model in made:
        model.eval().requires_grad_(False)
        rotary: Any = model.rotary
        rotary._frequencies = rotary._frequencies.to("cuda")  # `to` of a module cannot swap fake tensors
    return made


def main(folder: str, *runs: str) -> None:
    guard.load(Path(folder))
    for name in ("use_kernels", "use_fused_layers"):  # kernels are not operators
        setattr(dispatch, name, lambda *a, **k: False)
    patch.object(model_runner, "CudaGraphs", Captures).start()
    patch.object(StepResult, "unpack", unpack).start()
    zeros = torch.zeros
    torch.zeros = lambda *a, pin_memory=False, **k: zeros(*a, **k)
    fake = lambda buffer, *, dtype: zeros(len(buffer) // dtype.itemsize, dtype=dtype)  # noqa: E731
    patch.object(torch, "frombuffer", fake).start()  # else it is a real tensor
    for policy, kind in zip(runs[::2], runs[1::2], strict=True):
        with FakeTensorMode(allow_non_fake_inputs=False):
            target, *drafters = models(windowed=kind == "windows")
            runner = runner_of(target, *of_case(policy, *drafters))
            made = make_policy(policy_name(policy), block_size=BLOCK, branches=BRANCHES, row_budget=NODES)
            engine = Engine(runner, made, Limits(4, 256, 16, 64))
            for row in range(3):
                engine.submit(Request(tuple(range(1, 6 + 3 * row)), 60, KINDS[kind]))
            for _ in range(STEPS):
                with (watch := Watch()):
                    engine.step()
            assert isinstance(runner.capture, Captures)
            captured = [{"operators": w.operators, "crossing": w.crossing} for w in runner.capture.watches]
            with (joining := Watch()):  # a prompt of several chunks, while the others decode
                engine.submit(Request(tuple(range(1, 150)), 60, KINDS[kind]))
                engine.step()
            reading = replace(KINDS[kind], prompt_logprobs=2)
            engine = Engine(runner, made, Limits(4, 256, 16, 64))
            engine.submit(Request(tuple(range(1, 40)), 60, reading))
            with (reported := Watch()):
                engine.admit()
        found = {"step": watch.crossing, "joining": joining.crossing, "reported": reported.crossing}
        print(json.dumps({"captured": captured, **found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
