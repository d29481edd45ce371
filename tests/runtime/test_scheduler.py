"""Queues and pages without a model: steps are played by committing random lengths."""

from __future__ import annotations

import random

import pytest

from d2sd.errors import RequestError
from d2sd.runtime.kv_cache import KVCacheManager
from d2sd.runtime.request import Limits, Request
from d2sd.runtime.scheduler import Scheduler
from d2sd.runtime.sequence import Sequence
from tests.runtime.played_pools import BLOCK, Pools


def scheduler_of(
    max_batch: int = 4, page_size: int = 4, prefill_chunk: int = 8, pages: int = 80, prefix_cache: bool = True
) -> Scheduler:
    """With `pages` that requests can own; 80 hold everything that is asked for here."""
    limits = Limits(max_batch, 64, page_size, prefill_chunk, None, prefix_cache)
    return Scheduler(limits, KVCacheManager(limits, BLOCK, 1 + pages))


def sequence(number: int, prompt: int = 3, new: int = 8, priority: int = 0, client: str = "") -> Sequence:
    """No two have a prefix in common."""
    request = Request(tuple(range(1000 * number, 1000 * number + prompt)), new, priority=priority, client=client)
    return Sequence(number, request, list(request.prompt))


def ids(sequences: list[Sequence]) -> list[int]:
    return [s.id for s in sequences]


def test_first_come_first_served_up_to_the_batch() -> None:
    scheduler = scheduler_of(max_batch=2)
    for number in range(4):
        scheduler.add(sequence(number, prompt=1))
    assert ids(scheduler.schedule().decode) == [0, 1]
    scheduler.remove(scheduler.running[0])
    assert ids(scheduler.schedule().decode) == [1, 2]
    assert ids(list(scheduler.waiting)) == [3]


def test_a_big_request_at_the_head_is_not_overtaken() -> None:
    scheduler = scheduler_of(pages=8)
    for number, prompt in enumerate((12, 12, 1)):  # 4 pages, 4 pages and 1
        scheduler.add(sequence(number, prompt, new=1))
    scheduler.add(sequence(3, prompt=1, new=1))
    scheduler.schedule()
    assert ids(scheduler.running) == [0, 1]
    scheduler.remove(scheduler.running[0])
    scheduler.schedule()
    assert ids(scheduler.running) == [1, 2, 3]


def test_chunk_of_prompt_tokens_is_shared() -> None:
    scheduler = scheduler_of(prefill_chunk=8)
    for number, prompt in enumerate((6, 11, 1, 4)):  # one token each is the anchor and is not prefilled
        scheduler.add(sequence(number, prompt))
    schedule = scheduler.schedule()
    assert [(s.id, n) for s, n in schedule.prefill] == [(0, 5), (1, 3)]
    assert ids(schedule.decode) == [0, 2]  # complete after this chunk, and nothing to prefill
    for running, count in schedule.prefill:
        running.cached += count
    schedule = scheduler.schedule()
    assert [(s.id, n) for s, n in schedule.prefill] == [(1, 7), (3, 1)]
    assert ids(schedule.decode) == [0, 1, 2]


def test_pages_grow_with_the_tokens() -> None:
    scheduler = scheduler_of(page_size=4)
    one = sequence(0, prompt=5, new=30)
    scheduler.add(one)
    scheduler.schedule()
    assert len(one.pages) == 2  # 4 context tokens, and 4 that a step can commit
    before = list(one.pages)
    one.tokens += [0]
    one.cached = 5
    scheduler.schedule()
    assert len(one.pages) == 3
    assert list(one.pages[:2]) == before
    scheduler.schedule()
    assert len(one.pages) == 3


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_youngest_makes_room_and_comes_back_first(prefix_cache: bool) -> None:
    scheduler = scheduler_of(page_size=4, pages=6, prefix_cache=prefix_cache)
    for number in range(4):
        scheduler.add(sequence(number, prompt=5, new=12))  # 2 pages now
    scheduler.schedule()
    assert ids(scheduler.running) == [0, 1, 2]
    for running in scheduler.running:
        running.cached = 4
    old, _, young = scheduler.running
    old.tokens += [0]
    old.cached = 5
    schedule = scheduler.schedule()
    assert ids(schedule.decode) == [0, 1]
    assert ids(list(scheduler.waiting)) == [2, 3]
    assert (list(young.pages), young.cached, young.stats.preemptions) == ([], 0, 1)
    assert old.stats.preemptions == 0
    scheduler.remove(old)
    schedule = scheduler.schedule()
    assert ids(scheduler.running) == [1, 2, 3]
    if prefix_cache:  # its context is still cached
        assert young in schedule.decode
        assert scheduler.stats("").prefix_hit_tokens == young.stats.cached_tokens == 0, "no hits of another's tokens"
    else:
        assert schedule.prefill[0] == (young, 4)  # its context is computed again


