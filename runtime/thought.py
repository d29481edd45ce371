"""The part of an answer that a model thinks before it speaks, between markers, and where its budget ends. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from d2sd.policies import MAX_BLOCK_SIZE

#: Markers of templates: Qwen3's, which DeepSeek-R1, SmolLM3, GLM and others have too, and Seed-OSS's.
MARKERS = (("<think>", "</think>"), ("<seed:think>", "</seed:think>"))
#: A template that begins the thought itself ends with its marker, and at most a token of white space.
_PROMPT_END = 2
#: Tokens behind the known text that a step may choose: its own, and those of a step that has not been read.
_REACH = 2 * MAX_BLOCK_SIZE


class Closing(NamedTuple):
    """The end of a thought, at the position where its budget is spent."""

    place: int
    #: What must be in the text that is not known yet: a token, or ~token for any other, and how far before the place.
    before: list[tuple[int, int]]


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

    def closings(self, text: Sequence[int], prompt_len: int, budget: int) -> list[Closing]:
        """Where the thought of a text must end, `budget` tokens behind its beginning; none that no step reaches yet.

        A thought begins in the prompt or with one of the answer's first tokens, which need not be known.
        """
        begun = self.begun(text[max(0, prompt_len - _PROMPT_END) : prompt_len])
        known, found = len(text), list[Closing]()
        for start in (prompt_len,) if begun else range(prompt_len + 1, prompt_len + 1 + _PROMPT_END):
            place, begins = start + budget, start > known
            if not known <= place < known + _REACH:
                continue
            if not begins and ((not begun and text[start - 1] != self.begin_id) or self.end_id in text[start:]):
                continue
            before = [(self.begin_id, budget + 1)] if begins else []
            before += [(~self.end_id, back) for back in range(1, place - max(start, known) + 1)]
            found.append(Closing(place, before))
        return found
