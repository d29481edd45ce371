"""The runtime's interface of a grammar: which tokens may follow a path of tokens. No torch.

A grammar is a function of the tokens of an answer, so a mask at every node of a tree is lossless like any other
function of the node's logits and its path.
"""

from __future__ import annotations

from typing import Protocol


class Matcher(Protocol):
    """The state of one answer in its grammar. Kept across preemption: committed tokens do not change."""

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end the answer. They are allowed only where the grammar is complete, and never consumed."""

    @property
    def error(self) -> str:
        """Why the matcher cannot go on, such as a resource limit; "" while it can."""

    def allowed(self) -> bytes:
        """Bit t % 8 of byte t // 8 is set where token t may come next; b"" after an error. Missing bits are 0."""

    def consume(self, token: int) -> bool:
        """Advance by an allowed token; False, and no change, for any other."""

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""


class Grammar(Protocol):
    """A compiled grammar; immutable, so requests may share it."""

    def matcher(self) -> Matcher:
        """A matcher at the start of the grammar."""


def has(bits: bytes, token: int) -> bool:
    """Whether a token's bit is set in the packed `bits` of `Matcher.allowed`."""
    return token >> 3 < len(bits) and bits[token >> 3] >> (token & 7) & 1 == 1


def forced(bits: bytes) -> int | None:
    """The only token whose bit is set; None if there are several or none."""
    number = int.from_bytes(bits, "little")
    return number.bit_length() - 1 if number.bit_count() == 1 else None


def advance(matcher: Matcher, token: int) -> str:
    """Advance a matcher by a committed token, or explain why that is impossible; "" if it was possible."""
    if not matcher.error and token in matcher.end_tokens and has(matcher.allowed(), token):
        return ""
    if matcher.error or not matcher.consume(token):
        return matcher.error or "no token passes both the grammar and the request's other parameters"
    return ""


class PathWalker:
    """Moves a matcher along the paths of one decode step, from where the committed tokens end, and back."""

    def __init__(self, matcher: Matcher) -> None:
        self.end_tokens = matcher.end_tokens
        self._matcher = matcher
        self._at: tuple[int, ...] = ()
        self._allowed: dict[tuple[int, ...], bytes] = {}  # a draft and the tree made of it share paths

    def allowed(self, path: tuple[int, ...]) -> bytes:
        """Packed bits of the tokens that may follow `path`; none if the grammar excludes the path or it is complete."""
        if path not in self._allowed:
            self._allowed[path] = self._matcher.allowed() if self._go(path) else b""
        return self._allowed[path]

    def reset(self) -> None:
        """Return the matcher to the committed tokens."""
        self._go(())

    def _go(self, path: tuple[int, ...]) -> bool:
        common = next((i for i, (a, b) in enumerate(zip(self._at, path, strict=False)) if a != b), None)
        common = min(len(self._at), len(path)) if common is None else common
        if common < len(self._at):
            self._matcher.rollback(len(self._at) - common)
            self._at = self._at[:common]
        for token in path[common:]:
            if token in self.end_tokens or not self._matcher.consume(token):
                return False
            self._at = (*self._at, token)
        return True
