"""From `limits.kv_memory` to pages, and engines whose pages do not hold all requests at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from d2sd.errors import RecipeError
from d2sd.modeling.kv_pool import PoolSizes
from d2sd.recipe import Recipe
from d2sd.runtime import memory as module
from d2sd.runtime.engine import Engine
from d2sd.runtime.memory import KVMemory, PoolBytes, WindowedLayers, free_memory, plan_kv_memory
from d2sd.runtime.request import Limits
from d2sd.runtime.speculation.policy import make_policy
from tests.runtime.helpers import BLOCK, BRANCHES, all_pages, cheater, honest, some_requests

# 3 requests of 21 + 4 tokens in pages of 4: 7 pages each.
FULL, PAGE_BYTES = 21, 1000


def planned(kv_memory: float | int | None, free: int | None = None) -> KVMemory:
    return plan_kv_memory(Limits(3, 21, 4, 8, kv_memory), 4, PoolBytes(PAGE_BYTES), free)


def test_needs_no_torch() -> None:
    modules = "d2sd.runtime.memory, d2sd.runtime.scheduler, d2sd.runtime.states, d2sd.policies"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("kv_memory", "share", "pages", "windowed"),
    [
        (None, 600, FULL, 3 * 6),
        (21 * 400 + 18 * 600 + 1000, 600, FULL, 18),
        (21 * 400 + 18 * 600 + 999, 600, FULL - 1, 18),
        (19 * 400 + 18 * 600 + 1000, 600, 19, 18),
        (15_000, 600, 14, 14),  # a request has no more of these than of the others
        (8_000, 600, 7, 7),
        (19_000, 1000, FULL, 18),  # all layers have a window: the others' pages hold nothing
        (18_999, 1000, 17, 17),
    ],
)
def test_pages_of_layers_with_a_window(kv_memory: int | None, share: int, pages: int, windowed: int) -> None:
    """A window of 5 tokens: 4 of them, a chunk of 8 and a step of 4 lie in 5 pages."""
    limits = Limits(3, 21, 4, 8, kv_memory)
    assert limits.pages_within(5, 4) == 5
    layers = WindowedLayers(9, share)  # a page more
    assert layers.pages(limits, 4) == 6
    found = plan_kv_memory(limits, 4, PoolBytes(PAGE_BYTES, layers))
    assert (found.pages, found.windowed_pages, found.windowed_pool_pages) == (pages, windowed, windowed + 1)
    assert found.total_bytes == (1 + pages) * (PAGE_BYTES - share) + (1 + windowed) * share
    assert kv_memory is None or found.total_bytes <= kv_memory


def test_windows_as_long_as_the_context_need_no_more_pages_than_it() -> None:
    limits = Limits(3, 21, 4, 8)
    assert WindowedLayers(10**6, 10).pages(limits, 4) == 7
    assert plan_kv_memory(limits, 4, PoolBytes(PAGE_BYTES, WindowedLayers(10**6, 10))).windowed_pages == FULL


@pytest.mark.parametrize(
    ("kv_memory", "free", "pages"),
    [
        (None, None, FULL),
        (None, 5000, FULL),  # nothing is asked for, so free memory does not count
        (22_000, None, FULL),
        (21_999, None, FULL - 1),
        (8_000, 10**9, 7),
        (10**9, None, FULL),  # never more than the requests can use
        (0.5, 20_000, 9),
        (1.0, 10_999, 9),
        (1.0, 10**9, FULL),
        (0.5, None, FULL),  # a plan does not know the device: an upper bound
    ],
)
def test_pages_of_a_budget(kv_memory: float | int | None, free: int | None, pages: int) -> None:
    found = planned(kv_memory, free)
    assert (found.full_pages, found.pages, found.pool_pages) == (FULL, pages, pages + 1)
    assert found.total_bytes == (pages + 1) * PAGE_BYTES
    if isinstance(kv_memory, int):
        assert found.total_bytes <= kv_memory


@pytest.mark.parametrize(("kv_memory", "free"), [(2_999, None), (1, None), (0.01, 10_000)])
def test_less_than_a_step_of_one_request_is_refused(kv_memory: float | int, free: int | None) -> None:
    """1 + 4 tokens are 2 pages, and the scratch page is a third."""
    assert planned(3_000).pages == 2
    with pytest.raises(RecipeError) as caught:
        planned(kv_memory, free)
    assert caught.value.where == "limits.kv_memory"
    assert "3,000 bytes" in str(caught.value)


@pytest.mark.parametrize(
    ("kv_memory", "prefix_cache", "pages", "slots"),
    [
        (None, True, FULL, 7),
        (None, False, FULL, 4),
        (10**9, True, FULL, 7),
        (10**9, False, FULL, 4),
        (4 * 700 + 3_000, True, 2, 4),  # a request's pages come before snapshots
        (4 * 700 + 3_699, True, 2, 4),
        (4 * 700 + 3_700, True, 2, 5),
        (4 * 700 + 5_599, True, 3, 5),  # a quarter of what is left holds one, and then two
        (4 * 700 + 5_600, True, 3, 6),
        (4 * 700 + 5_600, False, 4, 4),
    ],
)
def test_slots_of_states(kv_memory: int | None, prefix_cache: bool, pages: int, slots: int) -> None:
    """700 bytes a state: slot 0 and those of 3 requests first, then up to 3 snapshots in a quarter of what is left."""
    limits = Limits(3, 21, 4, 8, kv_memory, prefix_cache)
    found = plan_kv_memory(limits, 4, PoolBytes(PAGE_BYTES, state=700))
    assert (found.full_pages, found.pages, found.states) == (FULL, pages, slots)
    assert found.total_bytes == (1 + pages) * PAGE_BYTES + slots * 700
    assert kv_memory is None or found.total_bytes <= kv_memory


def test_states_that_leave_no_pages_for_a_request_are_refused() -> None:
    with pytest.raises(RecipeError) as caught:
        plan_kv_memory(Limits(3, 21, 4, 8, 5_799), 4, PoolBytes(PAGE_BYTES, state=700))
    assert caught.value.where == "limits.kv_memory"
    assert "at least 5,800 bytes, 2,800 of them for the states of 3 requests and slot 0" in str(caught.value)
    assert planned(5_799).states == 0


def test_free_memory_of_this_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert 2**20 < free_memory("cpu") < 2**50
    monkeypatch.setattr(module, "Path", lambda name: tmp_path / "meminfo")
    with pytest.raises(RecipeError, match="unknown"):
        free_memory("cpu")
    (tmp_path / "meminfo").write_text("MemTotal:       900 kB\nMemAvailable:     12 kB\nHugePages_Total:       0\n")
    assert free_memory("cpu") == 12 * 1024


# -- engines -----------------------------------------------------------------------------------------------------------


def recipe(kv_memory: Any) -> Recipe:
    drafters = {"first": {"path": "first"}, "second": {"path": "second"}}
    limits = {"max_batch": 4, "max_context": 64, "page_size": 4, "prefill_chunk": 16, "kv_memory": kv_memory}
    return Recipe.model_validate(
        {
            "d2sd": 1,
            "name": "tiny",
            "target": {"path": "target"},
            "drafters": drafters,
            "limits": limits,
            "sampling": {"max_new_tokens": 8},
        }
    )


def engine_of(kv_memory: Any) -> Engine:
    policy = make_policy("hybrid", block_size=BLOCK, branches=BRANCHES, row_budget=14)
    return Engine(cheater(some_requests()), policy, Limits.of(recipe(kv_memory).limits))


def test_pools_are_as_large_as_planned() -> None:
    engine = engine_of("100KiB")
    pools = engine.runner.pools
    assert sum(pool.k.nbytes + pool.v.nbytes for pool in pools) == engine.memory.total_bytes <= 100 * 1024
    assert engine.memory.total_bytes + engine.memory.page_bytes > 100 * 1024
    assert {pool.k.shape[1] for pool in pools} == {1 + all_pages(engine)}


def test_a_share_is_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d2sd.runtime.model_runner.free_memory", lambda device: 40 * honest_page_bytes())
    assert all_pages(engine_of(0.5)) == 19


def test_pools_that_no_device_holds_are_refused() -> None:
    runner = honest()
    with pytest.raises(RecipeError, match=r"limits\.kv_memory"):
        runner.allocate(PoolSizes(2**50, 16))


def honest_page_bytes() -> int:
    """A page has 4 tokens of 2 layers of the target and 1 of each drafter: K and V, 2 heads of 8 numbers of 4 bytes."""
    body = honest().target.config.body
    return 2 * (2 + 1 + 1) * 4 * body.num_kv_heads * body.head_dim * 4
