"""`AsyncLLM`: the Python API for programs with an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType

from typing_extensions import Self

from d2sd.runtime.sampling_params import SamplingParams
from d2sd.serve.completion import Completion
from d2sd.serve.prompts import Input, Message, Prompt, Sampling, Tools, conversation_inputs, prompt_inputs
from d2sd.serve.session import Opened


class AsyncLLM(Opened):
    """A bundle, loaded, with an engine that serves it: `LLM` with coroutines for methods.

    All calls at one time share the batch. A call whose task is cancelled leaves it before the next step. One that takes
    more than `deadline` seconds raises `DeadlineExceeded`. Methods may be called from several event loops.

    Arguments are those of `LLM`. Loading takes seconds and blocks: in a running event loop, make the object by
    `await asyncio.to_thread(AsyncLLM, model)`.
    """

    async def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Sampling = None, *, deadline: float | None = None
    ) -> list[Completion]:
        """Continue each prompt, as `LLM.generate` does."""
        return await self._run(prompt_inputs(prompts), sampling_params, deadline)

    async def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Sampling = None,
        tools: Tools = None,
        *,
        deadline: float | None = None,
    ) -> list[Completion]:
        """Answer a conversation, or each of a list of conversations, as `LLM.chat` does."""
        return await self._run(conversation_inputs(messages), sampling_params, deadline, tools)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        deadline: float | None = None,
    ) -> AsyncGenerator[str, None]:
        """Yield the completion of a prompt, or the answer to a conversation, in pieces as it is generated.

        `aclose()` of the generator cancels the request.
        """
        return self._session.pieces(prompt, sampling_params, deadline)

    async def close(self) -> None:
        """End all requests, and free the models and the K/V pools; `stats` stay readable."""
        await asyncio.to_thread(self._session.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(
        self, inputs: list[Input], sampling: Sampling, deadline: float | None, tools: Tools = None
    ) -> list[Completion]:
        groups = await asyncio.to_thread(self._session.requests, inputs, sampling, tools)
        finished = await self._session.run(groups, deadline)
        return await asyncio.to_thread(self._session.completions, finished)
