"""The Python API: `LLM` opens a bundle and generates text. Names follow vLLM's `LLM`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from typing_extensions import Self

from d2sd.convert.bundle.load import load_bundle
from d2sd.convert.bundle.serving import chat_request, make_engine
from d2sd.errors import RequestError
from d2sd.progress import bar
from d2sd.runtime.stats import SequenceStats
from d2sd.serve.params import SamplingParams, with_params
from d2sd.serve.structured import GrammarCompiler

if TYPE_CHECKING:
    from d2sd.convert.bundle.backends import BackendName
    from d2sd.convert.bundle.load import Bundle
    from d2sd.recipe import Policy
    from d2sd.runtime.engine import Engine
    from d2sd.runtime.grammar.grammar import Grammar
    from d2sd.runtime.request import Request
    from d2sd.runtime.sequence import FinishReason, TokenLogprobs
    from d2sd.runtime.sequence import Sequence as Running

#: One turn of a conversation: {"role": "user", "content": "..."}.
Message = Mapping[str, Any]
#: Functions that an answer may call, in OpenAI's format.
Tools = Sequence[Mapping[str, Any]] | None
#: One set of sampling parameters for all prompts, one for each prompt, or None: the defaults of the bundle's recipe.
Sampling = SamplingParams | Sequence[SamplingParams] | None


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token at one position, in the target's distribution before any sampling parameter."""

    logprob: float
    rank: int  # 1 for the likeliest token
    decoded_token: str


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one prompt; with n > 1 the first of them, and `outputs` has all."""

    prompt_token_ids: list[int]
    text: str  # without special tokens and, by default, without the stop string
    token_ids: list[int]  # generated tokens; the stop token is the last one where it ended the completion
    finish_reason: FinishReason  # "stop" or "length"
    stats: SequenceStats  # accepted lengths, tau and policies of this request
    seed: int = 0  # the same text again with this seed and n = 1
    index: int = 0  # among the n completions of the prompt
    logprobs: list[dict[int, Logprob]] | None = None  # of each token: its own and the likeliest tokens', by token id
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # the same for the prompt; None for its first token
    others: tuple[Completion, ...] = ()  # the further n - 1 completions, at index 0

    @property
    def outputs(self) -> list[Completion]:
        """All n completions of the prompt, this one first."""
        return [self, *self.others]


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
        self._grammars = GrammarCompiler(loaded)
        self._deltas: dict[Running, deque[str]] = {}  # text of running requests that no caller has taken yet
        self._finished = SequenceStats()

    def generate(self, prompts: str | Sequence[str], sampling_params: Sampling = None) -> list[Completion]:
        """Continue each prompt, as plain text without a chat template; completions come in the order of the prompts.

        Raises `RequestError` if a prompt cannot be served; then none is.
        """
        return self._run([prompts] if isinstance(prompts, str) else list(prompts), sampling_params)

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
        if not messages or isinstance(messages[0], Mapping):
            conversations = [cast("Sequence[Message]", messages)]
        else:
            conversations = [list(conversation) for conversation in cast("Sequence[Sequence[Message]]", messages)]
        return self._run(conversations, sampling_params, tools)

    def stream(self, prompt: str | Sequence[Message], sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Yield the completion of a prompt, or the answer to a conversation, in pieces as it is generated.

        The request is submitted by the first `next`. Closing the iterator early cancels the request. Several streams
        may be open at once; they share the batch. Raises `RequestError` if the prompt cannot be served.
        """
        if sampling_params is not None and sampling_params.n > 1:
            raise RequestError("A stream has one completion.", where="n", found=sampling_params.n, expected=1)
        ((running,),) = self._submit([prompt], sampling_params)
        deltas = self._deltas[running]
        try:
            while deltas or running.finish is None:
                if deltas:
                    yield deltas.popleft()
                else:
                    self._step()
            _raise_errors([running])
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

    def _run(
        self, prompts: Sequence[str | Sequence[Message]], sampling: Sampling, tools: Tools = None
    ) -> list[Completion]:
        groups = self._submit(prompts, sampling, tools)
        running = [sequence for group in groups for sequence in group]
        try:
            while any(sequence.finish is None for sequence in running):
                self._step()
            _raise_errors(running)
            return [self._completion(group) for group in groups]
        finally:
            for sequence in running:
                self._drop(sequence)

    def _completion(self, group: Sequence[Running]) -> Completion:
        """The n completions of one prompt."""
        bundle, _ = self._open()
        made = [
            _completion(sequence, index, "".join(self._deltas[sequence]), bundle.tokenizer)
            for index, sequence in enumerate(group)
        ]
        return replace(made[0], others=tuple(made[1:]))

    def _submit(
        self, prompts: Sequence[str | Sequence[Message]], sampling: Sampling, tools: Tools = None
    ) -> list[list[Running]]:
        """Queue all prompts, or none if one is refused; n requests for each."""
        bundle, engine = self._open()
        params = [sampling] * len(prompts) if sampling is None or isinstance(sampling, SamplingParams) else sampling
        if len(params) != len(prompts):
            raise RequestError(
                "There must be one SamplingParams for each prompt.", where="sampling_params",
                found=len(params), expected=len(prompts), fix="pass one for all, or a list as long as the prompts",
            )  # fmt: skip
        groups = [
            _requests(bundle, prompt, one, self._grammar(one), tools)
            for prompt, one in zip(prompts, params, strict=True)
        ]
        for requests in groups:
            engine.check(requests[0])  # they differ in their seeds only
        running = [[engine.submit(request) for request in requests] for requests in groups]
        self._deltas.update((sequence, deque()) for group in running for sequence in group)
        return running

    def _grammar(self, params: SamplingParams | None) -> Grammar | None:
        form = None if params is None else params.structured_outputs
        return None if form is None else self._grammars.compile(form)

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


