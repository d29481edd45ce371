"""Incremental detokenization; text that may be the start of a stop string is held back until it is decided."""

from __future__ import annotations

from collections.abc import Callable

Decode = Callable[[list[int]], str]

#: Decoded by a byte-level tokenizer for bytes that do not form a character yet.
_UNFINISHED = "\ufffd"


class TextStream:
    """Feed tokens one at a time; each call returns the text that no later token can change."""

    def __init__(self, decode: Decode, stop: tuple[str, ...] = (), *, stop_visible: bool = False) -> None:
        """`stop_visible` leaves the stop string that ended the answer in the text."""
        self._decode, self._stop, self._stop_visible = decode, stop, stop_visible
        self._ids: list[int] = []
        self._start, self._read = 0, 0  # window of ids decoded together: a token's text can depend on the one before it
        self._held = ""  # decoded, but possibly the start of a stop string
        self.stopped = False

    def feed(self, token: int, *, may_stop: bool = True) -> str:
        """Text that this token completes. After a stop string `stopped` is set and no more text is returned.

        Without `may_stop` no stop string is looked for in the text so far.
        """
        self._ids.append(token)
        before = self._decode(self._ids[self._start : self._read])
        now = self._decode(self._ids[self._start :])
        if now.endswith(_UNFINISHED) or len(now) <= len(before):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return self._release(now[len(before) :], may_stop)

    def flush(self) -> str:
        """The text still held back, at the end of the answer; "" if a stop string ended it."""
        if self.stopped:
            return ""
        rest = self._decode(self._ids[self._start :])[len(self._decode(self._ids[self._start : self._read])) :]
        text = self._release(rest)
        held, self._held = self._held, ""
        return text + held

    def _release(self, new: str, may_stop: bool = True) -> str:
        text = self._held + new
        if not may_stop:
            self._held = ""
            return text
        found = [(at, at + len(s)) for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            start, end = min(found)
            return text[: end if self._stop_visible else start]
        # Hold back the longest suffix that is a prefix of a stop string.
        hold = max((n for s in self._stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]
