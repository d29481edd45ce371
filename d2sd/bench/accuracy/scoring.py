"""What an evaluation asks of a model, on our engine: generated text, and the log-likelihood of given tokens."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from d2sd.bundle.chat import render_chat
from d2sd.errors import RequestError
from d2sd.progress import Progress, silent
from d2sd.runtime.request import Request, SamplingParams
from d2sd.runtime.stats import SequenceStats

if TYPE_CHECKING:
    from d2sd.bundle.load import Bundle
    from d2sd.runtime.engine import Engine
    from d2sd.runtime.sequence import Sequence as Running

#: Tokens of the warm-up, which runs a prefill and a step once; its time is discarded.
_WARM_UP = 8
#: Generation arguments of lm-eval's tasks that are sampling parameters of the same name and meaning.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty")
#: Marks where a message that is continued ends; transformers' own, so that templates see the same text.
_END = "CONTINUE_FINAL_MESSAGE_TAG "


@dataclass(slots=True)
class Usage:
    """What the requests of one task cost."""

    seconds: float = 0.0  # of engine steps
    generated: int = 0  # tokens of generated answers
    scored: int = 0  # prompt tokens of requests for log-likelihoods
    truncated: int = 0  # prompts whose first tokens were dropped: they exceed the context
    answers: list[list[int] | float] = field(default_factory=list)  # tokens or log-likelihood, in order of the requests
    stats: SequenceStats = field(default_factory=SequenceStats)  # of generated answers


class Scorer:
    """An engine, asked for many texts or log-likelihoods at once; it batches them in flight."""

    def __init__(
        self,
        bundle: Bundle,
        engine: Engine,
        *,
        max_new_tokens: int = 256,
        chat: bool = False,
        progress: Progress = silent,
    ) -> None:
        """`max_new_tokens` limits answers of tasks without their own limit; with `chat` prompts are rendered chats."""
        self.tokenizer: Any = bundle.tokenizer
        self.chat, self._template = chat, bundle.recipe.target.template
        self.usage = Usage()
        self._stop_tokens = frozenset(bundle.stop_token_ids)
        self._engine, self._max_new_tokens, self._progress = engine, max_new_tokens, progress

    @property
    def max_prompt(self) -> int:
        """Tokens of the longest prompt that can be scored: the engine generates one token after it."""
        return self._engine.limits.max_context - 1

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        """Token ids, by default with the tokenizer's special tokens; a chat template has written them already."""
        if special is None:
            special = not self.chat
        ids: list[int] = self.tokenizer(text, add_special_tokens=special).input_ids
        return ids

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        """A conversation in the target's chat template; without a generation prompt its last message is continued."""
        if not add_generation_prompt:
            *before, last = messages
            messages = [*before, {**last, "content": last["content"] + _END}]
        text = render_chat(
            self.tokenizer, messages, self._template, "chat_template", generation_prompt=add_generation_prompt
        )
        if add_generation_prompt:
            return text
        open_part, end, _ = text.rpartition(_END.strip())
        if not end:
            raise RequestError("The chat template leaves out the last message.", where="chat_template")
        # a template that trims messages would also have trimmed the one that is continued
        return open_part if text.startswith(_END, len(open_part)) else open_part.rstrip()

    def generate(self, prompts: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Answer each (prompt, generation arguments of lm-eval); the text ends before a string of `until`.

        A prompt that does not fit the context with its answer loses its first tokens. Raises RequestError for
        arguments that the engine does not have.
        """
        finished = self._run([self._request(text, arguments) for text, arguments in prompts])
        answers = [sequence.answer for sequence, _ in finished]
        self.usage.generated += sum(map(len, answers))
        self.usage.answers += answers
        self.usage.stats = SequenceStats.merged([self.usage.stats, *(sequence.stats for sequence, _ in finished)])
        return [text for _, text in finished]

    def score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """(log-likelihood in nats, whether it is greedy) of each continuation, given its context; tokens of both.

        A context that does not fit loses its first tokens. Raises RequestError if a continuation alone is too long.
        """
        requests = []
        for context, continuation in pairs:
            if not context or len(continuation) >= self.max_prompt:
                raise RequestError(
                    "The log-likelihood needs a token of context, and room for the continuation.", where="continuation",
                    found=f"{len(context)} and {len(continuation)} tokens",
                    expected=f"1 or more, and fewer than {self.max_prompt}", fix="raise limits.max_context",
                )  # fmt: skip
            prompt = self._fitted([*context, *continuation], self.max_prompt)
            requests.append(Request(tuple(prompt), 1, SamplingParams(prompt_logprobs=0)))
        scores = []
        for (sequence, _), (_, continuation) in zip(self._run(requests), pairs, strict=True):
            rows = sequence.prompt_logprobs[len(sequence.prompt_logprobs) - len(continuation) :]
            scores.append((sum(row.logprob for row in rows), all(row.rank == 1 for row in rows)))
        self.usage.scored += sum(len(request.prompt) for request in requests)
        self.usage.answers += [score for score, _ in scores]
        return scores

    def _request(self, text: str, arguments: Mapping[str, Any]) -> Request:
        given = {name: value for name, value in arguments.items() if value is not None}
        until, length = given.pop("until", ()), int(given.pop("max_gen_toks", self._max_new_tokens))
        if not given.pop("do_sample", given.get("temperature", 0) > 0):
            given["temperature"] = 0.0
        if unknown := sorted(set(given) - set(_SAMPLING)):
            raise RequestError(
                "The task asks for a generation argument that the engine does not have.", where="generation_kwargs",
                found=", ".join(unknown), expected=", ".join(("until", "max_gen_toks", "do_sample", *_SAMPLING)),
            )  # fmt: skip
        stop = tuple(one for one in ([until] if isinstance(until, str) else until) if one)
        prompt = self._fitted(self.encode(text), self._engine.limits.max_context - length)
        return Request(tuple(prompt), length, SamplingParams(**given), self._stop_tokens, stop)

    def _fitted(self, tokens: list[int], room: int) -> list[int]:
        """The last `room` tokens; at least one, which the engine refuses where nothing fits."""
        self.usage.truncated += len(tokens) > room
        return tokens[-max(room, 1) :]

    def _run(self, requests: Sequence[Request]) -> list[tuple[Running, str]]:
        """Run requests to their end, after a warm-up; each with its text, in their order. Counts the time."""
        if not requests:
            return []
        length = min(_WARM_UP, requests[0].max_new_tokens)
        # The salt keeps the warm-up's prompt out of the prefix cache.
        self._engine.generate([replace(requests[0], max_new_tokens=length, cache_salt="warm-up")])
        texts: dict[Running, str] = {}
        start = time.perf_counter()
        with self._progress(f"{len(requests)} requests", len(requests)) as advance:
            for output in self._engine.stream(requests):
                texts[output.sequence] = texts.get(output.sequence, "") + output.text
                advance(output.finish is not None)
        self.usage.seconds += time.perf_counter() - start
        return sorted(texts.items(), key=lambda one: one[0].id)
