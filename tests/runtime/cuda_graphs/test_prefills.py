"""Captured passes over prompts leave the pages, the context of drafters and the text of passes operator by operator."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch

from d2sd.errors import D2SDError
from d2sd.modeling.where import Where
from d2sd.plugins.cascade_attention import ChunkMask, cascade_attention
from d2sd.plugins.cascade_attention.arguments import PagedContext
from d2sd.policies import PolicyName
from d2sd.runtime.batch import PrefillInputs
from d2sd.runtime.cuda_graphs.prefills import MOST_ROWS, row_counts
from d2sd.runtime.engine import Engine
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import Limits, Request
from d2sd.runtime.sampling_params import SamplingParams
from tests.runtime.helpers import GREEDY, HYBRID, all_pages, check_pages, expected, free_pages, honest, make_engine
from tests.runtime.recorded_graphs import RecordedGraphs

pytestmark = pytest.mark.usefixtures("layers_of_pytorch")


def captured(windows: str, policy: PolicyName, **settings: int) -> tuple[Engine, RecordedGraphs, list[int]]:
    """An engine, its graphs, and a list of the rows of each pass that has none."""
    graphs, eager = RecordedGraphs(), list[int]()
    engine = graphs.guard(make_engine(honest(windows), policy, **settings), prefills=True)  # type: ignore[arg-type]
    prefill = engine.runner.prefill

    def noted(tokens: torch.Tensor, *rest: Any) -> Any:
        eager.append(len(tokens))
        return prefill(tokens, *rest)

    engine.runner.prefill = noted  # type: ignore[assignment, method-assign]
    return engine, graphs, eager


def asked(count: int) -> list[Request]:
    """Prompts of 1 to 40 tokens, some of which begin as the one before."""
    dice, found = random.Random(4), list[Request]()
    for index in range(count):
        prompt = tuple(dice.randrange(64) for _ in range(dice.randrange(1, 40)))
        if index % 3 == 2:
            prompt = found[-1].prompt + prompt[:5]
        found.append(Request(prompt, dice.randrange(2, 7), SamplingParams(index % 2, seed=index + 1)))
    return found


@pytest.mark.parametrize(
    ("windows", "policy", "chunk"),
    [
        ("none", "hybrid", 50),
        ("mixed", "d2sd", 20),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("all", "hybrid", 20), ("mixed target", "off", 50))),
    ],
)
def test_answers_are_those_of_plain_decoding(windows: str, policy: PolicyName, chunk: int) -> None:
    """Several chunks a pass, prompts in several chunks, prefix hits; memory is overwritten between steps."""
    engine, graphs, eager = captured(windows, policy, max_batch=3, prefill_chunk=chunk)
    before, requests = len(graphs.graphs), asked(9)
    assert before == len(row_counts(chunk))
    assert [s.answer for s in engine.generate(requests)] == [expected(r, windows) for r in requests]
    assert not eager, "every pass fits in a graph"
    assert sum(graph.replays > 0 for graph in graphs.graphs[:before]) >= min(3, before), "passes of several sizes"
    assert engine.stats.prefix_hit_tokens > 0
    assert free_pages(engine) == all_pages(engine)


def test_all_pages_hold_what_one_pass_gives() -> None:
    """Drafters wait for three chunks of a prompt, between which memory is overwritten."""
    engine, _, eager = captured("none", "d2sd", max_batch=2, prefill_chunk=12)
    sequence = engine.submit(Request(tuple(range(3, 33)), 6, GREEDY))
    while sequence.cached < 30:
        engine.step()
    check_pages(engine.runner, torch.tensor(sequence.pages), sequence.tokens[: sequence.cached])
    assert not eager


def test_prompts_are_reported_as_without_graphs() -> None:
    request = Request(tuple(range(3, 31)), 4, SamplingParams(prompt_logprobs=2))
    engine, *_, eager = captured("none", "chain", max_batch=2, prefill_chunk=12)
    (found,) = engine.generate([request])
    (plain,) = make_engine(honest("none"), "chain", max_batch=2, prefill_chunk=12).generate([request])
    assert not eager
    assert found.prompt_logprobs
    for mine, other in zip(found.prompt_logprobs, plain.prompt_logprobs, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            assert (mine.token, mine.rank) == (other.token, other.rank)
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_passes_of_more_chunks_than_a_graph_has_run_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d2sd.runtime.cuda_graphs.prefills.MOST_CHUNKS", 2)
    engine, _, eager = captured("none", "off", max_batch=4, prefill_chunk=30)
    requests = [Request((5, 6, 7 + index), 3, GREEDY) for index in range(4)]
    assert [s.answer for s in engine.generate(requests)] == [expected(r) for r in requests]
    assert eager == [8]


@pytest.mark.parametrize("kind", ["hybrid", "exact", "ranks"])
def test_what_the_chunks_decide_has_no_graph(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = honest(HYBRID if kind == "hybrid" else "none")
    if kind == "ranks":
        runner.__class__ = type("Leading", (ModelRunner,), {"prefill": lambda *_: None})
    engine = RecordedGraphs().guard(make_engine(runner, "off", max_batch=2))
    if kind == "exact":
        runner.target.register_module("compiled", torch.nn.Module())
        monkeypatch.setattr(torch.nn.Module, "exact", True, raising=False)
    assert not engine.steps.prefills.warm_ups()
    plain = RecordedGraphs().guard(make_engine(honest("none"), "off", max_batch=2))
    assert len(plain.steps.prefills.warm_ups()) == 1


def test_a_pass_that_cuda_refuses_runs_without_a_graph(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(self: RecordedGraphs, run: Any) -> Any:
        raise RuntimeError("operation not permitted")

    monkeypatch.setattr(RecordedGraphs, "__call__", refuses)
    monkeypatch.delenv("D2SD_NO_FALLBACK", raising=False)
    engine, *_ = captured("none", "off", max_batch=1, prefill_chunk=16)
    assert "passes over prompts run without CUDA graphs: RuntimeError: operation not permitted" in caplog.text
    assert not engine.steps.prefills._graphs
    monkeypatch.setenv("D2SD_NO_FALLBACK", "1")
    with pytest.raises(D2SDError, match="passes over prompts cannot be captured"):
        captured("none", "off", max_batch=1, prefill_chunk=16)


@pytest.mark.parametrize("forbidden", ["0", "1"])
def test_a_graph_that_memory_does_not_hold_is_a_warning(
    forbidden: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the end of the capture raises; smaller graphs are there, and the steps' as well."""
    capture, tried = RecordedGraphs.__call__, list[int]()

    def refuses(self: RecordedGraphs, run: Any) -> Any:
        tried.append(1)
        if len(tried) == 1:  # the largest comes first
            try:
                raise torch.OutOfMemoryError("CUDA out of memory")
            finally:
                raise RuntimeError("the capture was invalidated")  # as the end of a CUDA graph does
        return capture(self, run)

    monkeypatch.setattr(RecordedGraphs, "__call__", refuses)
    monkeypatch.setenv("D2SD_NO_FALLBACK", forbidden)
    engine, *_, eager = captured("none", "off", max_batch=1, prefill_chunk=40)
    assert "passes over 40 rows of prompts run without a CUDA graph" in caplog.text
    assert "CUDA out of memory" in caplog.text
    assert list(engine.steps.prefills._graphs) == [16, 32]
    request = Request(tuple(range(3, 41)), 4, GREEDY)
    assert [s.answer for s in engine.generate([request])] == [expected(request)]
    assert eager == [37], "the last token is the anchor"