def test_the_one_that_grows_may_be_the_youngest_itself() -> None:
    scheduler = scheduler_of(page_size=4, pages=5)
    for number in range(2):
        scheduler.add(sequence(number, prompt=5, new=8))
    scheduler.schedule()
    old, young = scheduler.running
    old.cached = 4
    old.tokens += [0] * 4
    old.cached = 8
    young.tokens += [0]
    young.cached = 5
    schedule = scheduler.schedule()  # the old one takes the fifth page, so the young one finds none
    assert ids(schedule.decode) == [0]
    assert ids(list(scheduler.waiting)) == [1]
    assert young.stats.preemptions == 1
    assert not young.pages
    assert scheduler.kv_cache.pages.free == 2


def test_a_request_that_can_never_fit_is_refused() -> None:
    scheduler = scheduler_of(page_size=4, pages=5)
    with pytest.raises(RequestError, match="pages") as caught:
        scheduler.add(sequence(0, prompt=9, new=8))  # 21 tokens with a block behind: 6 pages
    assert caught.value.where == "limits.kv_memory"
    assert "6" in str(caught.value)
    assert not scheduler.waiting
    scheduler.add(sequence(1, prompt=8, new=8))  # 20 tokens: 5 pages
    assert scheduler.waiting


def test_removal_from_either_queue_frees_what_it_held() -> None:
    scheduler = scheduler_of(max_batch=1)
    everything = scheduler.kv_cache.pages.free
    first, second = sequence(0), sequence(1)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.schedule()
    assert scheduler.kv_cache.pages.free < everything
    scheduler.remove(second)
    assert not scheduler.waiting
    assert scheduler.running == [first]
    scheduler.remove(first)
    scheduler.remove(first)  # it is gone: nothing is freed twice
    assert scheduler.running == []
    assert scheduler.kv_cache.pages.free == everything
    assert not first.pages


def test_lower_priorities_are_served_first() -> None:
    scheduler = scheduler_of(max_batch=2)
    for number, priority in enumerate((5, 0, 5, -1, 0)):
        scheduler.add(sequence(number, prompt=1, priority=priority))
    served = []
    while scheduler.waiting:
        scheduler.schedule()
        for one in list(scheduler.running):
            served.append(one.id)
            scheduler.remove(one)
    assert served == [3, 1, 4, 0, 2]


def test_clients_take_turns() -> None:
    scheduler = scheduler_of(max_batch=2)
    for number, client in enumerate("aaaab"):
        scheduler.add(sequence(number, prompt=1, client=client))
    assert ids(scheduler.schedule().decode) == [0, 4]  # its first one is as early as the other's
    scheduler.remove(scheduler.running[-1])
    assert ids(scheduler.schedule().decode) == [0, 1]
    assert ids(scheduler.waiting) == [2, 3]


def test_a_new_client_takes_a_place_of_one_with_several() -> None:
    scheduler = scheduler_of(max_batch=3)
    for number in range(5):
        scheduler.add(sequence(number, prompt=1, client="a"))
    assert ids(scheduler.schedule().decode) == [0, 1, 2]
    scheduler.add(sequence(5, prompt=1, client="b"))
    assert not scheduler.make_room_ahead()  # the step that runs is read first
    assert ids(scheduler.schedule().decode) == [0, 1, 5]
    assert ids(scheduler.waiting) == [2, 3, 4]  # it is the next one
    scheduler.add(sequence(6, prompt=1, client="b"))
    assert scheduler.make_room_ahead()
    scheduler.add(sequence(7, prompt=1, client="c"))
    assert ids(scheduler.schedule().decode) == [0, 5, 7]  # each client has one: nobody gives way any more
    scheduler.add(sequence(8, prompt=1, client="d"))
    assert scheduler.make_room_ahead()
    assert ids(scheduler.schedule().decode) == [0, 5, 7]


