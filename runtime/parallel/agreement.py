"""Whether all ranks accept the same tokens: the one thing that each decides by itself and that nothing else would show.

Rank 0 reads the tokens of a step while a later one runs, as it always does. The message of the next step then carries a
checksum of them, with which the other ranks compare their own. Rows of requests that have ended are left out: what
a step computes for those is dropped.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Collection, Sequence

from d2sd.errors import D2SDError
from d2sd.runtime.decode import Committed
from d2sd.runtime.sequence import Sequence as Running

#: Steps that a rank keeps: rank 0 is at most two ahead of what it has read.
_KEPT = 4


def checksum(committed: Sequence[Committed], rows: Collection[int]) -> int:
    """A number of the tokens that a step committed for these rows of the batch."""
    return zlib.crc32(repr([(row, committed[row].tokens) for row in rows]).encode())


class Said:
    """Rank 0's side: numbers steps, and notes the checksum of the last one whose tokens were read."""

    def __init__(self) -> None:
        self._number, self._last = 0, ""

    def noting(
        self, read: Callable[[], list[Committed]], sequences: Sequence[Running]
    ) -> Callable[[], list[Committed]]:
        """Wrap the function that reads the tokens of the step that was numbered last."""
        number = self._number

        def read_and_note() -> list[Committed]:
            committed = read()
            rows = [row for row, sequence in enumerate(sequences) if sequence.finish is None]
            mask = sum(1 << row for row in rows)
            self._last = f"{number:x} {mask:x} {checksum(committed, rows):x}"
            return committed

        return read_and_note

    def next(self) -> str:
        """Number a step; returns what its message carries."""
        self._number += 1
        last, self._last = self._last, ""
        return last


class Heard:
    """The side of another rank."""

    def __init__(self, rank: int) -> None:
        self._rank, self._number = rank, 0
        self._steps: deque[tuple[int, Callable[[], list[Committed]]]] = deque(maxlen=_KEPT)

    def keep(self, read: Callable[[], list[Committed]]) -> None:
        """Keep the function that reads the tokens of the step that ran last."""
        self._number += 1
        self._steps.append((self._number, read))

    def compare(self, message: str) -> None:
        """Raise D2SDError if rank 0 accepted other tokens in a step."""
        if not message:
            return
        number, mask, expected = (int(part, 16) for part in message.split())
        while self._steps and self._steps[0][0] < number:
            self._steps.popleft()
        assert self._steps[0][0] == number, "rank 0 reads its steps in their order"
        committed = self._steps.popleft()[1]()
        if checksum(committed, [row for row in range(mask.bit_length()) if mask >> row & 1]) != expected:
            raise D2SDError(
                f"Rank {self._rank} accepted other tokens than rank 0.",
                where=f"decode step {number}",
                expected="equal GPUs, drivers and versions of packages, which compute the same bits",
            )
