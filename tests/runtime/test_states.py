"""Slots of recurrent state without a model: which tokens the state in a slot is of, and which prefixes are known by it.

Pages have 4 tokens. `Pools` checks at each step that the state of every request is of the tokens before its next one.
"""

from __future__ import annotations

import random

import pytest

from d2sd.runtime.kv_cache import KVCacheManager
from d2sd.runtime.request import Limits
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.scheduler import Schedule, Scheduler
from tests.runtime.played_pools import BLOCK, Pools, add, keys_of

SIZE = 4


def made(
    max_batch: int = 8,
    chunk: int = 16,
    snapshots: int = 8,
    pages: int = 200,
    prefix_cache: bool = True,
    window: int | None = None,
) -> tuple[Scheduler, Pools]:
    limits = Limits(max_batch, 200, SIZE, chunk, None, prefix_cache)
    scheduler = Scheduler(limits, KVCacheManager(limits, BLOCK, 1 + pages, 200, window, 1 + max_batch + snapshots))
    return scheduler, Pools(scheduler, SIZE)


def chunks_of(scheduler: Scheduler, pools: Pools) -> list[list[tuple[int, int]]]:
    """Step until the scheduler is idle; (request, tokens) of the chunks of each step that computes any."""
    dice, computed, schedule = random.Random(0), [], scheduler.schedule

    def recorded() -> Schedule:
        found = schedule()
        computed.append([(one.id, count) for one, count in found.prefill])
        return found

    scheduler.schedule = recorded  # type: ignore[method-assign]
    while scheduler.running or scheduler.waiting:
        pools.step(dice)
        pools.check_slots()
    scheduler.schedule = schedule  # type: ignore[method-assign]
    return [step for step in computed if step]


def prompt(common: int, own: int, number: int) -> list[int]:
    """`common` tokens that all prompts begin with, and `own` others."""
    return [*range(common), *range(1000 * (number + 1), 1000 * (number + 1) + own)]


def test_a_prompt_stops_at_its_last_full_page_and_the_same_one_goes_on_from_there() -> None:
    scheduler, pools = made()
    add(scheduler, 0, prompt(15, 0, 0))  # 14 tokens and the anchor
    assert chunks_of(scheduler, pools) == [[(0, 12)], [(0, 2)]]
    assert scheduler.kv_cache.states.cached == 1
    again = add(scheduler, 1, prompt(15, 0, 0))
    assert chunks_of(scheduler, pools) == [[(1, 2)]]
    assert again.stats.cached_tokens == 12


def test_a_prompt_of_full_pages_is_computed_in_one_chunk() -> None:
    scheduler, pools = made()
    add(scheduler, 0, prompt(13, 0, 0))
    assert chunks_of(scheduler, pools) == [[(0, 12)]]
    add(scheduler, 1, prompt(13, 0, 0))
    assert chunks_of(scheduler, pools) == []


def test_copies_are_listed_around_the_chunks_that_need_them() -> None:
    scheduler, _ = made()
    one = add(scheduler, 0, prompt(15, 0, 0))
    schedule = scheduler.schedule()
    ((source, snapshot),) = schedule.snapshots
    assert (schedule.restored, source) == ([(0, one.state_id)], one.state_id)
    one.cached += 12
    schedule = scheduler.schedule()
    assert (schedule.restored, schedule.snapshots) == ([], [])
    other = add(scheduler, 1, prompt(15, 0, 0))
    schedule = scheduler.schedule()
    assert (schedule.restored, schedule.snapshots) == ([(snapshot, other.state_id)], [])
    assert len({0, one.state_id, other.state_id, snapshot}) == 4


def test_chunks_of_a_long_prompt_end_at_full_pages() -> None:
    scheduler, pools = made(chunk=10)
    add(scheduler, 0, prompt(31, 0, 0))
    assert chunks_of(scheduler, pools) == [[(0, 8)], [(0, 8)], [(0, 8)], [(0, 4)], [(0, 2)]]
    assert scheduler.kv_cache.states.cached == 4
    scheduler, pools = made(chunk=3)  # shorter than a page
    add(scheduler, 0, prompt(11, 0, 0))
    assert chunks_of(scheduler, pools) == [[(0, 3)], [(0, 1)], [(0, 3)], [(0, 1)], [(0, 2)]]