def test_a_request_gives_way_after_the_tokens_of_its_launched_step_are_read() -> None:
    """The first waiting request has a place, and one behind it is to take the place of one that runs."""
    scheduler = scheduler_of(max_batch=4)
    for number, client in enumerate("aab"):
        scheduler.add(sequence(number, prompt=1, client=client))
    running = scheduler.schedule().decode
    scheduler.launched(running)
    for number, client in ((3, "b"), (4, "c")):
        scheduler.add(sequence(number, prompt=1, client=client))
    assert scheduler.make_room_ahead()
    assert ids(scheduler.schedule().decode) == [0, 2, 1, 3]
    assert not scheduler.make_room_ahead()
    scheduler.collected(running)
    scheduler.schedule()
    assert ids(scheduler.running) == [0, 2, 3, 4]
    assert ids(scheduler.waiting) == [1]


def test_a_new_client_takes_pages_of_one_with_several() -> None:
    scheduler = scheduler_of(pages=9)
    for number in range(2):
        scheduler.add(sequence(number, prompt=13, new=1, client="a"))  # 4 pages
    scheduler.schedule()
    scheduler.add(sequence(2, prompt=13, new=1, client="b"))
    scheduler.schedule()
    assert ids(scheduler.running) == [0, 2]
    assert ids(scheduler.waiting) == [1]


def test_a_lower_priority_takes_nobodys_place() -> None:
    scheduler = scheduler_of(max_batch=2)
    for number in range(2):
        scheduler.add(sequence(number, prompt=1, client="a"))
    scheduler.schedule()
    scheduler.add(sequence(2, prompt=1, priority=1, client="b"))
    assert ids(scheduler.schedule().decode) == [0, 1]


@pytest.mark.parametrize(
    ("chunk", "prompts", "computed"),
    [
        pytest.param(8, {"a": (5, 5), "b": (5,)}, [(0, 5), (2, 3)], id="clients take turns"),
        pytest.param(12, {"a": (20,), "b": (13,), "c": (6,)}, [(2, 6), (1, 5), (0, 1)], id="the shortest comes first"),
        pytest.param(2, {"a": (2,), "b": (2,), "c": (2,)}, [(0, 1), (1, 1)], id="more clients than tokens"),
        pytest.param(8, {"a": (0,), "b": (19,)}, [(1, 8)], id="no share without a prompt"),
    ],
)
def test_prompts_share_the_chunk(
    chunk: int, prompts: dict[str, tuple[int, ...]], computed: list[tuple[int, int]]
) -> None:
    """By tokens of each client's prompts, in front of the anchor; the longest gets its least."""
    scheduler = scheduler_of(prefill_chunk=chunk)
    asked = [(client, length) for client, lengths in prompts.items() for length in lengths]
    for number, (client, length) in enumerate(asked):
        scheduler.add(sequence(number, prompt=1 + length, client=client))
    assert [(s.id, n) for s, n in scheduler.schedule().prefill] == computed


def test_newest_of_the_lowest_priority_makes_room_and_leads_its_class() -> None:
    scheduler = scheduler_of(page_size=4, pages=6)
    for number, priority in enumerate((2, 1, 1, 1)):
        scheduler.add(sequence(number, prompt=5, new=12, priority=priority))  # 2 pages now
    scheduler.schedule()
    assert ids(scheduler.running) == [1, 2, 3]
    scheduler.remove(scheduler.running[2])
    scheduler.schedule()
    assert ids(scheduler.running) == [1, 2, 0]
    for one in scheduler.running:
        one.cached = 4
    scheduler.running[1].tokens += [0]
    scheduler.running[1].cached = 5
    scheduler.add(sequence(4, prompt=14, new=1, priority=2))
    scheduler.schedule()
    assert ids(scheduler.running) == [1, 2]
    assert ids(scheduler.waiting) == [0, 4]
    scheduler.add(sequence(5, prompt=14, new=1, priority=1))
    assert ids(scheduler.waiting) == [5, 0, 4]


@pytest.mark.parametrize("seed", range(20))
def test_tight_pages_always_drain(seed: int) -> None:
    """Room for hardly more than the largest request: everybody ends, the oldest moving at every step."""
    dice = random.Random(seed)
    size = dice.choice([1, 3, 4])
    scheduler = scheduler_of(max_batch=4, page_size=size, prefill_chunk=5, pages=30)
    pools = Pools(scheduler, size)
    everybody = [sequence(n, dice.randint(1, 9), dice.randint(1, 15)) for n in range(12)]
    for one in everybody:
        scheduler.add(one)
    for _ in range(400):
        if not scheduler.running and not scheduler.waiting:
            break
        oldest = min((*scheduler.running, *scheduler.waiting), key=lambda s: s.id)
        before = (oldest.cached, len(oldest.tokens))
        pools.step(dice)
        assert (oldest.cached, len(oldest.tokens)) > before
    assert all(s.finish == "length" for s in everybody)
    assert scheduler.kv_cache.pages.free == 30