@pytest.mark.parametrize("most", [1, 16, 17, 100, 512, MOST_ROWS, 5000])
def test_a_fifth_of_the_rows_at_most_are_padding(most: int) -> None:
    found = row_counts(most)
    assert found == sorted(set(found))
    assert found[-1] == min(most, MOST_ROWS)
    assert all(large - small <= max(16, 0.25 * small) for small, large in pairwise(found))
    assert len(found) <= 20


@pytest.mark.parametrize("window", [None, 4])
def test_chunks_that_only_the_device_knows_are_the_same(window: int | None) -> None:
    """Empty ones among them, of whose contexts no row is."""
    draw = torch.Generator().manual_seed(1)
    lengths, contexts = (3, 0, 6, 2, 0), (5, 9, 0, 4, 0)
    q, k, v = (torch.randn(1, 11, heads, 8, generator=draw) for heads in (4, 2, 2))
    pages = [torch.randn(9, 3, 2, 8, generator=draw) for _ in range(2)]
    table = torch.randint(1, 9, (5, 4), generator=draw)
    context = PagedContext(pages[0], pages[1], table, torch.tensor(contexts))
    starts = torch.tensor([0, 3, 3, 9, 11, 11])
    first = None
    if window is not None:
        ends = torch.tensor(contexts).repeat_interleave(starts.diff()) + torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 5, 0, 1])
        first = (ends - (window - 1)).clamp(min=0)
    known = torch.tensor([0, 2, 3])
    real = PagedContext(pages[0], pages[1], table[known], torch.tensor(contexts)[known])
    chunks = ChunkMask((3, 6, 2), torch.tensor([0, 3, 9, 11]), first, window)
    expected_rows = cascade_attention.reference(q, k, v, real, chunks)
    found = cascade_attention.reference(q, k, v, context, ChunkMask((11,), starts, first, window))
    assert not ChunkMask((11,), starts).known
    assert torch.allclose(found, expected_rows, atol=1e-6)
    assert sum(lengths) == 11


def test_inputs_name_no_page_for_what_is_left_over() -> None:
    engine, *_ = captured("none", "off", max_batch=2, prefill_chunk=30)
    limits: Limits = engine.limits
    inputs = PrefillInputs(torch.arange(20), [7, 13], Where(torch.tensor([[1, 2], [3, 4]]), torch.tensor([0, 1])))
    tokens, chunks = engine.steps.prefills._host_inputs(inputs, 30)
    positions, (pages, _), table = chunks.positions, chunks.pages, chunks.where.pages
    assert chunks.attn_mask.starts.tolist() == [0, 7, 20, 30]
    assert tokens[20:].tolist() == pages[20:].tolist() == [0] * 10
    assert positions[0].tolist() == [*range(7), *range(1, 14), *range(10)]
    assert table.shape == (3, engine.steps.prefills._pages)
    assert chunks.where.context_len.tolist() == [0, 1, 0]
    assert limits.prefill_chunk == 30
