"""Incremental detokenization; text that may be the start of a stop string is held back until it is decided.

A token's work depends on its own text, not on the length of the stop strings or of the answer.
"""

from __future__ import annotations

from collections.abc import Callable

Decode = Callable[[list[int]], str]

#: Decoded by a byte-level tokenizer for bytes that do not form a character yet.
_UNFINISHED = "\ufffd"
#: Tokens decoded together at most, but for the next: bytes that never form a character, and tokens without text, would
#: be decoded again with every token that follows.
_WINDOW = 32
#: Tokens of a character at most: each has a byte of it.
_CHARACTER = 4


class TextStream:
    """Feed tokens one at a time; each call returns the text that no later token can change."""

    def __init__(self, decode: Decode, stop: tuple[str, ...] = (), *, stop_visible: bool = False) -> None:
        """`stop_visible` leaves the stop string that ended the answer in the text."""
        self._decode, self._stop, self._stop_visible = decode, [_StopString(string) for string in stop], stop_visible
        self._ids: list[int] = []  # decoded together: a token's text can depend on the one before it
        self._read = 0  # leading ones whose text has been released or held back
        self._held = ""  # decoded, but possibly the start of a stop string
        self.stopped = ""  # the stop string that has ended the text

    def feed(self, token: int, *, may_stop: bool = True) -> str:
        """Text that this token completes. After a stop string `stopped` is that string, and no more text is returned.

        Without `may_stop` no stop string is looked for in the text so far.
        """
        self._ids.append(token)
        before, now = self._decode(self._ids[: self._read]), self._decode(self._ids)
        read = len(self._ids)
        if now.endswith(_UNFINISHED) or len(now) <= len(before):
            if len(self._ids) < _WINDOW:
                return ""
            read = self._decided(now)
            now = self._decode(self._ids[:read])
            self._ids, self._read = self._ids[max(read - _CHARACTER, 0) :], min(read, _CHARACTER)
        else:
            self._ids, self._read = self._ids[self._read :], read - self._read
        return self._release(now[len(before) :], may_stop)

    def feed_all(self, tokens: list[int]) -> str:
        """Text that these tokens complete, as `feed` would give it token by token, in two calls of `decode`.

        For streams without stop strings, which end an answer at one of the tokens.
        """
        assert not self._stop
        ids = [*self._ids, *tokens]
        before, now = self._decode(ids[: self._read]), self._decode(ids)
        if _UNFINISHED in now[len(before) :] or len(now) <= len(before):
            # next to a byte that forms no character all of a run may look so: `feed` keeps the last character alone
            texts = ((n, self._decode(ids[:n])) for n in reversed(range(self._read)))
            ends = (n for n, text in texts if len(text) < len(before) and not text.endswith(_UNFINISHED))
            start = next(ends, 0)
            self._ids, self._read = self._ids[start:], self._read - start
            return "".join(self.feed(token) for token in tokens)
        self._ids, self._read = ids[self._read :], len(ids) - self._read
        return now[len(before) :]

    def flush(self) -> str:
        """The text still held back, at the end of the answer; "" if a stop string ended it."""
        if self.stopped:
            return ""
        rest = self._decode(self._ids)[len(self._decode(self._ids[: self._read])) :]
        text = self._release(rest)
        held, self._held = self._held, ""
        return text + held

    def _decided(self, now: str) -> int:
        """Leading tokens of a full window whose text no later token can change, so that no character is cut in two."""
        ids = self._ids
        last = len(ids) - _CHARACTER
        for cut in range(last, last - _CHARACTER, -1):
            text, start = self._decode(ids[:cut]), cut - _CHARACTER
            if now.startswith(text) and now.endswith(self._decode(ids[start:])[len(self._decode(ids[start:cut])) :]):
                return cut
        return last

    def _release(self, new: str, may_stop: bool = True) -> str:
        text = self._held + new
        if not may_stop:
            self._held = ""
            for string in self._stop:
                string.matched = 0
            return text
        ends = [(string, string.end_in(new)) for string in self._stop]
        matches = [(len(self._held) + end - len(string.text), len(string.text)) for string, end in ends if end]
        if matches:
            start, length = min(matches)
            self.stopped, self._held = text[start : start + length], ""
            return text[: start + length if self._stop_visible else start]
        # Hold back the longest suffix that is a prefix of a stop string.
        hold = max((string.matched for string in self._stop), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]


class _StopString:
    """Searches a text that comes in parts for one string, each character once (Knuth, Morris and Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # length of its longest prefix that the text so far ends with
        self._borders = [0]  # of its prefixes of length 1, 2, ...: the longest shorter prefix that each ends with

    def end_in(self, part: str) -> int:
        """The index in the next part of the text behind the first occurrence; 0 if none ends there."""
        matched, index = self.matched, 0
        while index < len(part):
            if not matched:
                index = part.find(self.text[0], index)
                if index < 0:
                    break
            while matched and part[index] != self.text[matched]:
                matched = self._borders[matched - 1]
            matched += part[index] == self.text[matched]
            index += 1
            if matched == len(self.text):
                return index
            if matched > len(self._borders):
                self._borders.append(self._border(matched))
        self.matched = matched
        return 0

    def _border(self, length: int) -> int:
        """The longest shorter prefix that the prefix of this length ends with; those of shorter ones are known."""
        last, border = self.text[length - 1], self._borders[-1]
        while border and self.text[border] != last:
            border = self._borders[border - 1]
        return border + (self.text[border] == last)
