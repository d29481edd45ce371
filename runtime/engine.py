"""The engine: requests join and leave a running batch at any step; every committed token is chosen by the target."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from itertools import product

from d2sd.errors import D2SDError, RequestError
from d2sd.modeling.kv_pool import PoolSizes
from d2sd.progress import Progress, silent
from d2sd.runtime.batch import Batch, prefill_inputs
from d2sd.runtime.cuda_graphs.inputs import Link
from d2sd.runtime.cuda_graphs.steps import DecodeSteps, Graph
from d2sd.runtime.decode import Committed, StepResult, StepTrace
from d2sd.runtime.kv_cache import KVCacheManager
from d2sd.runtime.memory import plan_kv_memory
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.policy_selector import PolicySelector
from d2sd.runtime.request import Limits, Request, bucket, buckets
from d2sd.runtime.sampling.logprobs import add_prompt_logprobs
from d2sd.runtime.scheduler import Scheduler
from d2sd.runtime.sequence import Output, Sequence
from d2sd.runtime.served_times import Choice
from d2sd.runtime.speculation.calibration import Calibration, default_scores
from d2sd.runtime.speculation.policy import Off, Policy
from d2sd.runtime.stats import COPY, Clock, EngineStats
from d2sd.runtime.step_times import Forecast, RowTimes, StepTimes, measure_step_times
from d2sd.runtime.text import Decode, TextStream
from d2sd.runtime.warm_up import warm_up


@dataclass(frozen=True, slots=True)
class Prepared:
    """A decode step that can be launched."""

    sequences: list[Sequence]  # of its rows
    policy: Policy
    batch: Batch
    rows: tuple[int, ...]  # most nodes of each request's tree
    choice: Choice | None = None  # by `auto`; None: it has not chosen the policy


@dataclass(frozen=True, slots=True)
class Launched:
    """A decode step whose tokens have not been read."""

    step: Prepared
    result: StepResult  # overwritten by the next launch, if captured
    read: Callable[[], list[Committed]]  # waits for the step
    began: float | None = None  # by the selector's clock; None: its time does not say how long such a step takes


class Engine:
    """In-flight batching over one model runner and one policy. Not thread-safe: step and submit from one thread."""

    def __init__(
        self,
        runner: ModelRunner,
        policy: Policy,
        limits: Limits,
        decode: Decode | None = None,
        calibration: Calibration | None = None,
        make_steps: type[DecodeSteps] = DecodeSteps,
    ) -> None:
        """Allocate the runner's K/V pools. Raises RecipeError if they do not fit.

        `decode` turns token ids into text; without it outputs carry ids only and stop strings are refused.
        `calibration` maps the drafters' probabilities to acceptance probabilities; without it they are used as given.
        """
        self.runner, self.policy, self.limits = runner, policy, limits
        self.selector: PolicySelector | None = None
        self.choices: Mapping[str, Policy] = {"off": Off(1)}  # that requests may make; see `offer`
        self.calibration = None if calibration is None else calibration.to(runner.device)
        self.clock = Clock()
        self.record_trace = False  # True: `trace` holds each step's tensors until the next step
        self.trace: StepTrace | None = None
        self.served: Policy = policy  # of the step that was launched last; before the first, `policy`
        self._launched: Launched | None = None  # by the last `step`, which did not read its tokens
        self._prefilled = self._interrupted = False  # prompts were prefilled since the last launch, the last retirement
        self._decode, self._next_id = decode, 0
        size, each = limits.page_size, runner.layout.bytes_of(limits.page_size)
        free = runner.free_memory(bucket(limits.max_batch)) if isinstance(limits.kv_memory, float) else None
        self.memory = plan_kv_memory(limits, runner.block_size, each, free)
        sizes = PoolSizes(self.memory.pool_pages, size, self.memory.windowed_pool_pages, self.memory.states)
        runner.allocate(sizes)
        self.allow([policy])
        self.steps = make_steps(runner, limits, self.calibration)
        pages = self.memory.pool_pages, self.memory.windowed_pool_pages or 0
        window = None if each.windowed is None else each.windowed.window
        kv_cache = KVCacheManager(limits, runner.block_size, *pages, window, self.memory.states)
        self.scheduler = Scheduler(limits, kv_cache)

    def enable_auto(
        self,
        policies: SequenceOf[Policy],
        forecast: Forecast,
        advance: Callable[[int], None] = lambda buckets: None,
        measure: Callable[..., StepTimes] = measure_step_times,
    ) -> None:
        """Time a step of each policy at each batch size, and choose the policy of every later step by it.

        `policies` include plain decoding and are sorted by their nodes. `measure` has the arguments of its default.
        """
        self.allow(policies)
        times = measure(self.runner, policies, forecast, self.limits, advance, self.steps)
        verify = None if self.runner.static_shapes else RowTimes.of(times)
        self.selector = PolicySelector(policies, times, forecast, slots=self.runner.block_size - 1, verify=verify)

    def warm_up(self, progress: Progress = silent) -> None:
        """On a GPU, do all that may be served once: before the first request, so that none waits for a compiler."""
        chosen = self.choices.values() if len(self.choices) > 1 else ()  # `off` alone: nothing was offered
        served = product(dict.fromkeys([self.policy, *chosen]), buckets(self.limits.max_batch))
        measured = None if self.selector is None else self.selector.times.seconds
        warm_up(self.runner, self.steps, self.limits, measured or served, progress)

    def offer(self, policies: Mapping[str, Policy]) -> None:
        """Let requests choose among these policies of the runner's models, and plain decoding."""
        self.allow(policies.values())
        self.choices = {**self.choices, **policies}

    def allow(self, policies: Iterable[Policy]) -> None:
        """Prepare to serve these policies: keep what requests say, if one of them copies from it."""
        if self.runner.text_pages is None and any(policy.copies for policy in policies):
            self.runner.keep_text()
            default_scores(self.runner.block_size - 1, self.runner.device)  # made now, not inside a captured step

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
        self.scheduler.kv_cache.check(request)
        if request.stop and self._decode is None:
            raise RequestError(
                "stop strings need a tokenizer",
                where="stop",
                fix="pass token ids as stop_tokens, or give the engine `decode`",
            )
        if request.policy is not None and request.policy not in self.choices:
            raise RequestError(
                "This policy is not available.",
                where="speculative.policy",
                found=request.policy,
                expected=", ".join(self.choices),
            )

    def cancel(self, sequence: Sequence, error: D2SDError | None = None) -> None:
        """Drop a waiting or running request, with an error if given; a finished one is left unchanged."""
        if sequence.finish is None:
            sequence.finish, sequence.error = "error" if error else "cancelled", error
            self.scheduler.remove(sequence)

    @property
    def stats(self) -> EngineStats:
        """Counts for monitoring: requests, pages, prefix cache, preemptions."""
        return self.scheduler.stats(str(self.served))

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
        wait for the host. A step that cannot run ahead, or has no pages to, is launched by the call after the one that
        collects the step before it. On a CPU every step is collected at once.
        """
        self._launched, outputs = self._advance(self._launched)
        return outputs

    def _advance(self, before: Launched | None) -> tuple[Launched | None, list[Output]]:
        """Launch a step, if there is one to launch, and collect the step `before` it.

        Returns the step whose tokens have not been read, and outputs. The host must read the tokens of `before` first
        for a step without a graph, and for a trace, whose tensors the next step overwrites.
        """
        if before is not None and not self.scheduler.make_room_ahead():
            return None, self.collect(before)
        sequences = self.admit()
        if not sequences:
            return None, self.collect(before)
        step = self.prepare(sequences)
        graph = self.steps.graph_for(step.policy, step.batch)
        runs_ahead = graph is not None and not self.record_trace
        if before is not None and not runs_ahead:
            return None, self.collect(before)
        launched = self.launch(step, graph, before)
        outputs = self.collect(before)
        return (launched, outputs) if runs_ahead else (None, self.collect(launched))

    def admit(self) -> list[Sequence]:
        """Admit waiting requests and prefill one chunk budget; returns the sequences ready to decode."""
        with self.clock.stage("prefill"):
            schedule = self.scheduler.schedule()
            self.runner.drop(*schedule.discarded)
            self.runner.copy_states(schedule.restored)
            if schedule.prefill:
                inputs = prefill_inputs(schedule.prefill, exact=self.runner.device == "cpu")
                add_prompt_logprobs(schedule.prefill, self.steps.prefills.run(inputs), self.runner)
                self._prefilled = self._interrupted = True
            for sequence, count in schedule.prefill:
                sequence.cached += count
            self.runner.copy_states(schedule.snapshots)
        return schedule.decode

    def prepare(self, sequences: list[Sequence]) -> Prepared:
        """Select the policy of a step over `sequences`, and pack its inputs; it need not be launched.

        Runs on the host, outside the captured graph: its shapes vary per step.
        """
        asked, choice = {one.policy for one in sequences} - {"off"} or {"off"}, None
        name = asked.pop() if len(asked) == 1 else None  # a step has one policy, that of all who speculate
        policy = self.policy if name is None else self.choices[name]
        if self.selector is not None:
            step = policy, bucket(len(sequences))
            served = self.runner.capture is None or step in self.selector.times.seconds  # others may not fit in memory
            if name is None or not served:
                choice = self.selector.choose_for(sequences, self.runner.context.pending_of(sequences))
                policy = choice.policy
        granted = (choice and choice.rows) or (policy.num_nodes,) * len(sequences)
        rows = tuple(n if one.speculates else 1 for n, one in zip(granted, sequences, strict=True))
        batch = Batch.pack(sequences, self.runner.vocab_size, self.runner.device, rows)
        return Prepared(sequences, policy, batch, rows, choice)

    def launch(self, step: Prepared, graph: Graph | None, before: Launched | None) -> Launched:
        """Begin a decode step; it replays `graph`, if that is not None.

        `before` is the step launched last, if its tokens have not been read.
        """
        began = None if self.selector is None else self.selector.clock()
        late, size = before.step.sequences if before else (), len(step.batch.anchor)
        link = None if graph is None else Link.pack(step.sequences, size, late)
        result = self.steps.run(step.policy, step.batch, self.clock.stage, link, graph=graph)
        for sequence in step.sequences if step.policy.drafters else ():
            sequence.injected.update(dict.fromkeys(step.policy.drafters, sequence.cached))
        self.scheduler.launched(step.sequences)
        self.served = step.policy
        # A GPU still computes the prompts that were prefilled before the step, and then the step.
        delayed, self._prefilled = self._prefilled and self.runner.capture is not None, False
        # A CPU leaves rows out, so that a step in which some do not speculate is not the one that was measured.
        partial = not self.runner.static_shapes and min(step.rows) < step.policy.num_nodes
        if partial and step.choice is not None and step.choice.rows is None:
            began = None
        if delayed or (before is not None and before.step.choice is None):  # of whose end the selector does not know
            began = None
        return Launched(step, result, self.steps.fetch(result, step.sequences), began)

    def collect(self, launched: Launched | None) -> list[Output]:
        """Read the tokens of a step that `launch` returned; none where it is None."""
        if launched is None:
            return []
        self.scheduler.collected(launched.step.sequences)
        return self.retire(launched)

    def retire(self, launched: Launched) -> list[Output]:
        """Read the step's tokens (the only device sync), append them to their sequences and release finished ones.

        Tokens of sequences that have ended since the step was launched are dropped.
        """
        with self.clock.stage("retire"):
            self.clock.steps += 1
            self.trace = None
            step, drafted, accepted = launched.step, launched.result.drafted, launched.result.accepted
            sequences, policy = step.sequences, step.policy
            if self.record_trace:
                accepted = replace(accepted, tokens=accepted.tokens.clamp(min=0), row=None)
                tensors = drafted.first, drafted.branches, drafted.tree, accepted, drafted.copy
                self.trace = StepTrace(tuple(sequences), policy, *tensors)
            start = time.perf_counter()
            rows = launched.read()
            began: float | None = launched.began
            waited: float | None = time.perf_counter() - start
            if self._interrupted:  # the host launched a prefill, for which a step on a GPU may have waited to be read
                began, waited = began if self.runner.capture is None else None, None
                self._interrupted = False
            found = zip(sequences, step.rows, rows, strict=False)
            live = [(s, count, row) for s, count, row in found if s.finish is None]
            if self.selector is not None and step.choice is not None:
                lengths = [row.length for *_, row in live]
                copied = [not s.speculates or policy.proposer(row.accepted_branch) == COPY for s, _, row in live]
                known = [s.acceptance for s, *_ in live]
                self.selector.update(step.choice, lengths, copied, known, began, waited)
            outputs, served = [], str(policy)
            for sequence, verified, (count, accepted_branch, tokens, logprobs) in live:
                name = served if sequence.speculates else "off"
                sequence.stats.record(count, policy.proposer(accepted_branch), verified, name)
                try:
                    outputs.append(sequence.append(tokens, logprobs))
                except Exception as error:  # a fault of one request ends that request alone
                    outputs.append(sequence.fail(error))
                if sequence.finish is not None:
                    self.scheduler.remove(sequence)
            return outputs
