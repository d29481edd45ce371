"""The prefix cache without a model: pages hold the prefixes that were written to them, and each read is checked."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from d2sd.errors import RequestError
from d2sd.runtime.kv_cache import KVCacheManager
from d2sd.runtime.pages import PageAllocator, extend_keys
from d2sd.runtime.request import Limits
from d2sd.runtime.scheduler import Scheduler
from d2sd.runtime.sequence import Sequence
from tests.runtime.helpers import STEADY
from tests.runtime.played_pools import BLOCK, Pools, add, check_tables, held, keys_of


@STEADY
@given(st.lists(st.integers(0, 1), max_size=12), st.lists(st.integers(0, 1), max_size=12), st.integers(1, 4))
def test_equal_keys_are_equal_prefixes(one: list[int], other: list[int], page_size: int) -> None:
    keys, others = keys_of(one, page_size), keys_of(other, page_size)
    for a, key in enumerate(keys):
        for b, its in enumerate(others):
            assert (key == its) == (one[: (a + 1) * page_size] == other[: (b + 1) * page_size])


def test_keys_depend_on_the_salt_and_grow_with_the_tokens() -> None:
    tokens = list(range(12))
    assert not set(keys_of(tokens)) & set(keys_of(tokens, salt="tenant"))
    keys: list[bytes] = []
    for count in (1, 1, 3):
        extend_keys(keys, tokens, 4, count, "")
    assert keys == keys_of(tokens)
    assert len({len(key) for key in keys}) == 1


class AnyPages(RuleBasedStateMachine):
    """The allocator against a list of who holds what."""

    @initialize(count=st.integers(2, 9))
    def start(self, count: int) -> None:
        self.pages, self.count = PageAllocator(count), count
        self.held: list[list[int]] = []
        self.key_of: dict[int, bytes] = {}
        self.parent_of: dict[int, bytes] = {}
        self.idle: list[int] = []  # the next to be evicted first
        self.lost: set[int] = set()

    def references(self) -> list[int]:
        return [page for pages in self.held for page in pages]

    @rule(count=st.integers(0, 5), names=st.lists(st.integers(0, 5), unique=True, max_size=4))
    def take(self, count: int, names: list[int]) -> None:
        shared = self.pages.cache.match([bytes([name]) for name in names])
        free = [page for page in range(1, self.count) if page not in self.references()]
        uncached = [page for page in free if page not in self.key_of]
        taken = self.pages.take(count, shared)
        assert (taken is None) == (count > len(set(free) - set(shared)))
        if taken is None:
            return
        new = taken[len(shared) :]
        assert taken[: len(shared)] == shared
        assert len(new) == count
        assert set(new) <= set(free) - set(shared)
        self.idle = [page for page in self.idle if page not in shared]
        evicted = self.idle[: max(0, count - len(uncached))]
        assert set(new) - set(uncached) == set(evicted), "uncached pages first, then the least recently used"
        for page in evicted:
            self.idle.remove(page)
            del self.key_of[page], self.parent_of[page]
            self.lost.add(page)
        self.held.append(taken)

    @precondition(lambda self: any(self.held))
    @rule(which=st.integers(0, 99), place=st.integers(0, 9), name=st.integers(0, 5), parent=st.integers(0, 5))
    def cache(self, which: int, place: int, name: int, parent: int) -> None:
        owners = [pages for pages in self.held if pages]
        pages = owners[which % len(owners)]
        page, key = pages[place % len(pages)], bytes([name])
        if page in self.key_of:
            return  # a page is entered once
        self.pages.cache.add(page, key, bytes([parent]))
        if key not in self.key_of.values():
            self.key_of[page], self.parent_of[page] = key, bytes([parent])

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def give_back(self, which: int) -> None:
        pages = self.held.pop(which % len(self.held))
        self.pages.give_back(pages)
        for page in reversed(pages):
            if page not in self.references():
                if page in self.key_of:
                    self.idle.append(page)
                else:
                    self.lost.add(page)

    @rule()
    def discard(self) -> None:
        discarded = self.pages.take_discarded()
        assert set(discarded) == self.lost
        self.lost = set()

    @invariant()
    def every_page_is_free_or_idle_or_used(self) -> None:
        used = set(self.references())
        assert sorted([*self.pages._free, *self.idle, *used]) == list(range(1, self.count))
        assert list(self.pages.cache.idle) == self.idle
        assert self.pages.free == self.count - 1 - len(used)
        assert self.pages.used == len(used)
        assert all(self.pages._references[page] == self.references().count(page) for page in range(self.count))
        assert all(self.pages.cache.match([key]) == [page] for page, key in self.key_of.items())
        parents = {bytes([name]) for name in range(6) if self.pages.cache.continues(bytes([name]))}
        assert parents == set(self.parent_of.values())


AnyPages.TestCase.settings = STEADY
TestAnyPages = AnyPages.TestCase


class SharedPrefixes(RuleBasedStateMachine):
    """Prompts of few tokens, so that prefixes and answers are shared often, in pools of any tightness."""

    @initialize(
        batch=st.integers(1, 5),
        page_size=st.integers(1, 4),
        chunk=st.integers(1, 16),
        spare=st.integers(0, 30),
        window=st.none() | st.integers(1, 12),
        windowed_spare=st.integers(0, 20),
        snapshots=st.none() | st.integers(0, 9),
    )
    def start(
        self,
        batch: int,
        page_size: int,
        chunk: int,
        spare: int,
        window: int | None,
        windowed_spare: int,
        snapshots: int | None,
    ) -> None:
        self.limits = Limits(batch, 64, page_size, chunk)
        most = 1 + -(-(16 + 9 + BLOCK) // page_size)
        windowed = 1 + self.limits.pages_within(window or 0, BLOCK) + windowed_spare
        slots = 0 if snapshots is None else 1 + batch + snapshots
        self.scheduler = Scheduler(
            self.limits, KVCacheManager(self.limits, BLOCK, most + spare, windowed, window, slots)
        )
        self.pools = Pools(self.scheduler, page_size)
        self.everybody: list[Sequence] = []

    @rule(
        length=st.integers(1, 16),
        new=st.integers(1, 9),
        seed=st.integers(0, 2),
        last=st.integers(0, 1),
        options=st.fixed_dictionaries(
            {
                "priority": st.integers(0, 1),
                "cache_salt": st.sampled_from(["", "", "x"]),
                "client": st.sampled_from("aab"),
            }
        ),
    )
    def submit(self, length: int, new: int, seed: int, last: int, options: dict[str, object]) -> None:
        dice = random.Random(seed)
        prompt = [dice.randint(0, 1) for _ in range(length - 1)] + [last]
        self.everybody.append(add(self.scheduler, len(self.everybody), prompt, new, **options))

    @precondition(lambda self: self.everybody)
    @rule(which=st.integers(0, 99), new=st.integers(1, 4))
    def go_on(self, which: int, new: int) -> None:
        """The next turn of a conversation."""
        tokens = [*self.everybody[which % len(self.everybody)].tokens, 1]
        if len(tokens) + new <= 25:
            self.everybody.append(add(self.scheduler, len(self.everybody), tokens, new))

    @rule(seed=st.integers(0, 99), late=st.booleans())
    def step(self, seed: int, late: bool) -> None:
        self.pools.step(random.Random(seed), late=late)

    @rule(which=st.integers(0, 99))
    def cancel(self, which: int) -> None:
        if self.everybody:
            one = self.everybody[which % len(self.everybody)]
            one.finish = one.finish or "cancelled"
            self.scheduler.remove(one)

    @invariant()
    def pages_have_their_owners(self) -> None:
        running = self.scheduler.running
        for group in self.scheduler.kv_cache.groups:
            pages, own = group.pages, [[page for page in held(group, one) if page] for one in running]
            owned = [page for one in own for page in one]
            assert all(pages._references[page] == owned.count(page) for page in range(pages.count))
            assert sorted([*set(owned), *pages._free, *pages.cache.idle]) == list(range(1, pages.count))
            assert all(not held(group, one) for one in self.everybody if one not in running)
            assert all(len(one) == len(set(one)) for one in own)
            if group.window is not None:
                assert all(len(one) <= self.limits.pages_within(group.window, BLOCK) for one in own)

    @invariant()
    def tables_have_the_pages(self) -> None:
        if running := self.scheduler.running:
            check_tables(running, len(running) + 1, exact=len(self.everybody) % 2 > 0)

    @invariant()
    def slots_have_their_owners(self) -> None:
        self.pools.check_slots()
        assert all(not one.state_id for one in self.everybody if one not in self.scheduler.running)

    @invariant()
    def queues_are_in_the_order_of_priority_turn_and_arrival(self) -> None:
        running, waiting = self.scheduler.running, self.scheduler.waiting
        for queue in (running, waiting):
            assert queue == sorted(queue, key=lambda one: (one.request.priority, one.turn, one.id))
        assert sorted(one.id for one in [*running, *waiting]) == [one.id for one in self.everybody if not one.finish]
        assert len(running) <= self.limits.max_batch
        assert all(not one.pages and one.cached == 0 for one in waiting)

    @invariant()
    def tenants_share_nothing(self) -> None:
        owners: dict[tuple[int, int], set[str]] = {}
        for one in self.scheduler.running:
            for group, pages in enumerate((one.pages, one.windowed_pages)):
                for page in filter(None, pages):
                    owners.setdefault((group, page), set()).add(one.request.cache_salt)
        assert all(len(salts) == 1 for salts in owners.values())

    @invariant()
    def statistics_add_up(self) -> None:
        stats = self.scheduler.stats("off")
        assert stats.pages_used + stats.pages_cached <= stats.pages_total
        assert stats.prefix_hit_tokens == sum(one.stats.cached_tokens for one in self.everybody)
        assert stats.prefix_hit_tokens <= stats.prefix_queried_tokens
        assert stats.preemptions == sum(one.stats.preemptions for one in self.everybody)
        assert all(one.stats.cached_tokens < len(one.request.prompt) for one in self.everybody)

    def teardown(self) -> None:
        if hasattr(self, "pools"):
            for step in range(1000):
                if not self.scheduler.running and not self.scheduler.waiting:
                    break
                self.pools.step(random.Random(step))
            assert all(one.finish is not None for one in self.everybody)
            assert all(group.pages.free == group.pages.count - 1 for group in self.scheduler.kv_cache.groups)


SharedPrefixes.TestCase.settings = STEADY
TestSharedPrefixes = SharedPrefixes.TestCase


@pytest.mark.slow
class TestMoreSharedPrefixes(SharedPrefixes.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(STEADY, max_examples=500)


def made(
    max_batch: int = 8,
    chunk: int = 16,
    pages: int = 80,
    prefix_cache: bool = True,
    window: int | None = None,
    windowed: int = 80,
) -> tuple[Scheduler, Callable[[], None]]:
    """A scheduler, and a function that steps until it is idle."""
    limits = Limits(max_batch, 64, 4, chunk, None, prefix_cache)
    scheduler = Scheduler(limits, KVCacheManager(limits, BLOCK, 1 + pages, 1 + windowed, window))
    pools, dice = Pools(scheduler, 4), random.Random(0)

    def run() -> None:
        while scheduler.running or scheduler.waiting:
            pools.step(dice)

    return scheduler, run


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("chunk", [4, 16, 64, 999])
def test_requests_that_arrive_together_compute_their_prefix_once(chunk: int, prefix_cache: bool) -> None:
    """Prefix of 5 pages; each request adds 6 tokens, of which the last is its anchor."""
    scheduler, run = made(chunk=chunk, prefix_cache=prefix_cache)
    for number in range(8):
        add(scheduler, number, [*range(20), *range(100 * number, 100 * number + 6)])
    run()
    stats = scheduler.stats("off")
    assert stats.prefix_queried_tokens == 8 * 25
    assert stats.prefix_hit_tokens == (7 * 20 if prefix_cache else 0)
    assert stats.prefill_tokens == 8 * 25 - stats.prefix_hit_tokens


def test_next_turn_computes_only_what_is_new() -> None:
    scheduler, run = made()
    first = add(scheduler, 0, list(range(10)), 9)
    run()
    assert first.stats.cached_tokens == 0
    second = add(scheduler, 1, [*first.tokens, *range(50, 60)])
    run()
    # 18 of the 19 tokens were computed, and up to a block of dropped ones: 4 pages.
    assert second.stats.cached_tokens == 16
    assert scheduler.stats("off").prefix_hit_rate == 16 / (9 + 28)


def test_same_prompt_leaves_the_anchors_page_to_be_computed() -> None:
    """9 tokens reuse two full pages, 8 only one: a hit on the anchor's page would have to be written."""
    for length, hits in ((9, 8), (8, 4), (5, 4), (4, 0), (1, 0)):
        scheduler, run = made()
        for number in (0, 1):
            again = add(scheduler, number, list(range(length)))
            run()
        assert again.stats.cached_tokens == hits