@pytest.mark.parametrize("case", ["no prefix cache", "prompt logprobs", "no slots"])
def test_nothing_is_cut_where_no_snapshot_is_taken(case: str) -> None:
    scheduler, pools = made(max_batch=1, snapshots=0 if case == "no slots" else 8, prefix_cache=case[3] != "p")
    asked = SamplingParams(prompt_logprobs=0) if case == "prompt logprobs" else SamplingParams()
    add(scheduler, 0, prompt(15, 0, 0), sampling=asked)
    assert chunks_of(scheduler, pools) == [[(0, 14)]]
    assert scheduler.kv_cache.states.cached == 0


def test_a_prefix_is_known_as_far_as_there_is_a_snapshot() -> None:
    scheduler, pools = made(chunk=8)
    tokens = prompt(23, 0, 0)
    add(scheduler, 0, tokens)
    chunks_of(scheduler, pools)  # snapshots behind 2, 4 and 5 pages
    pool, keys = scheduler.kv_cache.states._pool, keys_of(tokens)
    for lost, known in ((None, 5), (5, 4), (4, 2), (2, 0)):
        if lost is not None:
            (slot,) = pool.cache.match(keys[lost - 1 : lost])
            pool.cache.idle.move_to_end(slot, last=False)
            pool.give_back(pool.take(1 + len(pool._free)) or ())
        again = add(scheduler, 1, tokens)
        assert scheduler.kv_cache._known(scheduler.kv_cache.prefix_keys(again)) == known
        scheduler.remove(again)
    assert len(scheduler.kv_cache.pages.cache.match(keys)) == 5, "its pages are cached all the while"


def test_a_prefix_needs_its_window_and_a_snapshot_at_one_place() -> None:
    """Behind 5 and 2 pages there are snapshots; the pages of the window behind 5 are lost, those behind 2 are not."""
    scheduler, pools = made(chunk=8, window=5)
    tokens = prompt(23, 0, 0)
    add(scheduler, 0, tokens, 1)
    chunks_of(scheduler, pools)
    keys, group = keys_of(tokens), scheduler.kv_cache.groups[1]
    (slot,) = scheduler.kv_cache.states._pool.cache.match(keys[3:4])
    scheduler.kv_cache.states._pool.cache.idle.move_to_end(slot, last=False)
    scheduler.kv_cache.states._pool.cache.evict()
    (page,) = group.pages.cache.match(keys[4:5])
    group.pages.cache.idle.move_to_end(page, last=False)
    group.pages.cache.evict()
    again = add(scheduler, 1, tokens)
    assert scheduler.kv_cache._known(scheduler.kv_cache.prefix_keys(again)) == 2


@pytest.mark.parametrize("chunk", [4, 8, 12, 64, 999])
def test_requests_that_arrive_together_compute_their_prefix_once(chunk: int) -> None:
    """5 common pages and 6 own tokens each."""
    scheduler, pools = made(chunk=chunk, snapshots=40)
    for number in range(8):
        add(scheduler, number, prompt(20, 6, number))
    chunks_of(scheduler, pools)
    stats = scheduler.stats("off")
    assert stats.prefill_tokens == 20 + 8 * 5
    assert stats.prefix_hit_tokens == 7 * 20


def test_nobody_waits_for_a_prefix_whose_state_is_not_kept() -> None:
    """There are no slots but theirs: both compute the same at once."""
    scheduler, pools = made(max_batch=2, snapshots=0, chunk=100)
    for number in range(2):
        add(scheduler, number, prompt(20, 6, number))
    assert chunks_of(scheduler, pools) == [[(0, 25), (1, 25)]]


def test_a_prompt_does_not_stop_where_its_state_is_kept() -> None:
    """Pages of the prompt are lost, and its snapshots are not."""
    scheduler, pools = made()
    add(scheduler, 0, prompt(15, 0, 0), 1)
    chunks_of(scheduler, pools)
    scheduler.kv_cache.pages.give_back(scheduler.kv_cache.pages.take(scheduler.kv_cache.pages.free) or [])
    add(scheduler, 1, prompt(15, 0, 0), 1)
    assert chunks_of(scheduler, pools) == [[(1, 14)]]
    add(scheduler, 2, prompt(15, 0, 0), 1)
    assert chunks_of(scheduler, pools) == [[(2, 2)]]


