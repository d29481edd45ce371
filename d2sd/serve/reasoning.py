"""The part of an answer that the model thinks before it speaks, between markers that its chat template knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

#: Markers of templates: Qwen3's, which DeepSeek-R1, SmolLM3, GLM and others have too, and Seed-OSS's.
MARKERS = (("<think>", "</think>"), ("<seed:think>", "</seed:think>"))
#: A template that begins the thought itself ends with its marker, and at most a token of white space.
_PROMPT_END = 2


class Markers(NamedTuple):
    """The beginning and the end of a thought: a token each, which is text."""

    begin: str
    end: str
    begin_id: int
    end_id: int

    @staticmethod
    def of(tokenizer: Any) -> Markers | None:
        """Find the markers that the chat template names and the tokenizer has; None: the model does not think aloud."""
        template = tokenizer.chat_template
        for begin, end in MARKERS if isinstance(template, str) else ():
            ids = [tokenizer(text, add_special_tokens=False).input_ids for text in (begin, end)]
            if end in template and all(len(one) == 1 and one[0] not in tokenizer.all_special_ids for one in ids):
                return Markers(begin, end, ids[0][0], ids[1][0])
        return None

    def begun(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends with the beginning of a thought."""
        last = prompt[-_PROMPT_END:]
        return self.begin_id in last and self.end_id not in last

    def tokens(self, prompt: Sequence[int], answer: Sequence[int]) -> int:
        """Tokens of the answer up to the end of its thought."""
        if not self.begun(prompt) and self.begin_id not in answer[:_PROMPT_END]:
            return 0
        return answer.index(self.end_id) + 1 if self.end_id in answer else len(answer)


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