def test_cached_pages_are_evicted_before_a_request_is_preempted() -> None:
    scheduler, run = made(max_batch=2, pages=16)
    for number in range(12):
        add(scheduler, number, list(range(100 * number, 100 * number + 8)), 16)  # 7 pages each
    run()
    assert scheduler.stats("off").preemptions == 0
    assert scheduler.stats("off").pages_cached > 8


def test_head_of_a_prefix_is_evicted_last() -> None:
    scheduler, run = made(max_batch=1, pages=10)
    prompt = list(range(21))
    add(scheduler, 0, prompt, 1)
    run()  # 5 of 10 pages are cached
    add(scheduler, 1, [70] * 3, 21)  # 7 pages
    run()
    again = add(scheduler, 2, prompt, 1)
    run()
    assert again.stats.cached_tokens == 12


def test_without_room_for_its_misses_a_request_takes_no_hits() -> None:
    scheduler, run = made(pages=9)
    add(scheduler, 0, list(range(9)), 1)
    run()
    long = add(scheduler, 1, [50] * 17, 1)  # 5 pages
    scheduler.schedule()
    late = add(scheduler, 2, [*range(8), *[60] * 9], 1)  # 2 hits and 3 others
    scheduler.schedule()
    assert scheduler.running == [long]
    assert (list(late.pages), late.cached) == ([], 0)
    assert scheduler.stats("off").pages_cached == 2
    assert scheduler.stats("off").prefix_queried_tokens == 8 + 16


