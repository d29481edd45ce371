"""Pages behind the window of a layer are freed and used again, and nothing that is written or drafted changes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from d2sd.modeling.drafters.dflash import Drafter
from d2sd.runtime.backends.exported import GraphDrafter
from d2sd.runtime.drafting.window import Window
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import Request
from tests.runtime.helpers import BLOCK, OneTable, copies, expected, make_engine, some_requests
from tests.tiny import greedy_text, prepared, runner_of, tiny_decoder, tiny_drafter


@pytest.mark.slow
@pytest.mark.parametrize(
    "windows", ["mixed drafters", *(pytest.param(name, marks=pytest.mark.slow) for name in ("drafters", "mixed"))]
)
@pytest.mark.parametrize("cut", [None, Window(1, 1)])
def test_the_drafts_are_those_of_pages_that_are_kept(windows: str, cut: Window | None) -> None:
    """Step by step, all log-probabilities of both drafters; also where a recipe leaves out most of the context."""
    said = []
    for kind in (ModelRunner, OneTable):
        runner = kind(*prepared(*copies(windows)[:3]))
        engine = make_engine(runner, "d2sd", max_batch=10, prefill_chunk=7, prefix_cache=False)
        runner.drafts.window, engine.record_trace = cut, True
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
    """The table is that of layers with windows, if all layers have one; else all pages are kept."""
    target = tiny_decoder("qwen3", layers=2, head_dim=16)
    drafter = tiny_drafter(target.config, block_size=BLOCK, attention={"windows": windows})
    graph = Noting(drafter)
    runner = runner_of(target, GraphDrafter(drafter, graph, 4))
    engine = make_engine(runner, "chain", max_batch=1)
    (sequence,) = engine.generate([Request((3, 1, 2) * 5, 20)])
    assert sequence.answer == greedy_text(tiny_decoder("qwen3", layers=2, head_dim=16), [3, 1, 2] * 5, 20)
    windowed = runner.layout.bytes_of(4).windowed
    assert (windowed and windowed.window) == (6 if freed else None)
    tables = [table for table in graph.tables if table.any()]
    assert len(tables) > 3
    assert all(bool(table[0, 0]) != freed for table in tables[1:])
