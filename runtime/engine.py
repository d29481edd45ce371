"""The engine: requests join and leave a running batch at any step; every committed token is chosen by the target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from statistics import fmean

from d2sd.errors import D2SDError, RequestError
from d2sd.policies import FirstPass
from d2sd.runtime.backends.model_runner import ModelRunner
from d2sd.runtime.batch import Batch, prefill_inputs
from d2sd.runtime.buckets import bucket
from d2sd.runtime.captured import DecodeSteps
from d2sd.runtime.decode import StepResult
from d2sd.runtime.memory import free_memory, plan_kv_memory
from d2sd.runtime.policy_selector import PolicySelector
from d2sd.runtime.request import Limits, Request
from d2sd.runtime.sampling.logprobs import prompt_logprobs
from d2sd.runtime.scheduler import Scheduler, prefill_calls
from d2sd.runtime.sequence import Output, Sequence
from d2sd.runtime.speculation.calibration import Calibration
from d2sd.runtime.speculation.carried import carried_draft
from d2sd.runtime.speculation.draft import Draft
from d2sd.runtime.speculation.policy import Policy
from d2sd.runtime.speculation.prompt_lookup import lookup_draft
from d2sd.runtime.stats import Clock, EngineStats
from d2sd.runtime.step_times import Forecast, StepTimes, measure_step_times
from d2sd.runtime.text import Decode, TextStream
from d2sd.runtime.trace import StepTrace


class Engine:
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
        self.runner, self.policy, self.limits = runner, policy, limits
        self.selector: PolicySelector | None = None
        self.calibration = None if calibration is None else calibration.to(runner.device)
        self.clock = Clock()
        self.record_trace = False  # True: `trace` holds each step's tensors until the next step
        self.trace: StepTrace | None = None
        self._decode = decode
        free = free_memory(runner.device) if isinstance(limits.kv_memory, float) else None
        self.memory = plan_kv_memory(limits, runner.block_size, runner.page_bytes(limits.page_size), free)
        runner.allocate(self.memory.pool_pages, limits.page_size)
        self.steps = DecodeSteps(runner, limits, self.calibration)
        self.scheduler = Scheduler(limits, runner.block_size, self.memory.pool_pages)
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
        if any(not s for s in request.stop):
            raise RequestError("a stop string is empty", where="stop", expected="at least one character")

    def cancel(self, sequence: Sequence, error: D2SDError | None = None) -> None:
        """Drop a waiting or running request, with an error if given; a finished one is left unchanged."""
        if sequence.finish is None:
            sequence.finish, sequence.error = "error" if error else "cancelled", error
            self.scheduler.remove(sequence)

    @property
    def stats(self) -> EngineStats:
        """Counts for monitoring: requests, pages, prefix cache, preemptions."""
        return self.scheduler.stats(str(self.policy))

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
        """Prefill prompt chunks, then run one decode step over all sequences that are ready."""
        sequences = self.admit()
        if not sequences:
            return []
        batch, draft = self.prepare(sequences)
        result = self.steps.run(self.policy, batch, draft, self.clock.stage)
        return self.retire(sequences, result)

    def admit(self) -> list[Sequence]:
        """Admit waiting requests and prefill one chunk budget; returns the sequences ready to decode."""
        with self.clock.stage("prefill"):
            schedule = self.scheduler.schedule()
            self.runner.forget(schedule.discarded)
            budget = self.limits.prefill_chunk
            for chunks in prefill_calls(schedule.prefill, budget, self.runner.max_prefill_requests):
                hidden = self.runner.prefill(*prefill_inputs(chunks, budget, self.runner.device))
                for row, (sequence, count) in enumerate(chunks):
                    if sequence.needs_prompt_rows:
                        found = prompt_logprobs(sequence, hidden[row, :count], self.runner.target.logits)
                        sequence.prompt_logprobs.extend(found)
                    sequence.cached += count
        return schedule.decode

    def prepare(self, sequences: list[Sequence]) -> tuple[Batch, Draft | None]:
        """Select this step's policy, flush its drafters' pending context and pack the step's inputs on the host.

        Also returns the first draft of a policy that takes it from the host. Runs outside the captured graph: its
        shapes vary per step.
        """
        if self.selector is not None:
            context, remaining = (fmean(n) for n in zip(*((s.cached, s.remaining) for s in sequences), strict=True))
            self.policy = self.selector.choose(
                bucket(len(sequences)), _temperature(sequences), context, remaining, self.runner.pending
            )
        with self.clock.stage("commit"):
            self.runner.sync_drafters(self.policy.required_drafters)
        batch = Batch.pack(sequences, self.runner.vocab_size, self.runner.device)
        slots, size = self.runner.block_size - 1, len(batch.anchor)
        if self.policy.first_pass is FirstPass.PROMPT_LOOKUP:
            with self.clock.stage("draft_first"):
                return batch, lookup_draft([s.tokens for s in sequences], slots, size)
        if self.policy.first_pass is FirstPass.CARRIED:
            return batch, carried_draft([s.next_draft for s in sequences], slots, self.runner.flex_width, size)
        return batch, None

    def retire(self, sequences: list[Sequence], result: StepResult) -> list[Output]:
        """Read the step's tokens (the only device sync), append them to their sequences and release finished ones."""
        with self.clock.stage("retire"):
            self.clock.steps += 1
            self.trace = None
            if self.record_trace:
                tensors = result.first, result.branches, result.tree, result.accepted
                self.trace = StepTrace(tuple(sequences), self.policy, *tensors)
            rows = result.read()[: len(sequences)]
            if self.selector is not None:
                self.selector.update(self.policy, _temperature(sequences), [count for count, *_ in rows])
            outputs = []
            for sequence, (count, accepted_branch, tokens, logprobs, draft) in zip(sequences, rows, strict=True):
                sequence.stats.record(count, accepted_branch, self.policy.num_nodes, str(self.policy))
                try:
                    outputs.append(sequence.append(tokens, logprobs))
                    sequence.carry(draft)
                except Exception as error:  # a fault of one request ends that request alone
                    outputs.append(sequence.fail(error))
                if sequence.finish is not None:
                    self.scheduler.remove(sequence)
            return outputs


def _temperature(sequences: SequenceOf[Sequence]) -> float:
    """Mean temperature of a batch."""
    return fmean(s.request.sampling.temperature for s in sequences)
