"""Work of many clients on a few threads: clients take turns, so that one with much work delays no other for long."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from d2sd.serve.errors import Busy, QueueFull

T = TypeVar("T")


class Turns:
    """Threads for the work of one event loop. The next work is that of the client which has waited longest.

    Args:
        name: of the threads.
        threads: their number.
        max_waiting: pieces of work that may wait; more raise `QueueFull`.
        patience: seconds that one may wait; then it raises `Busy`.
    """

    def __init__(self, name: str, threads: int = 1, *, max_waiting: int = 256, patience: float = 30.0) -> None:
        self._pool, self._free = ThreadPoolExecutor(threads, name), threads
        self._max_waiting, self._patience = max_waiting, patience
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by client, in the order of their next turns

    async def run(self, client: str, function: Callable[..., T], *arguments: object) -> T:
        """Call a function in a thread. Cancelled before its turn it is never called; later its thread ends it."""
        await self._turn(client)
        work = asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)
        work.add_done_callback(self._ended)
        return await asyncio.shield(work)

    async def _turn(self, client: str) -> None:
        if self._free:
            self._free -= 1
            return
        if sum(map(len, self._waiting.values())) >= self._max_waiting:
            raise QueueFull("Too many requests wait for the tokenizer or for a grammar.", fix="try again later")
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await asyncio.wait({turn}, timeout=self._patience)
        except asyncio.CancelledError:
            if turn.done():  # it has come, and belongs to the next
                self._next()
            else:
                self._leave(client, turn)
            raise
        if not turn.done():
            self._leave(client, turn)
            raise Busy(
                "The request waited too long for the tokenizer or for a grammar.",
                expected=f"at most {self._patience:g} s",
                fix="try again later",
            )

    def _ended(self, work: asyncio.Future[T]) -> None:
        if not work.cancelled():
            work.exception()  # seen: the caller may have left
        self._next()

    def _next(self) -> None:
        """Give the turn that has become free to the next client."""
        if not self._waiting:
            self._free += 1
            return
        client = next(iter(self._waiting))
        turns = self._waiting.pop(client)
        turns.popleft().set_result(None)
        if turns:
            self._waiting[client] = turns  # behind the others

    def _leave(self, client: str, turn: asyncio.Future[None]) -> None:
        self._waiting[client].remove(turn)
        if not self._waiting[client]:
            del self._waiting[client]
