"""A CUDA graph needs a decode step that reads nothing back and runs the same kernels whatever the tensors hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from d2sd.modeling.decoder import DecoderOutput
from d2sd.modeling.kv_pool import Chunks, Rows
from d2sd.runtime.decode import decode_step
from d2sd.runtime.engine import Engine, Launched
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.speculation.calibration import Calibration
from tests.runtime.helpers import BLOCK, honest, make_engine
from tests.tiny import CASES

#: Operators whose result has the shape of its data, or is a number on the host.
READS = {
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "equal",
    "nonzero",
    "nonzero_numpy",
    "masked_select",
    "bincount",
    "unique_consecutive",
    "unique_dim",
    "_unique2",
}


Kernels = list[tuple[str, tuple[tuple[int, ...], ...]]]  # operators, and the shapes they take and give


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators that wait for the device; writes down all others and the shapes they take and give."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: Kernels = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        flat = torch.utils._pytree.tree_leaves((args, kwargs or {}))
        assert name not in READS, f"{name} waits for the device"
        if name == "repeat_interleave":
            assert func._overloadname != "Tensor", "repeats that lie on the device decide the shape"
        if name.startswith(("index", "_index")) and isinstance(args[1], (list, tuple)):
            assert all(i is None or i.dtype == torch.int64 for i in args[1]), "a mask as index is nonzero in disguise"
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in (*flat, *torch.utils._pytree.tree_leaves(out)) if isinstance(t, Tensor)]
        self.kernels.append((str(func), tuple(tuple(t.shape) for t in tensors)))
        return out


pytestmark = pytest.mark.usefixtures("layers_of_pytorch")


def check_same(steps: list[Kernels]) -> None:
    """Without the pages of difference that two lists of kernels would print."""
    different = [n for n, step in enumerate(steps) if step != steps[0]]
    assert not different, f"of {len(steps)} steps these run other kernels than the first: {different}"


def forbid_reading(patch: pytest.MonkeyPatch) -> None:
    """`tolist` and its like pass the dispatcher by on a CPU."""

    def refuse(name: str) -> Callable[..., NoReturn]:
        def refused(*_: object, **__: object) -> NoReturn:
            raise AssertionError(f"Tensor.{name} waits for the device")

        return refused

    for name in ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__iter__"):
        patch.setattr(Tensor, name, refuse(name))


def running(
    policy: str,
    *kinds: SamplingParams,
    batch: int = 5,
    calibration: Calibration | None = None,
    windows: str = "none",
    runner: ModelRunner | None = None,
) -> Engine:
    runner = runner or honest(windows, policy)
    engine = make_engine(runner, policy, max_batch=batch, page_size=64, pages=7, calibration=calibration)
    engine.runner.static_shapes = True  # as on CUDA
    for row in range(batch):
        engine.submit(Request((row + 1, 7, 2 * row), 30, kinds[row % len(kinds)]))
    return engine


def record(engine: Engine, steps: int) -> list[Kernels]:
    """The kernels of each step between the host's two turns; reading is refused while they run."""
    recorded = []
    for _ in range(steps):
        prepared = engine.prepare(engine.admit())
        engine.runner.context.inject(engine.policy.drafters)
        recorder = Recorder()
        with pytest.MonkeyPatch.context() as patch, recorder:
            forbid_reading(patch)
            result = decode_step(engine.runner, engine.policy, prepared.batch, engine.calibration)
        engine.retire(Launched(prepared, result, result.read))
        recorded.append(recorder.kernels)
    return recorded


GREEDY, HOT, NARROW, LOADED = (
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, top_p=0.9, seed=2),
    SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=9,
        min_p=0.01,
        seed=2,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias={3: 1.0},
        bad_words_token_ids=((1, 2), (3,)),
        min_tokens=3,
        logprobs=2,
    ),
)


@pytest.mark.sampled(11)
@pytest.mark.parametrize("policy", CASES)
@pytest.mark.parametrize(
    "kinds", [(GREEDY,), (HOT,), (GREEDY, HOT, NARROW), (GREEDY, LOADED)], ids=["greedy", "hot", "mixed", "loaded"]
)
def test_nothing_is_read_back_and_every_step_is_the_same(policy: str, kinds: tuple[SamplingParams, ...]) -> None:
    """Four steps at different lengths, with different tokens, trees and accepted paths."""
    steps = record(running(policy, *kinds), 4)
    assert len(steps[0]) > 50
    check_same(steps)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", ["d2sd", "flex_parallel"])
def test_steps_behind_windows_are_the_same(policy: str) -> None:
    """Layers with and without a window have pages of their own."""
    engine = running(policy, HOT, windows="mixed")
    check_same(record(engine, 10))
    assert engine.prepare(engine.admit()).batch.where.windowed is not None
    assert any(s.cached > 7 + BLOCK for s in engine.scheduler.running)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", ["off", "chain", "d2sd"])
def test_a_step_is_the_same_whatever_came_before(policy: str) -> None:
    """A prefill, many steps without a drafter, or few."""
    check_same(record(running(policy, GREEDY), 20))


@pytest.mark.parametrize("policy", ["d2sd", "hybrid"])
def test_shapes_depend_on_the_bucket_alone(policy: str) -> None:
    four, five, six = (record(running(policy, HOT, batch=batch), 1)[0] for batch in (4, 5, 6))
    assert five == six
    assert four != five


@pytest.mark.parametrize("policy", ["chain", "hybrid"])
def test_calibrated_steps_are_the_same_too(policy: str) -> None:
    neutral = Calibration(torch.ones(2, 6, BLOCK - 1, 2), torch.zeros(2, 6, BLOCK - 1, 2))
    plain, *_ = record(running(policy, GREEDY, HOT), 1)
    steps = record(running(policy, GREEDY, HOT, calibration=neutral), 3)
    assert len(steps[0]) > len(plain)
    check_same(steps)


def test_padding_of_a_batch_owns_nothing() -> None:
    engine = running("d2sd", HOT, GREEDY)
    batch = engine.prepare(engine.admit()).batch
    assert batch.active.tolist() == [True] * 5 + [False]
    assert batch.where.pages[5].tolist() == [0] * batch.where.pages.shape[1]
    assert int(batch.where.context_len[5]) == 0


def test_a_prefill_computes_its_prompts_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """All chunks of a step in one pass, whose rows are their tokens, up to the budget."""
    runner = honest()
    passes: list[tuple[int, ...]] = []
    forward = runner.target.forward

    def noted(tokens: Tensor, rows: Rows | Chunks, *others: Any) -> DecoderOutput:
        if isinstance(rows, Chunks):
            assert tokens.shape == rows.positions.shape == (1, sum(rows.attn_mask.lengths))
            passes.append(rows.attn_mask.lengths)
        return forward(tokens, rows, *others)

    monkeypatch.setattr(runner.target, "forward", noted)
    engine = make_engine(runner, "off", max_batch=4, prefill_chunk=16, prefix_cache=False)
    engine.generate(Request((1,) * n, 1) for n in (4, 5, 6, 12))
    assert passes == [(3, 4, 5, 4), (7,)]