def _completion(sequence: Running, index: int, text: str, tokenizer: Any) -> Completion:
    assert sequence.finish is not None
    request = sequence.request
    logprobs = prompt_logprobs = None
    if request.sampling.logprobs is not None:
        logprobs = [_by_token(entry, tokenizer) for entry in sequence.logprobs]
    if request.sampling.prompt_logprobs is not None:
        prompt_logprobs = [None, *(_by_token(entry, tokenizer) for entry in sequence.prompt_logprobs)]
    return Completion(
        list(request.prompt), text, sequence.answer, sequence.finish, sequence.stats, request.sampling.seed, index,
        logprobs, prompt_logprobs,
    )  # fmt: skip


def _by_token(entry: TokenLogprobs, tokenizer: Any) -> dict[int, Logprob]:
    """The chosen token first, then the likeliest ones."""
    ranked = [(entry.token, entry.logprob, entry.rank)]
    ranked += [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1) if token != entry.token]
    return {token: Logprob(logprob, rank, tokenizer.decode([token])) for token, logprob, rank in ranked}


def _raise_errors(running: Sequence[Running]) -> None:
    for sequence in running:
        if sequence.error is not None:
            raise sequence.error


def _requests(
    bundle: Bundle,
    prompt: str | Sequence[Message],
    params: SamplingParams | None,
    grammar: Grammar | None,
    tools: Tools,
) -> list[Request]:
    """The n requests of a prompt. A string is used without a template; messages go through the chat template."""
    defaults = bundle.recipe.sampling
    if params is None:
        params = SamplingParams(defaults.temperature, defaults.top_p, defaults.top_k, defaults.seed)
    length = defaults.max_new_tokens if params.max_tokens is None else params.max_tokens
    request = chat_request(bundle, prompt, params.for_tokens(0), length, raw=isinstance(prompt, str), tools=tools)
    return with_params(bundle, replace(request, grammar=grammar), params)
