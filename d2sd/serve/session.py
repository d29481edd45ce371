"""A session behind `LLM` and `AsyncLLM`: an open bundle whose engine runs in a thread and serves many callers."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING
from weakref import WeakSet, finalize

from typing_extensions import Unpack

from d2sd.bundle.devices import check_device
from d2sd.bundle.options import EngineKeywords, EngineOptions, naming_options
from d2sd.bundle.serving import make_engine, offer_choices
from d2sd.errors import D2SDError, RequestError
from d2sd.progress import bar
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.stats import SequenceStats
from d2sd.serve.async_engine import AsyncEngine
from d2sd.serve.completion import Completion, make_completion
from d2sd.serve.errors import EngineFailed, ShuttingDown
from d2sd.serve.prompts import Input, Message, Prompt, Sampling, Tools, each_params, input_of, make_requests
from d2sd.serve.structured import GrammarCompiler
from d2sd.typed import WRONG_TYPE, typed

if TYPE_CHECKING:
    from d2sd.bundle.load import Bundle
    from d2sd.runtime.engine import Engine
    from d2sd.runtime.request import Request
    from d2sd.runtime.sequence import Sequence as Finished
    from d2sd.serve.stream import Stream


class Opened:
    """The part that `LLM` and `AsyncLLM` share: their arguments, the session, and its counts."""

    @naming_options
    def __init__(self, model: str | Path, *, verify: bool = True, **options: Unpack[EngineKeywords]) -> None:
        of_engine = EngineOptions.of(options, WRONG_TYPE, strict=True)
        folder = Path(typed(model, str | Path, "model", D2SDError))
        self._session = Session(folder, of_engine, verify=typed(verify, bool, "verify", D2SDError))

    @property
    def stats(self) -> SequenceStats:
        """Counts over all requests that have left the engine: accepted lengths, tau, policies, preemptions."""
        return self._session.stats

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._session})"


class Session:
    """A loaded bundle with an engine, for any number of threads and event loops at once.

    The engine's thread starts with the first request: it alone steps the engine, so requests of all callers share the
    batch, and what interrupts a caller, such as Ctrl-C, never interrupts a step.
    """

    def __init__(self, model: Path, options: EngineOptions, *, verify: bool) -> None:
        check_device(options.device)
        bundle = options.load(model, verify=verify, progress=bar)
        self._name = f"{str(model)!r}, policy={options.policy or bundle.recipe.tree.policy!r}"
        self._name += f", device={options.device!r}, backend={options.backend!r}"
        try:
            engine = make_engine(bundle, options)
            offer_choices(bundle, engine)
        except BaseException:
            if bundle.ranks is not None:
                bundle.ranks.close()
            raise
        self._opened: tuple[Bundle, Engine] | None = (bundle, engine)
        self._grammars = GrammarCompiler(bundle)
        self._tokenizing = Lock()  # tokenizers change their own state while they encode
        self._lock = Lock()  # guards the rest
        self._service: tuple[AsyncEngine, finalize[..., Session]] | None = None
        self._finished = SequenceStats()
        self._refused = False  # in a fork
        _SESSIONS.add(self)

    def __repr__(self) -> str:
        return self._name + (", closed" if self._opened is None else "")

    def requests(self, inputs: Sequence[Input], sampling: Sampling, tools: Tools = None) -> list[list[Request]]:
        """The n requests of each input. Raises `RequestError` if one of them can never be served."""
        bundle, engine = self.open()
        params = each_params(sampling, len(inputs))
        forms = [None if item is None else item.structured_outputs for item in params]
        grammars = [None if form is None else self._grammars.compile(form) for form in forms]
        with self._tokenizing:
            groups = [make_requests(bundle, *args, tools=tools) for args in zip(inputs, params, grammars, strict=True)]
        for requests in groups:
            engine.check(requests[0])  # they differ in their seeds only
        return groups

    async def run(
        self, groups: Sequence[Sequence[Request]], deadline: float | None = None
    ) -> list[list[tuple[Finished, str]]]:
        """Run requests to their end, together with those of other callers; returns each with its text.

        When the task is cancelled, or one of them fails, all leave the batch. Raises what `AsyncEngine.generate` does.
        """
        requests = [request for group in groups for request in group]
        async with Running(self, requests, deadline, interval=sys.maxsize) as streams:
            answers = iter([await _read(stream) for stream in streams])
        return [[next(answers) for _ in group] for group in groups]

    async def pieces(
        self, prompt: Prompt | Sequence[Message], sampling: SamplingParams | None, deadline: float | None = None
    ) -> AsyncGenerator[str, None]:
        """Yield the text of a completion as it is generated; closing the generator cancels the request."""
        if isinstance(sampling, SamplingParams) and sampling.n != 1:
            raise RequestError("A stream has one completion.", where="n", found=sampling.n, expected=1)
        ((request,),) = await asyncio.to_thread(self.requests, [input_of(prompt)], sampling)
        async with Running(self, [request], deadline) as (stream,):
            async for output in stream:
                if output.text:
                    yield output.text

    def completions(self, groups: Sequence[Sequence[tuple[Finished, str]]]) -> list[Completion]:
        """The n completions of each prompt."""
        bundle, _ = self.open()
        return [make_completion(group, lambda token: bundle.tokenizer.decode([token])) for group in groups]

    @property
    def stats(self) -> SequenceStats:
        """Counts over all requests that have left the engine."""
        return self._finished

    def close(self) -> None:
        """End all requests, and free the models and the K/V pools."""
        with self._lock:
            service, self._service = self._service, None
            opened, self._opened = self._opened, None
        if service is not None:
            service[1]()
        if opened is not None and not self._refused:
            opened[1].runner.close()

    def open(self) -> tuple[Bundle, Engine]:
        """The bundle and the engine. Raises `RequestError` after `close`, and in forks that cannot have them."""
        if self._refused:
            raise RequestError("An LLM that is at work, or has several processes, cannot be forked.", fix=_AGAIN)
        opened = self._opened
        if opened is None:
            raise _closed()
        return opened

    def forked(self) -> None:
        """In a child of this process, leave the parent's threads alone, and refuse what they have not finished."""
        service, self._service = self._service, None
        at_work = self._lock.locked() or self._tokenizing.locked()
        self._lock, self._tokenizing = Lock(), Lock()
        if service is not None:
            at_work = at_work or service[0].live > 0
            service[1].detach()
        if self._opened is not None:
            bundle, engine = self._opened
            self._grammars = GrammarCompiler(bundle)
            self._refused = at_work or engine.busy or bundle.ranks is not None

    def _served(self) -> AsyncEngine:
        """The engine in its thread."""
        with self._lock:
            _, engine = self.open()
            if self._service is None:
                service = AsyncEngine(engine, max_waiting=sys.maxsize)
                service.launch()
                # The thread keeps the engine alive, not the session: it ends with it.
                self._service = (service, finalize(self, service.halt))
            return self._service[0]

    async def _leave(self, streams: Sequence[Stream]) -> None:
        """Cancel what still runs, wait until the engine has dropped it, and count."""
        for stream in streams:
            stream.close()
        for stream in streams:
            with suppress(D2SDError):
                async for _ in stream:
                    pass
        left = [stream.sequence.stats for stream in streams if stream.sequence is not None]
        with self._lock:
            self._finished = SequenceStats.merged((self._finished, *left))


