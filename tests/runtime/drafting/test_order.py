"""On a GPU rows wait for their drafter in stretches between two drops of pages: each is written at once, in order.

Within a stretch no place of a page is written twice, so the order of rows does not matter; behind a drop it may be.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.kv_pool import CommittedRows, ContextRows, KVPool, PoolSizes
from d2sd.policies import DrafterRole
from d2sd.runtime.drafting.context import DrafterContext
from tests.runtime.cuda_graphs.test_steps import NARROW, knowing, served, some
from tests.runtime.helpers import GREEDY, make_engine
from tests.runtime.recorded_graphs import RecordedGraphs
from tests.tiny import tiny_decoder, tiny_drafter

ROLE = next(iter(DrafterRole))


class Noted(KVPool):
    """Pages that note the numbers of the rows of every write."""

    writes: list[list[int]]

    def write_rows(self, k: Tensor, v: Tensor, pages: Sequence[Tensor], positions: Tensor) -> None:
        self.writes.append(k[0, :, 0, 0].long().tolist())


class Counting:
    """A drafter whose keys are the features."""

    def __init__(self) -> None:
        body = replace(tiny_decoder().config.body, hidden_size=1, num_layers=1)
        self.config = replace(tiny_drafter(tiny_decoder().config).config, body=body, target_layer_ids=(0,))

    def context_keys_values(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        keys = features[None, :, :, None]
        return keys, keys


def context() -> tuple[DrafterContext, Noted]:
    pool = Noted(tiny_decoder().config.body, PoolSizes(8, 4), torch.float32, "cpu")
    pool.writes = []
    made = DrafterContext({ROLE: cast("Drafter", Counting())}, {ROLE: pool}, torch.float32)
    made._on_cpu = False
    return made, pool


def step(*numbers: int, width: int = 2) -> CommittedRows:
    """A row of each of so many requests."""
    features = torch.tensor(numbers).float().view(-1, 1, 1)
    table, places = torch.ones(len(numbers), width, dtype=torch.long), torch.zeros(len(numbers), 1, dtype=torch.long)
    return CommittedRows(features, (table,), places, torch.ones(len(numbers), 1, dtype=torch.bool), 4)


def chunk(*numbers: int) -> ContextRows:
    places = torch.ones(len(numbers), dtype=torch.long)
    return ContextRows(torch.tensor(numbers).float()[:, None], places, (places,))


def test_steps_and_chunks_between_two_drops_are_one_write() -> None:
    made, pool = context()
    for rows in (chunk(1, 2), step(3, 4), step(5), step(6, 7, width=3), chunk(8)):
        made.add(rows)
    made.drop([], [])  # of nothing
    made.inject([ROLE])
    assert pool.writes == [[1, 2, 3, 4, 5, 6, 7, 8]]


@pytest.mark.parametrize("dropped", [([5], []), ([], [5])])
def test_rows_behind_a_drop_are_written_behind_those_in_front(dropped: tuple[list[int], list[int]]) -> None:
    made, pool = context()
    made.add(step(1))
    made.drop(*dropped)
    made.add(step(2))
    made.add(step(3))
    made.drop(*dropped)
    made.add(chunk(4))
    made.inject([ROLE])
    assert pool.writes == [[1], [2, 3], [4]]


def test_rows_that_a_graph_left_are_of_the_drops_before_it() -> None:
    made, pool = context()
    made.reserve(1, 2, 1)
    made.add(step(1))
    with made.replay(1, 1, ()):  # of no drafter
        assert made._memory is not None
        made._memory.features.fill_(2)
        made._memory.keep.fill_(True)
    made.drop([5])
    made.add(step(3))
    made.inject([ROLE])
    assert pool.writes == [[1, 2], [3]]


def test_no_place_is_written_twice_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafters that wait, requests that join and leave, prefix hits and preemption, in few pages."""
    monkeypatch.setattr("d2sd.plugins.cpu.library.available", lambda: False)
    requests = some(5, GREEDY, NARROW, length=10)
    engine = RecordedGraphs(rerun=True).guard(make_engine(knowing(requests), "d2sd", max_batch=2, pages=8))
    engine.runner.context._on_cpu = False
    written = list[int]()
    for pool in engine.runner.pools[1:]:
        write = pool.write_rows

        def noted(k: Tensor, v: Tensor, pages: Sequence[Tensor], positions: Tensor, *, write: Any = write) -> None:
            numbers = pages[0].tolist()
            places = [place for place in zip(numbers, (positions % 4).tolist(), strict=True) if place[0]]
            assert len(set(places)) == len(places)
            written.append(len(places))
            write(k, v, pages, positions)

        pool.write_rows = noted  # type: ignore[method-assign]
    served(engine, requests, ("chain", "d2sd", "off"), random.Random(3))
    assert max(written) > 12, "several steps at once"
    assert engine.stats.preemptions > 0