def test_a_step_writes_no_more_snapshots_than_there_are_slots() -> None:
    """One of two prompts is cut at its last full page, and its snapshot stays until the next step."""
    scheduler, pools = made(max_batch=2, snapshots=1, chunk=99)
    for number in range(2):
        add(scheduler, number, prompt(0, 7, number), 1)
    assert chunks_of(scheduler, pools) == [[(0, 4), (1, 6)], [(0, 2)]]


def test_where_a_later_prompt_parts_from_cached_text_is_kept_for_the_next_one() -> None:
    scheduler, pools = made(chunk=999)
    for number, computed in enumerate(([24, 1], [20, 4, 1], [4, 1], [4, 1])):
        add(scheduler, number, prompt(20, 6, number), 1)
        assert chunks_of(scheduler, pools) == [[(number, count)] for count in computed]


def test_the_end_of_an_answer_is_no_place_where_prompts_part() -> None:
    """The next turn goes on from the state behind the prompt before, and is cut at its own last page alone."""
    scheduler, pools = made(chunk=999)
    first = add(scheduler, 0, prompt(15, 0, 0), 20)
    chunks_of(scheduler, pools)
    second = add(scheduler, 1, [*first.tokens, *range(50, 60)])  # 45 tokens
    assert chunks_of(scheduler, pools) == [[(1, 32)]]
    assert second.stats.cached_tokens == 12


def test_running_requests_take_the_slots_of_snapshots_least_recently_used_first() -> None:
    scheduler, pools = made(max_batch=4, snapshots=0)
    for number in range(3):
        add(scheduler, number, prompt(0, 7, number), 1)
        chunks_of(scheduler, pools)
    assert scheduler.kv_cache.states.cached == 3
    add(scheduler, 3, prompt(0, 7, 0), 1)  # found again: now used last
    chunks_of(scheduler, pools)
    for number in range(10, 13):
        add(scheduler, number, [7], 1)
    scheduler.schedule()
    held = [scheduler.kv_cache.states._pool.cache.holds(keys_of(prompt(0, 7, number))[0]) for number in range(3)]
    assert (scheduler.kv_cache.states.used, held) == (3, [True, False, False])


def test_the_snapshot_in_the_last_slot_becomes_the_requests_own() -> None:
    scheduler, pools = made(max_batch=2, snapshots=0)
    add(scheduler, 0, prompt(0, 7, 0), 1)
    chunks_of(scheduler, pools)
    (snapshot,) = scheduler.kv_cache.states._pool.cache.idle
    add(scheduler, 1, [7], 8)
    pools.step(random.Random(0))
    again = add(scheduler, 2, prompt(0, 7, 0), 1)
    schedule = scheduler.schedule()
    assert (again.state_id, again.cached, schedule.restored) == (snapshot, 4, [])
    assert pools.states[again.state_id] == tuple(again.tokens[:4])
    assert scheduler.kv_cache.states.cached == 0


def test_a_slot_that_changes_hands_within_a_schedule_is_written_once() -> None:
    """The second of client a gives way to b before its first copy is made."""
    scheduler, _ = made(max_batch=2, snapshots=0)
    for number, client in enumerate("aab"):
        add(scheduler, number, prompt(0, 7, number), client=client)
    scheduler.waiting.sort(key=lambda one: one.id)
    schedule = scheduler.schedule()
    assert [one.id for one in scheduler.running] == [0, 2]
    assert sorted(schedule.restored) == sorted((0, one.state_id) for one in scheduler.running)
    assert not scheduler.waiting[0].state_id


def test_dense_targets_have_no_slots() -> None:
    limits = Limits(2, 64, SIZE, 16)
    scheduler = Scheduler(limits, KVCacheManager(limits, BLOCK, 50))
    one = add(scheduler, 0, prompt(15, 0, 0))
    schedule = scheduler.schedule()
    assert (schedule.restored, schedule.snapshots, one.state_id) == ([], [], 0)
    assert [count for _, count in schedule.prefill] == [14]
    stats = scheduler.stats("off")
    assert (stats.slots_total, stats.slots_used, stats.slots_cached) == (0, 0, 0)
