"""Whole engines on the stand-in: `CudaGraphs` captures, replays and reads back as it is. Run by test_runtime.py.

    python -m tests.cuda.runtime.engines STEPS [SEED [WINDOWS]]

serves random load for so many steps, as tests/runtime/soak.py does. Kernels are not launched: their operators are.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path

import pytest
import torch

from d2sd.bundle.product_times import choose_products
from d2sd.modeling.product_forms import MOST_ROWS, PLAIN
from d2sd.plugins import dispatch
from d2sd.plugins.cpu import library
from d2sd.policies import PolicyName
from d2sd.runtime.cuda_graphs.capture import CudaGraphs
from d2sd.runtime.engine import Engine
from d2sd.runtime.product_times import products_of
from d2sd.runtime.request import Request, powers_of_two
from d2sd.runtime.sequence import Sequence
from d2sd.runtime.speculation.calibration import default_scores
from tests.runtime.helpers import BLOCK, copies, expected, make_engine, placed, run_staggered, some_requests
from tests.runtime.soak import Poisoned, Soak, pool
from tests.tiny import runner_of
from tools.cuda import guard
from tools.cuda.runtime import Cuda, cuda_on_cpu
from tools.cuda.runtime.streams import Event


@pytest.fixture(autouse=True)
def guarded() -> None:
    guard.load(Path(os.environ["D2SD_CUDA_GUARD"]))


@contextmanager
def on_streams() -> Iterator[Cuda]:
    """Engines inside run on the device, without kernels."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("use_kernels", "use_fused_layers"):
            patch.setattr(dispatch, name, lambda *_, **__: False)
        patch.setattr(library, "available", lambda: False)
        default_scores.cache_clear()  # of another device of this name
        with cuda_on_cpu() as cuda:
            yield cuda


def check(engine: Engine, cuda: Cuda) -> None:
    """Steps were captured, and ran ahead of the host."""
    assert isinstance(engine.runner.capture, CudaGraphs)
    assert not engine.steps.refused
    assert cuda.replays > 0


def engine_on(cuda: Cuda, policy: str, max_batch: int, prefill_chunk: int = 16) -> Engine:
    models = placed(policy)
    for model in filter(None, models):
        cuda.move(model)
    return make_engine(runner_of(*models), policy, max_batch=max_batch, prefill_chunk=prefill_chunk)


#: Two passes at every change; then none, one, both in one tree, a draft that the host carries, and one that it makes.
POLICIES = [
    "d2sd",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("off", "chain", "hybrid", "flex", "lookup")),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_are_those_of_plain_decoding(policy: PolicyName) -> None:
    """Requests join a running batch, greedy and sampled, and share graphs and static inputs."""
    requests = some_requests()[:3]
    with on_streams() as cuda:
        engine = engine_on(cuda, policy, 2)
        found = run_staggered(engine, requests, gap=2)
        check(engine, cuda)
    assert [one.answer for one in found] == [expected(request) for request in requests]


def test_a_request_after_an_idle_engine() -> None:
    """The state of a step that ran long ago is not taken for that of the step before."""
    with on_streams() as cuda:
        engine = engine_on(cuda, "chain", 2)
        for request in some_requests()[::5]:
            (found,) = engine.generate([request])
            assert found.answer == expected(request)
        check(engine, cuda)


def test_the_host_waits_once_a_step_for_the_step_before() -> None:
    with on_streams() as cuda:
        engine = engine_on(cuda, "chain", 1)
        sequence = engine.submit(some_requests()[0])
        engine.step()
        while sequence.remaining > BLOCK:
            before = cuda.waits, cuda.replays, len(sequence.answer)
            engine.step()
            assert (cuda.waits, cuda.replays) == (before[0] + 1, before[1] + 1)
            assert len(sequence.answer) > before[2], "of the step before, which was launched by the call before"


