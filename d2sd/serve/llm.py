"""The Python API: `LLM` opens a bundle and generates text, by an event loop in a thread. Names follow vLLM's `LLM`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Coroutine, Generator, Sequence
from concurrent.futures import Future
from threading import Thread
from types import TracebackType
from typing import Any, TypeVar

from typing_extensions import Self

from d2sd.runtime.sampling_params import SamplingParams
from d2sd.serve.completion import Completion
from d2sd.serve.prompts import Input, Message, Prompt, Sampling, Tools, conversation_inputs, prompt_inputs
from d2sd.serve.session import Opened


class LLM(Opened):
    """A bundle, loaded, with an engine that serves it. Threads may share it: their requests share the batch.

    Args:
        model: folder of the bundle.
        verify: check the hash of every file of the bundle first.
        options: of the engine, by the names in `EngineOptions`, such as `policy`, `device` and `max_batch`; what is
            left out is the recipe's. `d2sd serve --help` says what each does.

    Raises `BundleError` if the folder is not an intact bundle or lacks what the policy or the backend needs, and
    `D2SDError` for another argument that is wrong.
    """

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling_params: Sampling = None) -> list[Completion]:
        """Continue each prompt, without a chat template; completions come in the order of the prompts.

        A prompt is text, a list of token ids, `{"prompt_token_ids": [...]}` or `{"prompt": "..."}`. Raises
        `RequestError` if a prompt cannot be served; then none is.
        """
        return self._run(prompt_inputs(prompts), sampling_params)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Sampling = None,
        tools: Tools = None,
    ) -> list[Completion]:
        """Answer a conversation, or each of a list of conversations, through the target's chat template.

        A message is `{"role": "user", "content": "..."}`; roles are those of the template, mostly `system`, `user` and
        `assistant`. `tools`, in OpenAI's format, are given to the template; `d2sd.serve.tools` reads the calls in the
        answer. Raises `RequestError` if a conversation cannot be served; then none is.
        """
        return self._run(conversation_inputs(messages), sampling_params, tools)

    def stream(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Generator[str, None, None]:
        """Yield the completion of a prompt, or the answer to a conversation, in pieces as it is generated.

        The request is submitted by the first `next`. Closing the iterator early cancels the request. Several streams
        may be open at once; they share the batch. Raises `RequestError` if the prompt cannot be served.
        """
        pieces = self._session.pieces(prompt, sampling_params)
        try:
            while (piece := wait(_next(pieces))) is not None:
                yield piece
                self._session.open()  # not in a child of this process, which would wait for ever
        finally:
            submit(_close(pieces))  # without waiting: a forgotten iterator is closed in any thread

    def close(self) -> None:
        """Free the models and the K/V pools; calls of other threads end with a `RequestError`.

        The object cannot generate afterwards; `stats` stay readable.
        """
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, inputs: list[Input], sampling: Sampling, tools: Tools = None) -> list[Completion]:
        groups = self._session.requests(inputs, sampling, tools)
        return self._session.completions(wait(self._session.run(groups)))


async def _next(pieces: AsyncGenerator[str, None]) -> str | None:
    return await anext(pieces, None)


async def _close(pieces: AsyncGenerator[str, None]) -> None:
    await pieces.aclose()


T = TypeVar("T")

_loops: dict[int, asyncio.AbstractEventLoop] = {}  # by process: a forked one has no thread of its parent


def submit(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Begin a coroutine; cancelling the future cancels it. Takes no lock, so that a finalizer may call it."""
    process = os.getpid()
    if process not in _loops:
        loop = asyncio.new_event_loop()
        if _loops.setdefault(process, loop) is loop:
            Thread(target=loop.run_forever, name="d2sd-callers", daemon=True).start()
        else:  # another thread was first
            loop.close()
    return asyncio.run_coroutine_threadsafe(coroutine, _loops[process])


def wait(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine; an exception that interrupts the caller, such as KeyboardInterrupt, cancels it."""
    future = submit(coroutine)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
