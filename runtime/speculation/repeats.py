"""How far a text repeats itself: where its end occurred before, watched on the host from the tokens alone.

`auto` reads it before a step, whatever policy runs; the copies of a step's tree are found on the device
(`d2sd.plugins.lookup`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from d2sd.plugins.lookup import LENGTHS
from d2sd.plugins.lookup.types import LONGEST

#: Tokens that are read at once, the last ones: of a very long prompt the rest is not watched.
_MOST_AT_ONCE = 4096
#: The entry of a match in LENGTHS, by its tokens; 0 also for none.
ENTRIES = tuple(max(0, bisect_right(LENGTHS, length) - 1) for length in range(LONGEST + 1))


@dataclass(slots=True)
class Repeats:
    """Follows one text; `length` tokens of its end occurred before, and the next token should be that at `place`."""

    tokens: list[int] = field(default_factory=list)
    length: int = 0
    place: int = 0
    read: int = 0  # tokens of the text
    #: n-gram of 4, 2 or 1 tokens -> the place behind its latest: longer matches go through one of these.
    _behind: dict[Hashable, int] = field(default_factory=dict)
    #: The last tokens; before the text are three that occur nowhere, so that its beginning equals nothing in it.
    _end: tuple[int, int, int] = (-3, -2, -1)

    def follow(self, text: Sequence[int]) -> list[tuple[int, bool]]:
        """Read what is new of the text; returns the entry of each match, and whether the token behind it was right."""
        new, self.read = text[max(self.read, len(text) - _MOST_AT_ONCE) :], len(text)
        tokens, behind, length, place, outcomes = self.tokens, self._behind, self.length, self.place, []
        before, last, token = self._end
        for following in new:  # of every request in each step, so without calls
            first, before, last, token = before, last, token, following
            if length:
                right = tokens[place] == token
                outcomes.append((ENTRIES[length], right))
                length, place = (min(length + 1, LONGEST), place + 1) if right else (0, 0)
            tokens.append(token)
            four, two = (first, before, last, token), (last, token)
            if not length and token in behind:
                place = behind.get(four) or behind.get(two) or behind[token]
                length = self._match(place)
            behind[four] = behind[two] = behind[token] = len(tokens)
        self.length, self.place, self._end = length, place, (before, last, token)
        return outcomes

    def _match(self, place: int) -> int:
        """Tokens, up to LONGEST, of the text's end that are also in front of an earlier place."""
        tokens, end, length = self.tokens, len(self.tokens), 1
        while length < min(LONGEST, place) and tokens[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length
