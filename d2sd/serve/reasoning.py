"""Divides the text of an answer into what the model thinks, between markers of its chat template, and what it says."""

from __future__ import annotations

from dataclasses import dataclass

from d2sd.runtime.thought import Markers


@dataclass(slots=True)
class Thought:
    """Divides the text of an answer, piece by piece, into what is thought and what is said.

    White space around both is left out where there is a thought. A marker may be cut anywhere between pieces: what may
    begin one is held back. Only an answer that begins with a thought has one; later markers are text.
    """

    markers: Markers
    inside: bool | None = None  # whether the text that comes is thought; None: not known yet
    _held: str = ""
    _trims: bool = True  # white space that comes next

    def divide(self, text: str, *, ends: bool) -> tuple[str, str]:
        """Return what a piece adds to the thought, and to what is said. `ends`: it is the last."""
        text, self._held, thought = self._held + text, "", ""
        if self.inside is None:
            begun = text.lstrip()
            if self.markers.begin.startswith(begun) and begun != self.markers.begin and not ends:
                self._held = text
                return "", ""
            self.inside = self._trims = begun.startswith(self.markers.begin)
            text = begun.removeprefix(self.markers.begin) if self.inside else text
        if self.inside:
            thought, found, text = text.partition(self.markers.end)
            kept = thought if found or ends else thought[: unfinished(thought, self.markers.end)]
            kept, self._held = kept.rstrip(), "" if found or ends else thought[len(kept.rstrip()) :]
            thought, self._trims = self._trimmed(kept), self._trims or bool(found)
            self.inside = not found
        return thought, self._trimmed(text)

    def _trimmed(self, text: str) -> str:
        text = text.lstrip() if self._trims else text
        self._trims = self._trims and not text
        return text


def unfinished(text: str, marker: str) -> int:
    """The place in a text from which on its end may begin a marker that the next piece ends."""
    return len(text) - next((count for count in range(len(marker) - 1, 0, -1) if text.endswith(marker[:count])), 0)
