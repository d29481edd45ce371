"""How far a text repeats itself: where its end occurred before, watched on the host from the tokens alone.

`auto` reads it before a step, whatever policy runs; the copies of a step's tree are found on the device
(`d2sd.plugins.lookup`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from d2sd.plugins.lookup import LENGTHS
from d2sd.plugins.lookup.types import LONGEST

#: Sizes of the n-grams whose latest place is known: longer matches go through one of these.
_SIZES = (1, 2, 4)
#: Tokens that are read at once, the last ones: of a very long prompt the rest is not watched.
_MOST_AT_ONCE = 4096


def entry_of(length: int) -> int:
    """The entry of a match of `length` tokens in LENGTHS."""
    return max(0, bisect_right(LENGTHS, length) - 1)


@dataclass(slots=True)
class Repeats:
    """Follows one text; `length` tokens of its end occurred before, and the next token should be that at `place`."""

    tokens: list[int] = field(default_factory=list)
    length: int = 0
    place: int = 0
    read: int = 0  # tokens of the text
    _behind: dict[tuple[int, ...], int] = field(default_factory=dict)  # n-gram -> the place behind its latest

    def follow(self, text: Sequence[int]) -> list[tuple[int, bool]]:
        """Read what is new of the text; returns the entry of each match, and whether the token behind it was right."""
        new, self.read = text[self.read :], len(text)
        outcomes = []
        for token in new[-_MOST_AT_ONCE:]:
            if self.length:
                right = self.tokens[self.place] == token
                outcomes.append((entry_of(self.length), right))
                self.length, self.place = (min(self.length + 1, LONGEST), self.place + 1) if right else (0, 0)
            self.tokens.append(token)
            if not self.length:
                self._search()
            for size in _SIZES:
                if len(self.tokens) >= size:
                    self._behind[tuple(self.tokens[-size:])] = len(self.tokens)
        return outcomes

    def _search(self) -> None:
        """Find the text's end among what it said before: the latest place of the longest n-gram that is known."""
        end = len(self.tokens)
        for size in reversed(_SIZES):
            place = self._behind.get(tuple(self.tokens[-size:])) if end > size else None
            if place is not None:
                length = size
                while length < min(LONGEST, place) and self.tokens[place - 1 - length] == self.tokens[end - 1 - length]:
                    length += 1
                self.length, self.place = length, place
                return
