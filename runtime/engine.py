"""The engine: requests join and leave a running batch at any step; every committed token is chosen by the target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf

from d2sd.errors import D2SDError, RequestError
from d2sd.runtime.backends.model_runner import ModelRunner
from d2sd.runtime.policy_selector import PolicySelector
from d2sd.runtime.request import Limits, Request
from d2sd.runtime.sequence import Output, Sequence
from d2sd.runtime.speculation.calibration import Calibration
from d2sd.runtime.speculation.policy import Policy
from d2sd.runtime.stats import EngineStats
from d2sd.runtime.step_parts import StepParts
from d2sd.runtime.step_times import Forecast, StepTimes, measure_step_times
from d2sd.runtime.text import Decode, TextStream


class Engine(StepParts):
    """In-flight batching over one model runner and one policy. Not thread-safe: step and submit from one thread."""

    def __init__(
        self,
        runner: ModelRunner,
        policy: Policy,
        limits: Limits,
        decode: Decode | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        """`decode` turns token ids into text; without it outputs carry ids only and stop strings are refused.

        `calibration` maps the drafters' probabilities to acceptance probabilities; without it they are used as given.
        """
        super().__init__(runner, policy, limits, calibration)
        self._decode = decode
        self._next_id = 0

    def enable_auto(
        self, policies: SequenceOf[Policy], forecast: Forecast, advance: Callable[[int], None] = lambda buckets: None,
        measure: Callable[..., StepTimes] = measure_step_times,
    ) -> None:  # fmt: skip
        """Time a step of each policy at each batch size, and choose the policy of every later step by it.

        `policies` include plain decoding and are sorted by their nodes. `measure` has the arguments of its default.
        """
        times = measure(self.runner, policies, forecast, self.limits, advance, self.steps)
        self.selector = PolicySelector(policies, times, forecast)

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Sequence:
        """Queue a request; it joins at the next step with room for it. Raises RequestError if it can never run."""
        self.check(request)
        text = TextStream(self._decode, request.stop, stop_visible=request.stop_visible) if self._decode else None
        sequence = Sequence(self._next_id, request, list(request.prompt), text)
        self.scheduler.add(sequence)
        self._next_id += 1
        return sequence

    def check(self, request: Request) -> None:
        """Raise RequestError if this engine can never serve the request."""
        self.limits.check(request, self.runner.vocab_size)
        self.scheduler.check(request)
        if request.stop and self._decode is None:
            raise RequestError(
                "stop strings need a tokenizer", where="stop",
                fix="pass token ids as stop_tokens, or give the engine `decode`",
            )  # fmt: skip
        if request.policy is not None and request.policy not in self.choices:
            raise RequestError(
                "This policy is not available.", where="policy", found=request.policy,
                expected=", ".join(self.choices) or "none: the engine has one policy",
            )  # fmt: skip

    def cancel(self, sequence: Sequence, error: D2SDError | None = None) -> None:
        """Drop a waiting or running request, with an error if given; a finished one is left unchanged."""
        if sequence.finish is None:
            sequence.finish, sequence.error = "error" if error else "cancelled", error
            self.scheduler.remove(sequence)

    @property
    def stats(self) -> EngineStats:
        """Counts for monitoring: requests, pages, prefix cache, preemptions."""
        return self.scheduler.stats(str(self.in_force))

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def stream(self, requests: Iterable[Request]) -> Iterator[Output]:
        """Submit all requests, or none if one is refused; then step until the engine is idle and yield all outputs."""
        self._submit_all(requests)
        while self.busy:
            yield from self.step()

    def generate(self, requests: Iterable[Request]) -> list[Sequence]:
        """Run requests to their end; results in the order of `requests`. If one is refused, none is submitted."""
        sequences = self._submit_all(requests)
        while any(s.finish is None for s in sequences):
            self.step()
        return sequences

    def _submit_all(self, requests: Iterable[Request]) -> list[Sequence]:
        submitted = list(requests)
        for request in submitted:
            self.check(request)
        return [self.submit(request) for request in submitted]

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """Prefill prompt chunks, launch a decode step over all sequences that are ready, and collect its tokens.

        A step that is a CUDA graph is collected by the next call, which launches another one first: the device does not
        wait for the host. A step that cannot run ahead (`_runs_ahead`), or has no pages to, is launched by the call
        after the one that collects the step before it. On a CPU every step is collected at once.
        """
        if self._launched is not None and not self.scheduler.has_pages_ahead():
            return self.collect()
        sequences = self.admit()
        if not sequences:
            return self.collect()
        batch, draft = self.prepare(sequences)
        ahead = self._runs_ahead(batch, draft)
        if self._launched is not None and not ahead:
            return self.collect()
        launched = self.launch(sequences, batch, draft)
        outputs = self.collect()
        self._launched = launched
        return outputs if ahead else self.collect()
