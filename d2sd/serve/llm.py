"""The Python API: `LLM` opens a bundle and generates text. Names follow vLLM's `LLM`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from typing_extensions import Self

from d2sd.convert.bundle.load import load_bundle
from d2sd.convert.bundle.serving import chat_request, make_engine
from d2sd.errors import RequestError
from d2sd.progress import bar
from d2sd.runtime.stats import SequenceStats
from d2sd.serve.params import SamplingParams

if TYPE_CHECKING:
    from d2sd.convert.bundle.backends import BackendName
    from d2sd.convert.bundle.load import Bundle
    from d2sd.recipe import Policy
    from d2sd.runtime.engine import Engine
    from d2sd.runtime.request import Request
    from d2sd.runtime.sequence import FinishReason
    from d2sd.runtime.sequence import Sequence as Running

#: One turn of a conversation: {"role": "user", "content": "..."}.
Message = Mapping[str, Any]
#: One set of sampling parameters for all prompts, one for each prompt, or None: the defaults of the bundle's recipe.
Sampling = SamplingParams | Sequence[SamplingParams] | None


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one prompt."""

    prompt_token_ids: list[int]
    text: str  # without special tokens and without the stop string
    token_ids: list[int]  # generated tokens; the stop token is the last one where it ended the completion
    finish_reason: FinishReason  # "stop" or "length"
    stats: SequenceStats  # accepted lengths, tau and policies of this request


class LLM:
    """A bundle, loaded, with an engine that serves it. Not thread-safe: use it from one thread.

    Args:
        bundle: folder of the bundle.
        device: `cpu` or `cuda`; the device of PyTorch.
        policy: tree policy; None takes the recipe's.
        backend: `torch`, or `onnx` or `tensorrt` where the bundle has graphs or engines.
        max_batch: requests that decode together, others wait; None takes `limits.max_batch` of the recipe.
        verify: check the hash of every file of the bundle first.

    Raises `BundleError` if the folder is not an intact bundle or lacks what the policy or the backend needs.
    """

    def __init__(
        self,
        bundle: str | Path,
        *,
        device: str = "cpu",
        policy: Policy | None = None,
        backend: BackendName = "torch",
        max_batch: int | None = None,
        verify: bool = True,
    ) -> None:
        loaded = load_bundle(Path(bundle), verify=verify, progress=bar)
        engine = make_engine(loaded, policy=policy, device=device, backend=backend, max_batch=max_batch)
        self._opened: tuple[Bundle, Engine] | None = (loaded, engine)
        self._deltas: dict[Running, deque[str]] = {}  # text of running requests that no caller has taken yet
        self._finished = SequenceStats()

    def generate(self, prompts: str | Sequence[str], sampling_params: Sampling = None) -> list[Completion]:
        """Continue each prompt, as plain text without a chat template; completions come in the order of the prompts.

        Raises `RequestError` if a prompt cannot be served; then none is.
        """
        return self._run([prompts] if isinstance(prompts, str) else list(prompts), sampling_params)

    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], sampling_params: Sampling = None
    ) -> list[Completion]:
        """Answer a conversation, or each of a list of conversations, through the target's chat template.

        A message is `{"role": "user", "content": "..."}`; roles are those of the template, mostly `system`, `user` and
        `assistant`. Raises `RequestError` if a conversation cannot be served; then none is.
        """
        if not messages or isinstance(messages[0], Mapping):
            conversations = [cast("Sequence[Message]", messages)]
        else:
            conversations = [list(conversation) for conversation in cast("Sequence[Sequence[Message]]", messages)]
        return self._run(conversations, sampling_params)

    def stream(self, prompt: str | Sequence[Message], sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Yield the completion of a prompt, or the answer to a conversation, in pieces as it is generated.

        The request is submitted by the first `next`. Closing the iterator early cancels the request. Several streams
        may be open at once; they share the batch. Raises `RequestError` if the prompt cannot be served.
        """
        (running,) = self._submit([prompt], sampling_params)
        deltas = self._deltas[running]
        try:
            while deltas or running.finish is None:
                if deltas:
                    yield deltas.popleft()
                else:
                    self._step()
        finally:
            self._drop(running)

    @property
    def stats(self) -> SequenceStats:
        """Counts over all requests that have left the engine: accepted lengths, tau, policies, preemptions."""
        return self._finished

    def close(self) -> None:
        """Free the models and the K/V pools. The object cannot generate afterwards; `stats` stay readable."""
        self._opened = None
        self._deltas.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> tuple[Bundle, Engine]:
        if self._opened is None:
            raise RequestError("The LLM is closed.", fix="open the bundle again with LLM(...)")
        return self._opened

    def _run(self, prompts: Sequence[str | Sequence[Message]], sampling: Sampling) -> list[Completion]:
        running = self._submit(prompts, sampling)
        try:
            while any(sequence.finish is None for sequence in running):
                self._step()
            return [_completion(sequence, "".join(self._deltas[sequence])) for sequence in running]
        finally:
            for sequence in running:
                self._drop(sequence)

    def _submit(self, prompts: Sequence[str | Sequence[Message]], sampling: Sampling) -> list[Running]:
        """Queue all prompts, or none if one is refused."""
        bundle, engine = self._open()
        params = [sampling] * len(prompts) if sampling is None or isinstance(sampling, SamplingParams) else sampling
        if len(params) != len(prompts):
            raise RequestError(
                "There must be one SamplingParams for each prompt.", where="sampling_params",
                found=len(params), expected=len(prompts), fix="pass one for all, or a list as long as the prompts",
            )  # fmt: skip
        requests = [_request(bundle, prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        for request in requests:
            engine.check(request)
        running = [engine.submit(request) for request in requests]
        self._deltas.update((sequence, deque()) for sequence in running)
        return running

    def _step(self) -> None:
        """One engine step; its text goes to whichever call waits for it."""
        _, engine = self._open()
        for output in engine.step():
            if output.text:
                self._deltas[output.sequence].append(output.text)

    def _drop(self, sequence: Running) -> None:
        """Count a request that ended, and cancel one that its caller abandoned."""
        if self._deltas.pop(sequence, None) is not None:
            _, engine = self._open()
            engine.cancel(sequence)
            self._finished = SequenceStats.merged((self._finished, sequence.stats))


def _completion(sequence: Running, text: str) -> Completion:
    assert sequence.finish is not None
    prompt = list(sequence.request.prompt)
    return Completion(prompt, text, sequence.answer, sequence.finish, sequence.stats)


def _request(bundle: Bundle, prompt: str | Sequence[Message], params: SamplingParams | None) -> Request:
    """A string is used without a template; messages go through the chat template."""
    defaults = bundle.recipe.sampling
    if params is None:
        params = SamplingParams(defaults.temperature, defaults.top_p, defaults.top_k, defaults.seed)
    length = defaults.max_new_tokens if params.max_tokens is None else params.max_tokens
    return chat_request(bundle, prompt, params, length, raw=isinstance(prompt, str), stop=tuple(params.stop))
