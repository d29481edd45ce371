"""The parts of an engine's step: admit, prepare, launch, collect. `Engine.step` puts them together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from d2sd.policies import FirstPass, PolicyName
from d2sd.runtime.backends.model_runner import ModelRunner
from d2sd.runtime.batch import Batch, prefill_inputs
from d2sd.runtime.buckets import bucket
from d2sd.runtime.cuda_graphs.handover import Link
from d2sd.runtime.cuda_graphs.steps import DecodeSteps
from d2sd.runtime.decode import Committed, StepResult
from d2sd.runtime.memory import free_memory, plan_kv_memory
from d2sd.runtime.policy_selector import Begun, PolicySelector
from d2sd.runtime.request import Limits
from d2sd.runtime.sampling.logprobs import add_prompt_logprobs
from d2sd.runtime.scheduler import Scheduler
from d2sd.runtime.sequence import Output, Sequence
from d2sd.runtime.speculation.calibration import Calibration
from d2sd.runtime.speculation.carried import carried_draft
from d2sd.runtime.speculation.draft import Draft
from d2sd.runtime.speculation.policy import Policy
from d2sd.runtime.speculation.prompt_lookup import lookup_draft
from d2sd.runtime.stats import Clock
from d2sd.runtime.trace import StepTrace


@dataclass(frozen=True, slots=True)
class Launched:
    """A decode step whose tokens have not been read."""

    sequences: list[Sequence]  # of its rows
    policy: Policy
    result: StepResult  # overwritten by the next launch, if captured
    read: Callable[[], list[Committed]]  # waits for the step
    begun: Begun | None  # for the selector; None: its time is not measured


class StepParts:
    """What a step needs, and what one step leaves to the next."""

    def __init__(self, runner: ModelRunner, policy: Policy, limits: Limits, calibration: Calibration | None) -> None:
        """Allocates the runner's K/V pools. Raises RecipeError if they do not fit."""
        self.runner, self.policy, self.limits = runner, policy, limits
        self.selector: PolicySelector | None = None
        self.choices: Mapping[PolicyName, Policy] = {}  # that requests may choose; of the runner's models
        self._chosen: Policy | None = None  # by the only request, in place of `policy`; set by prepare
        self.calibration = None if calibration is None else calibration.to(runner.device)
        self.clock = Clock()
        self.record_trace = False  # True: `trace` holds each step's tensors until the next step
        self.trace: StepTrace | None = None
        self._launched: Launched | None = None  # the step whose tokens have not been read
        self._prefilled = False  # since the last launch
        free = free_memory(runner.device) if isinstance(limits.kv_memory, float) else None
        self.memory = plan_kv_memory(limits, runner.block_size, runner.page_bytes(limits.page_size), free)
        runner.allocate(self.memory.pool_pages, limits.page_size)
        self.steps = DecodeSteps(runner, limits, self.calibration)
        self.scheduler = Scheduler(limits, runner.block_size, self.memory.pool_pages)

    @property
    def in_force(self) -> Policy:
        """The policy of the step that was prepared last."""
        return self._chosen or self.policy

    def admit(self) -> list[Sequence]:
        """Admit waiting requests and prefill one chunk budget; returns the sequences ready to decode."""
        with self.clock.stage("prefill"):
            schedule = self.scheduler.schedule()
            self.runner.forget(schedule.discarded)
            if schedule.prefill:
                self._prefill(schedule.prefill)
        return schedule.decode

    def _prefill(self, chunks: SequenceOf[tuple[Sequence, int]]) -> None:
        hidden = self.runner.prefill(*prefill_inputs(chunks, self.runner.device))
        of_chunks = torch.split(hidden, [count for _, count in chunks])
        for (sequence, count), rows in zip(chunks, of_chunks, strict=True):
            if sequence.needs_prompt_rows:
                add_prompt_logprobs(sequence, rows, self.runner.target.logits)
            sequence.cached += count
        self._prefilled = True

    def prepare(self, sequences: list[Sequence]) -> tuple[Batch, Draft | None]:
        """Select this step's policy, which is `in_force` then, flush its drafters' pending context and pack its inputs.

        Also returns the first draft of a policy that takes it from the host. Runs on the host, outside the captured
        graph: its shapes vary per step.
        """
        alone = len(self.scheduler.running) + len(self.scheduler.waiting) == 1
        name = sequences[0].request.policy if alone else None
        self._chosen = None if name is None else self.choices[name]
        if self.selector is not None and self._chosen is None:
            context, remaining = (fmean(n) for n in zip(*((s.cached, s.remaining) for s in sequences), strict=True))
            self.policy = self.selector.choose(
                bucket(len(sequences)), _temperature(sequences), context, remaining, self.runner.pending
            )
        with self.clock.stage("commit"):
            self.runner.sync_drafters(self.in_force.required_drafters)
        batch = Batch.pack(sequences, self.runner.vocab_size, self.runner.device)
        slots, size = self.runner.block_size - 1, len(batch.anchor)
        if self.in_force.first_pass is FirstPass.PROMPT_LOOKUP:
            with self.clock.stage("draft_first"):
                return batch, lookup_draft([s.tokens for s in sequences], slots, size)
        if self.in_force.first_pass is FirstPass.CARRIED:
            return batch, carried_draft([s.next_draft for s in sequences], slots, self.runner.flex_width, size)
        return batch, None

    def _runs_ahead(self, batch: Batch, draft: Draft | None) -> bool:
        """Whether the step can run before the tokens of the one before it are read.

        The host must read them first for a draft that it makes or carries, for grammars, biases, penalties and
        log-probabilities, and for a trace, whose tensors the next step overwrites.
        """
        return draft is None and not self.record_trace and self.steps.can_capture(self.in_force, batch)

    def launch(self, sequences: list[Sequence], batch: Batch, draft: Draft | None) -> Launched:
        """Begin a decode step, which `prepare` has prepared; `retire` takes its tokens."""
        before = [] if self._launched is None else self._launched.sequences
        link = None if self.runner.capture is None else Link.pack(sequences, len(batch.anchor), before)
        result = self.steps.run(self.in_force, batch, draft, self.clock.stage, link)
        self.scheduler.launched(sequences)
        # A GPU still computes the prompts that were prefilled before the step, and then the step.
        delayed, self._prefilled = self._prefilled and self.runner.capture is not None, False
        selector = None if self._chosen else self.selector
        begun = None if selector is None or delayed else selector.begun
        return Launched(sequences, self.in_force, result, self.steps.fetch(result), begun)

    def collect(self) -> list[Output]:
        """Read the tokens of the step that was launched last, if they have not been."""
        launched, self._launched = self._launched, None
        if launched is None:
            return []
        self.scheduler.collected(launched.sequences)
        return self.retire(launched)

    def retire(self, launched: Launched) -> list[Output]:
        """Read the step's tokens (the only device sync), append them to their sequences and release finished ones.

        Tokens of sequences that have ended since the step was launched are dropped.
        """
        with self.clock.stage("retire"):
            self.clock.steps += 1
            self.trace = None
            sequences, policy, result = launched.sequences, launched.policy, launched.result
            if self.record_trace:
                accepted = replace(result.accepted, tokens=result.accepted.tokens.clamp(min=0))
                tensors = result.first, result.branches, result.tree, accepted
                self.trace = StepTrace(tuple(sequences), policy, *tensors)
            rows = launched.read()
            live = [(s, row) for s, row in zip(sequences, rows, strict=False) if s.finish is None]
            if self.selector is not None and policy in self.selector.policies:
                lengths = [row.length for _, row in live]
                self.selector.update(policy, _temperature(sequences), lengths, launched.begun)
            outputs = []
            for sequence, (count, accepted_branch, tokens, logprobs, draft) in live:
                sequence.stats.record(count, accepted_branch, policy.num_nodes, str(policy))
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
