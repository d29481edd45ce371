"""Work of an engine around its graphs, on fake CUDA tensors: run by tests/runtime/test_fake_cuda.py.

A step is one copy in, one graph without any copy, and one copy out; a prefill is one copy in, and one out for each 64
prompt tokens that are reported. The host waits for none of them.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from d2sd.policies import DrafterRole
from d2sd.runtime import model_runner
from d2sd.runtime.decode import StepResult
from d2sd.runtime.engine import Engine
from d2sd.runtime.request import Limits, Request
from d2sd.runtime.sampling_params import SamplingParams
from tests.cuda.models import EAGLE, GREEDY, HOT, NARROW, policy_of, runner
from tools.cuda import guard
from tools.cuda.fake import Captures, Watch, fake_gpu, unpack

LIMITS = Limits(4, 256, 16, 64)
WINDOWED: dict[str, Any] = {"windows": (None, 8), "behind": {"windows": (8, 9)}}
FULL = pytest.mark.full


@pytest.fixture(autouse=True)
def guarded() -> None:
    guard.load(Path(os.environ["D2SD_CUDA_GUARD"]))


#: Every number of passes, a draft of the host, and every kind of sampling. The operators of the other policies are
#: compared with the host's in step.py, too.
@pytest.mark.parametrize(
    ("case", "params", "windows"),
    [
        ("off", HOT, {}),
        ("lookup", GREEDY, {}),
        ("chain", NARROW, {}),
        ("d2sd", HOT, {}),
        ("flex", HOT, {}),
        ("flex_parallel", HOT, {}),
        (EAGLE, HOT, {}),
        ("d2sd", HOT, WINDOWED),
        *(pytest.param(case, GREEDY, {}, marks=FULL) for case in ("reanchor", "ddtree", "hybrid")),
    ],
)
def test_a_step_is_one_copy_in_and_one_out(case: str, params: SamplingParams, windows: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch, fake_gpu(Watch()):
        patch.setattr(model_runner, "CudaGraphs", Captures)
        patch.setattr(StepResult, "unpack", unpack)
        policy = policy_of("hybrid").among({DrafterRole.FIRST}) if case == EAGLE else policy_of(case)
        made = runner(2, 2, fp8=False, roles=policy.drafters, case=case, **windows)
        engine = Engine(made, policy, LIMITS)
        for row in range(3):
            engine.submit(Request(tuple(range(1, 6 + 3 * row)), 60, params))
        for _ in range(4):
            with (step := Watch()):
                engine.step()
        with (joining := Watch()):  # a prompt of several chunks, while the others decode
            engine.submit(Request(tuple(range(1, 150)), 60, params))
            engine.step()
        engine = Engine(made, policy, LIMITS)
        engine.submit(Request(tuple(range(1, 40)), 60, replace(params, prompt_logprobs=2)))
        with (reported := Watch()):
            engine.admit()
    assert isinstance(made.capture, Captures)
    (captured,) = made.capture.watches
    assert captured.launches.total() > 5
    assert not captured.crossing
    assert step.crossing == {"copy_": 1, "to": 1}
    assert joining.crossing == {"copy_": 2, "to": 1}
    assert reported.crossing == {"copy_": 1, "_to_copy": 1}