def test_a_prefix_is_known_as_far_as_its_window_is_cached() -> None:
    """Window of 6 tokens, pages of 4: behind n pages the next row sees two of them."""
    scheduler, run = made(window=6)
    prompt = list(range(21))
    add(scheduler, 0, prompt, 1)
    run()
    _, group = scheduler.kv_cache.groups
    keys = keys_of(prompt)
    for lost, hits in (([], 20), ([4], 16), ([3], 12), ([0], 12), ([1], 0)):
        for index in lost:
            (page,) = group.pages.cache.match(keys[index : index + 1])
            group.pages.cache.idle.move_to_end(page, last=False)
            assert group.pages.cache.evict() == page
            group.pages._free.append(page)
        again = add(scheduler, 1, prompt, 1)
        assert scheduler.kv_cache._known(scheduler.kv_cache.prefix_keys(again)) == hits // 4
        scheduler.remove(again)
    assert len(scheduler.kv_cache.pages.cache.match(keys)) == 5, "pages of the other layers are cached all the while"
    again = add(scheduler, 2, prompt, 1)
    run()
    assert again.stats.cached_tokens == 0


def test_pages_behind_a_window_stay_cached_until_they_are_evicted() -> None:
    prompt = list(range(41))
    for windowed, hits in ((40, 40), (9, 0)):
        scheduler, run = made(max_batch=1, chunk=8, window=6, windowed=windowed)
        add(scheduler, 0, prompt, 16)
        run()
        again = add(scheduler, 1, [*prompt[:20], *range(60, 69)], 1)
        run()
        assert again.stats.cached_tokens == min(hits, 20)


def test_a_prefix_that_another_computes_is_taken_over_behind_windows() -> None:
    """Eight prompts begin alike; each computes but its own end, and none keeps more than its window."""
    scheduler, run = made(chunk=8, window=5, windowed=8 * 6)
    for number in range(8):
        add(scheduler, number, [*range(20), *range(100 * number, 100 * number + 6)])
    run()
    stats = scheduler.stats("off")
    assert stats.prefix_hit_tokens == 7 * 20
    assert stats.preemptions == 0


def test_freed_pages_are_used_again() -> None:
    """A request of 60 tokens in pages for its window alone, and one that could never have them."""
    scheduler, run = made(chunk=4, window=6, windowed=5, prefix_cache=False)
    one = add(scheduler, 0, list(range(40)), 20)
    run()
    assert one.finish == "length"
    scheduler, _ = made(chunk=4, window=6, windowed=4)
    with pytest.raises(RequestError, match="pages"):
        add(scheduler, 0, list(range(40)), 20)