@pytest.mark.parametrize("captured", [False, True])
def test_a_prompt_of_many_chunks(captured: bool) -> None:
    """Passes that follow each other without a step that the host reads: their inputs take turns in pinned buffers."""
    request = Request(tuple(range(50)), 6)
    with on_streams() as cuda:
        engine = engine_on(cuda, "chain", 1, prefill_chunk=8)
        for capture in engine.steps.prefills.warm_ups() if captured else ():
            capture()
        (found,) = engine.generate([request])
        check(engine, cuda)
        assert cuda.replays == engine.stats.steps + 7 * captured
    assert found.answer == expected(request)


@pytest.mark.slow
def test_a_warm_engine_captures_nothing_in_service() -> None:
    requests = some_requests()[:3]
    with on_streams() as cuda:
        engine = engine_on(cuda, "d2sd", 2)
        engine.warm_up()
        graphs = set(engine.steps._graphs)
        found = run_staggered(engine, requests, gap=2)
        check(engine, cuda)
        assert set(engine.steps._graphs) == graphs
    assert [one.answer for one in found] == [expected(request) for request in requests]


class SoakOnStreams(Soak):
    """Models on the device, and its own graphs."""

    cuda: Cuda

    def _runner(self, texts: dict[int, list[int]]) -> Poisoned:
        models = placed(self.case, self.windows)
        for model in filter(None, models):
            self.cuda.move(model)
        return Poisoned(*models, texts)

    def _captured(self, engine: Engine) -> Engine:
        return engine

    def _check_pages(self, one: Sequence) -> None:
        """Pages are compared on a CPU: other runs do that."""


def soak(steps: int, seed: int, windows: str = "none") -> SoakOnStreams:
    """Serve random load: cancellations, preemptions, stops, policies in turns, steps with and without a graph."""
    pool(windows)  # on the CPU
    with on_streams() as cuda:
        SoakOnStreams.cuda = cuda
        made = SoakOnStreams(seed, rerun=False, windows=windows)
        made.run(steps)
        check(made.engine, cuda)
    return made


def check_soak(steps: int, windows: str = "none") -> None:
    seen = soak(steps, 3, windows).seen
    assert seen["late"] > steps / 4, "steps run before the tokens of the one before are read"


def test_a_short_soak() -> None:
    check_soak(12)


@pytest.mark.slow
@pytest.mark.parametrize("windows", ["none", "mixed"])
def test_a_soak(windows: str) -> None:
    check_soak(60, windows)


def test_products_are_timed_on_the_device_before_steps_are_captured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Fused layers in bf16, with forms that were chosen by events around graphs; the engine then serves with them."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "device_of", lambda _: nullcontext())
    monkeypatch.setenv("D2SD_CACHE", str(tmp_path))
    falling = (1 / turn for turn in count(1))  # what is timed later is faster
    monkeypatch.setattr(Event, "elapsed_time", lambda start, end: next(falling), raising=False)
    with on_streams() as cuda:
        monkeypatch.setattr(dispatch, "use_fused_layers", lambda *_, unlike, **__: unlike is None)
        target, drafter, *_ = copies()
        for model in (target, drafter):
            cuda.move(model.to(torch.bfloat16))
        runner = runner_of(target, drafter)
        choose_products(runner, None)
        products = products_of(runner)
        assert all(set(product.forms) == set(powers_of_two(MOST_ROWS)) for product in products)
        assert any(form is not PLAIN for product in products for form in product.forms.values())
        engine = make_engine(runner, "chain", max_batch=1)
        (found,) = engine.generate([some_requests()[0]])
        check(engine, cuda)
    assert len(found.answer) == some_requests()[0].max_new_tokens
    (file,) = tmp_path.iterdir()
    assert "NVIDIA H100" in file.read_text()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        guard.build(Path(folder))
        guard.load(Path(folder))
    steps, seed, windows = [*sys.argv[1:], *["1000", "1", "none"][len(sys.argv) - 1 :]]
    print(dict(soak(int(steps), int(seed), windows).seen))
    print(f"{steps} steps, 0 differ")