@dataclass
class Running:
    """The streams of requests, which leave the engine with the block.

    A class, not a generator: an event loop that ends closes all generators at once, also one that another is closing.
    """

    session: Session
    requests: Sequence[Request]
    deadline: float | None
    interval: int = 1
    streams: list[Stream] = field(default_factory=list)

    async def __aenter__(self) -> list[Stream]:
        deadline = typed(self.deadline, float | None, "deadline")
        with _told_to_callers():
            self.streams = self.session._served().submit(self.requests, deadline=deadline, interval=self.interval)
        return self.streams

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.session._leave(self.streams)
        with _told_to_callers():
            if isinstance(error, (ShuttingDown, EngineFailed)):
                raise error


@contextmanager
def _told_to_callers() -> Iterator[None]:
    """Raise what ends the engine in the words of the Python API."""
    try:
        yield
    except ShuttingDown:
        raise _closed() from None
    except EngineFailed as error:
        raise EngineFailed("The engine failed.", found=error.found, fix=_AGAIN) from None


async def _read(stream: Stream) -> tuple[Finished, str]:
    text = "".join([output.text async for output in stream])
    assert stream.sequence is not None
    return stream.sequence, text


_AGAIN = "open the bundle again with LLM(...)"


def _closed() -> RequestError:
    return RequestError("The LLM is closed.", fix=_AGAIN)


#: Those of this process, for its children.
_SESSIONS: WeakSet[Session] = WeakSet()


def _forked() -> None:
    for session in _SESSIONS:
        session.forked()


os.register_at_fork(after_in_child=_forked)
