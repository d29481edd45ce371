"""The answers of one HTTP request while they are generated: their streams, measured, and their usage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from d2sd.runtime.thought import Markers
from d2sd.serve.openai.metrics import Metrics, RequestTimer
from d2sd.serve.reasoning import Thought

if TYPE_CHECKING:
    from d2sd.runtime.sequence import FinishReason, Output, TokenLogprobs
    from d2sd.serve.stream import Stream


@dataclass(slots=True)
class Choice:
    """One answer so far."""

    index: int
    stream: Stream
    timer: RequestTimer
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    markers: Markers | None = None  # around what is thought; None: nothing is

    @property
    def seed(self) -> int:
        return self.stream.request.seed

    @property
    def reasoning(self) -> int:
        """Tokens of the thought so far."""
        return 0 if self.markers is None else self.markers.tokens(self.stream.request.prompt, self.tokens)

    def thought(self) -> Thought | None:
        """Divides the text of this answer; None: all of it is said."""
        if self.markers is None:
            return None
        return Thought(self.markers, True if self.markers.begun(self.stream.request.prompt) else None)

    @property
    def accepted(self) -> int:
        """Tokens of the answer that were drafted; the others are bonus tokens."""
        if self.stream.sequence is None or not self.tokens:
            return 0
        stats = self.stream.sequence.stats
        ends_early = stats.tokens > len(self.stream.sequence.answer)  # then the last bonus token was dropped
        return max(0, len(self.stream.sequence.answer) - stats.steps + ends_early)


class Generation:
    """Runs requests; iterate once over `outputs`, then `close`, whatever happened.

    Raises what the streams raise: the first failure ends all.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        metrics: Metrics,
        facts: dict[str, Any] | None = None,
        prompt_only: bool = False,
        markers: Markers | None = None,
    ) -> None:
        """`facts` are those of the log line. `prompt_only` leaves out the tokens that are generated, one at least."""
        self.choices = [Choice(i, stream, RequestTimer(metrics), markers=markers) for i, stream in enumerate(streams)]
        self._facts, self._closed, self._prompt_only = {} if facts is None else facts, False, prompt_only
        self._pumps: list[asyncio.Future[None]] = []

    async def run(self) -> None:
        """Generate to the end."""
        async for _ in self.outputs():
            pass

    async def outputs(self) -> AsyncIterator[tuple[Choice, Output]]:
        """The outputs of all choices as they arrive."""
        async for choice, output in self._merged():
            choice.timer.output(output)
            if self._prompt_only:
                output = replace(output, tokens=(), text="", logprobs=(), finish=output.finish and "length")
            choice.text.append(output.text)
            choice.tokens += output.tokens
            choice.logprobs += output.logprobs
            choice.finish = output.finish
            yield choice, output

    def close(self) -> None:
        """Cancel what still runs, and report all answers to the metrics and the log line. May be called twice."""
        if self._closed:
            return
        self._closed = True
        for pump in self._pumps:
            pump.cancel()
        for choice in self.choices:
            choice.stream.close()
            sequence = choice.stream.sequence
            failed = sequence is not None and sequence.error is not None
            choice.timer.end(sequence, choice.finish or ("error" if failed else "cancelled"))
        usage = self.usage()
        first = [t for choice in self.choices if (t := choice.timer.first_token) is not None]
        self._facts |= {
            "choices": len(self.choices),
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "accepted_tokens": usage["completion_tokens_details"]["accepted_prediction_tokens"],
            "finish": sorted({choice.finish or "cancelled" for choice in self.choices}),
            "seconds_to_first_token": round(min(first), 6) if first else None,
        }

    @property
    def entries(self) -> int:
        """Log-probabilities that a whole response reports."""
        count = sum(1 + len(entry.top) for choice in self.choices for entry in choice.logprobs)
        for choice in self.choices:
            prompt_logprobs = choice.stream.request.sampling.prompt_logprobs
            count += 0 if prompt_logprobs is None else len(choice.stream.request.prompt) * (1 + prompt_logprobs)
        return count

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage of all choices."""
        return usage_of(self.choices)

    async def _merged(self) -> AsyncIterator[tuple[Choice, Output]]:
        """A reader that is slow stops the pumps, and then the streams merge outputs."""
        if len(self.choices) == 1:
            async for output in self.choices[0].stream:
                yield self.choices[0], output
            return
        queue: asyncio.Queue[tuple[Choice, Output] | Exception | None] = asyncio.Queue(1)
        self._pumps = [asyncio.ensure_future(_pump(choice, queue)) for choice in self.choices]
        ended = 0
        while ended < len(self.choices):
            item = await queue.get()
            if item is None:
                ended += 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item


def usage_of(choices: Sequence[Choice]) -> dict[str, Any]:
    """OpenAI's usage. A prompt counts once, however many answers it has."""
    prompts = {id(choice.stream.request.prompt): len(choice.stream.request.prompt) for choice in choices}
    prompt, completion = sum(prompts.values()), sum(len(choice.tokens) for choice in choices)
    stats = [choice.stream.sequence.stats for choice in choices if choice.stream.sequence is not None]
    drafted = sum(answer.verified_nodes - answer.steps for answer in stats)
    # of n answers to a prompt each may find it cached, but it counts once
    cached = min(prompt, sum(answer.cached_tokens for answer in stats))
    accepted = sum(choice.accepted for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
            "reasoning_tokens": sum(choice.reasoning for choice in choices),
        },
        "prompt_tokens_details": {"cached_tokens": cached},
    }


async def _pump(choice: Choice, queue: asyncio.Queue[tuple[Choice, Output] | Exception | None]) -> None:
    try:
        async for output in choice.stream:
            await queue.put((choice, output))
        await queue.put(None)
    except Exception as error:
        await queue.put(error)
