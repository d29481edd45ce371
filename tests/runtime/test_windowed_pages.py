"""Pages behind the window of a layer are freed and used again, and nothing that is written or drafted changes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pytest
import torch
from torch import Tensor

from d2sd.modeling.drafters.dflash import Drafter
from d2sd.runtime.backends.exported import GraphDrafter
from d2sd.runtime.drafting.window import Window
from d2sd.runtime.engine import Engine
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import Request
from d2sd.runtime.sequence import Sequence
from tests.choosing import chosen
from tests.runtime.cheating import CheatingRunner
from tests.runtime.helpers import (
    BLOCK,
    WINDOWS,
    OneTable,
    all_pages,
    copies,
    expected,
    free_pages,
    make_engine,
    placed,
    run_staggered,
    some_requests,
    texts_of,
)
from tests.runtime.nan_pages import NaNPages
from tests.tiny import CASES, FLEX_CASES, greedy_text, prepared, runner_of, tiny_decoder, tiny_drafter

POLICIES = ("off", "chain", "hybrid", "flex_tree", "flex_parallel")
SLOW = pytest.mark.slow


def windows_of(windows: str, policy: str) -> list[int]:
    """Those of all layers that the policy places: FlexDraft's drafter has none."""
    models = WINDOWS[windows][:1] if policy in FLEX_CASES else WINDOWS[windows]
    return [window for one in models for window in one if window is not None]


def kinds(policy: str) -> list[str]:
    return [kind for kind in WINDOWS if windows_of(kind, policy)]


def windowed_pages(sequence: Sequence) -> int:
    """Pages that it has of layers with a window."""
    return sum(page > 0 for page in sequence.windowed_pages)


def watched(engine: Engine, window: int) -> Engine:
    """The engine; after every step no request has more pages than it may, and those that the next row sees."""
    most = engine.limits.pages_within(window, BLOCK)
    step, size = engine.step, engine.limits.page_size

    def checked() -> list:  # type: ignore[type-arg]
        outputs = step()
        for one in engine.scheduler.running:
            assert windowed_pages(one) <= most
            seen = range(max(0, one.cached - window + 1) // size, -(-one.cached // size))
            assert all(one.windowed_pages[page] for page in seen)
        return outputs

    engine.step = checked  # type: ignore[method-assign]
    return engine


def cheating(windows: str, case: str, kind: type[CheatingRunner] = CheatingRunner) -> CheatingRunner:
    return kind(*placed(case, windows), texts_of(some_requests(), windows))


def marks(policy: str, windows: str, pages: int | None) -> list[pytest.MarkDecorator]:
    """Of all policies two cases are slow tests, the rest run in full alone, but for `SAMPLED`."""
    if (windows, policy, pages) in SAMPLED:
        return []
    slow = (windows, pages) in chosen(policy, product(kinds(policy), ROOMS), 2)
    return [SLOW] if slow else [SLOW, pytest.mark.full]


#: Of some policies one case, at every change; 17 pages hold hardly more than one request.
ROOMS = (None, 17)
SAMPLED = {
    (kind, policy, pages) for policy in POLICIES for kind, pages in chosen(policy, product(kinds(policy), ROOMS))
} | {("all", "off", 17), ("mixed", "hybrid", 17)}


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("windows", "policy", "pages"),
    [
        pytest.param(kind, policy, pages, marks=marks(policy, kind, pages))
        for policy in CASES
        for kind, pages in product(kinds(policy), ROOMS)
    ],
)
def test_the_text_is_that_of_plain_decoding(windows: str, policy: str, pages: int | None) -> None:
    """All pages hold NaN until they are written, and again when they are freed; also where requests are preempted."""
    requests = some_requests()
    engine = make_engine(cheating(windows, policy, NaNPages), policy, max_batch=8, pages=pages, prefill_chunk=5)
    sequences = run_staggered(watched(engine, max(windows_of(windows, policy))), requests, gap=1)
    assert [s.answer for s in sequences] == [expected(r, windows) for r in requests]
    assert free_pages(engine) == all_pages(engine)
    assert (sum(s.stats.preemptions for s in sequences) > 0) == (pages is not None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "windows", ["mixed drafters", *(pytest.param(name, marks=SLOW) for name in ("drafters", "mixed"))]
)
@pytest.mark.parametrize("cut", [None, Window(1, 1)])
def test_the_drafts_are_those_of_pages_that_are_kept(windows: str, cut: Window | None) -> None:
    """Step by step, all log-probabilities of both drafters; also where a recipe leaves out most of the context."""
    said = []
    for kind in (ModelRunner, OneTable):
        runner = kind(*prepared(*copies(windows)[:3]))
        engine = make_engine(runner, "d2sd", max_batch=10, prefill_chunk=7, prefix_cache=False)
        runner.window, engine.record_trace = cut, True
        sequences = [engine.submit(request) for request in some_requests()[3:7]]
        found = []
        while engine.busy:
            engine.step()
            if engine.trace is not None and engine.trace.first is not None:
                assert engine.trace.branches is not None
                found.append((engine.trace.first.logprob.exp(), engine.trace.branches.prefix_len))
        assert [s.answer for s in sequences] == [expected(s.request, windows) for s in sequences]
        said.append(found)
        freed = kind is ModelRunner
        assert (engine.memory.windowed_pages > 0) == freed
    assert len(said[0]) == len(said[1]) > 10
    for (logprob, prefixes), (other, others) in zip(*said, strict=True):
        torch.testing.assert_close(logprob, other, atol=1e-5, rtol=1e-5)
        assert torch.equal(prefixes, others)


class Noting:
    """A graph that notes the page tables of its passes."""

    def __init__(self, drafter: Drafter) -> None:
        self.body, self.tables = drafter.config.body, list[Tensor]()

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if inputs["feature_len"].numel() == 1:  # of a draft
            self.tables.append(inputs["page_table"])
        batch, rows, hidden = inputs["embedded"].shape
        made = torch.zeros(self.body.num_layers, batch, inputs["features"].shape[1], 2, self.body.head_dim)
        return {"hidden": torch.zeros(batch, rows, hidden), "k": made, "v": made}


@pytest.mark.parametrize(("windows", "freed"), [((6, 6), True), ((6, None), False)])
def test_a_graph_has_one_page_table(windows: tuple[int | None, ...], freed: bool) -> None:
    """That of layers with windows, if all of its layers have one; else all its pages are kept."""
    target = tiny_decoder("qwen3", layers=2, head_dim=16)
    drafter = tiny_drafter(target.config, block_size=BLOCK, attention={"windows": windows})
    graph = Noting(drafter)
    runner = runner_of(target, GraphDrafter(drafter, graph, 4))
    engine = make_engine(runner, "chain", max_batch=1)
    (sequence,) = engine.generate([Request((3, 1, 2) * 5, 20)])
    assert sequence.answer == greedy_text(tiny_decoder("qwen3", layers=2, head_dim=16), [3, 1, 2] * 5, 20)
    assert runner.longest_window == (6 if freed else None)
    tables = [table for table in graph.tables if table.any()]
    assert len(tables) > 3
    assert all(bool(table[0, 0]) != freed for table in tables[1:])
