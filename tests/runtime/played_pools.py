"""Plays the engine of a scheduler without a model: pages and slots hold the tokens that were written to them."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence as SequenceOf
from itertools import product

import torch

from d2sd.runtime.batch import pack_where
from d2sd.runtime.pages import PageGroup, extend_keys
from d2sd.runtime.request import Request, power_of_two
from d2sd.runtime.scheduler import Schedule, Scheduler
from d2sd.runtime.sequence import Sequence

BLOCK = 4


def keys_of(tokens: SequenceOf[int], page_size: int = 4, salt: str = "") -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, tokens, page_size, len(tokens) // page_size, salt)
    return keys


def add(scheduler: Scheduler, number: int, prompt: list[int], new: int = 8, **options: object) -> Sequence:
    one = Sequence(number, Request(tuple(prompt), new, **options), list(prompt))  # type: ignore[arg-type]
    scheduler.add(one)
    return one


def held(group: PageGroup, one: Sequence) -> array[int]:
    """The pages of a request in a group, 0 for those that are freed."""
    return one.pages if group.window is None else one.windowed_pages


def check_tables(sequences: SequenceOf[Sequence], size: int, *, exact: bool) -> None:
    """The page tables of a step are what a loop over page numbers makes of them."""
    longest = max(1, *(len(one.pages) for one in sequences))
    columns = longest if exact else power_of_two(longest)
    where = pack_where(sequences, size, exact=exact)
    table, windowed = where.pages, where.windowed
    assert table.dtype == torch.long
    assert table.tolist() == _looped([one.pages for one in sequences], size, columns)
    if windowed is None:
        assert not any(one.windowed_pages for one in sequences)
    else:
        assert windowed.dtype == torch.long
        assert windowed.tolist() == _looped([one.windowed_pages for one in sequences], size, columns)


def _looped(rows: SequenceOf[SequenceOf[int]], size: int, columns: int) -> list[list[int]]:
    table = [[0] * columns for _ in range(size)]
    for row, pages in enumerate(rows):
        for column, page in enumerate(pages):
            table[row][column] = page
    return table


class Pools:
    """Record what the models' pools would hold: for each written place the whole prefix it was computed from.

    A launched step has run on the device, whose work is in order; the host may read its tokens one step late.
    """

    def __init__(self, scheduler: Scheduler, page_size: int) -> None:
        self.scheduler, self.page_size = scheduler, page_size
        self.holds: dict[tuple[int | None, int, int], tuple[int, ...]] = {}  # of layers with this window
        self.states: dict[int, tuple[int, ...]] = {0: ()}  # of each slot: the tokens that its state is of
        self.launched: list[tuple[Sequence, list[int]]] = []  # with their tokens, which the host has not read
        self.late = self.restored = self.snapshots = 0  # steps read late, and copies of states other than zero

    def write(self, one: Sequence, positions: range, tokens: list[int]) -> None:
        for group, position in product(self.scheduler.kv_cache.groups, positions):
            page = held(group, one)[position // self.page_size]
            assert group.pages._references[page] == 1, "a shared page is never written"
            self.holds[group.window, page, position % self.page_size] = tuple(tokens[: position + 1])
        if self.scheduler.kv_cache.states.count:
            assert one.state_id, "the zero state is never written"
            assert self.states[one.state_id] == tuple(tokens[: positions.start])
            self.states[one.state_id] = tuple(tokens[: positions.stop])

    def check(self, one: Sequence) -> None:
        """Every token that the next row sees is there."""
        for group in self.scheduler.kv_cache.groups:
            first = 0 if group.window is None else max(0, one.cached - group.window + 1)
            for position in range(first, min(one.cached, len(one.tokens))):
                place = held(group, one)[position // self.page_size], position % self.page_size
                assert self.holds[group.window, place[0], place[1]] == tuple(one.tokens[: position + 1])

    def step(self, dice: random.Random, *, late: bool = False) -> None:
        """Step as the engine does, with tokens 0 and 1 as answers; `late`: the next step reads them."""
        before = self.launched
        if before and not (late and self.scheduler.make_room_ahead()):
            self._collect(before)
            before = []
        schedule = self.scheduler.schedule()
        assert all(count > 0 for _, count in schedule.prefill)
        assert sum(count for _, count in schedule.prefill) <= self.scheduler._limits.prefill_chunk
        assert schedule.prefill or schedule.decode or before or not (self.scheduler.running or self.scheduler.waiting)
        for one in self.scheduler.running:
            assert len(one.pages) * self.page_size >= len(one.tokens) - 1 + BLOCK
        groups = self.scheduler.kv_cache.groups
        for group, pages in zip(groups, schedule.discarded, strict=True):  # before anything is written
            for page, slot in product(pages, range(self.page_size)):
                self.holds.pop((group.window, page, slot), None)
        self._compute(schedule)
        self.late += bool(before)
        unread = {id(one): tokens for one, tokens in before}
        self.launched = [(one, self._decode(one, unread.get(id(one), []), dice)) for one in schedule.decode]
        self.scheduler.launched(schedule.decode)
        self._collect(before)
        if not late:
            self._collect(self.launched)
            self.launched = []

    def _compute(self, schedule: Schedule) -> None:
        self._restore(schedule)
        for one, count in schedule.prefill:
            self.check(one)
            self.write(one, range(one.cached, one.cached + count), one.tokens)
            one.cached += count
        self.restored += sum(source > 0 for source, _ in schedule.restored)
        self.snapshots += len(schedule.snapshots)
        assert len({slot for _, slot in schedule.snapshots}) == len(schedule.snapshots)
        for source, slot in schedule.snapshots:
            assert slot not in {one.state_id for one in self.scheduler.running}
            self.states[slot] = self.states[source]

    def _restore(self, schedule: Schedule) -> None:
        """One by one, and read before any is written: both are the same."""
        at_once = {slot: self.states[source] for source, slot in schedule.restored}
        assert len(at_once) == len(schedule.restored)
        assert at_once.keys() <= {one.state_id for one in self.scheduler.running}
        for source, slot in schedule.restored:
            self.states[slot] = self.states[source]
        assert all(self.states[slot] == state for slot, state in at_once.items())

    def _decode(self, one: Sequence, unread: list[int], dice: random.Random) -> list[int]:
        """Commit a step's tokens behind those that the host has not read; none behind a complete answer."""
        self.check(one)
        if len(unread) >= one.remaining:
            return []
        committed, start = [dice.randint(0, 1) for _ in range(dice.randint(1, BLOCK))], one.cached + len(unread)
        self.write(one, range(start, start + len(committed)), [*one.tokens, *unread, *committed])
        return committed

    def _collect(self, launched: list[tuple[Sequence, list[int]]]) -> None:
        self.scheduler.collected([one for one, _ in launched])
        for one, tokens in launched:
            if one.finish is None and one.append(tokens).finish is not None:
                self.scheduler.remove(one)

    def check_slots(self) -> None:
        """No slot is lost or has two owners, and each snapshot is of the prefix by which it is found."""
        states, running = self.scheduler.kv_cache.states, self.scheduler.running
        if not states.count:
            return
        pool, own = states._pool, [one.state_id for one in running]
        assert sorted([*own, *pool._free, *pool.cache.idle]) == list(range(1, states.count))
        assert states.used == len(running)
        assert len(pool._discarded) <= states.count, "what is given up since the last step, and no more"
        assert self.states[0] == ()
        for slot in pool.cache.idle:
            salted = (keys_of(self.states[slot], self.page_size, salt) for salt in ("", "x"))
            assert pool.cache._key_of[slot] in [keys[-1] for keys in salted]
            assert len(self.states[slot]) % self.page_size == 0
