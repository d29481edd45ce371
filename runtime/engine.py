"""The step loop: requests join and leave at any step, and every step commits what the target itself would say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from d2sd.errors import RequestError
from d2sd.policies import FirstPass
from d2sd.runtime.backends.model_runner import ModelRunner, Verified
from d2sd.runtime.batch import Batch
from d2sd.runtime.policy_selector import Forecast, PolicySelector, profile_step_cost
from d2sd.runtime.request import Limits, Request, SamplingParams
from d2sd.runtime.sampling.sample import Sampling, sample_target
from d2sd.runtime.scheduler import Scheduler
from d2sd.runtime.sequence import FinishReason, Sequence
from d2sd.runtime.speculation.accept import Accepted, accept
from d2sd.runtime.speculation.calibration import Calibration
from d2sd.runtime.speculation.draft import Branches, Draft
from d2sd.runtime.speculation.policy import Policy
from d2sd.runtime.speculation.prompt_lookup import lookup
from d2sd.runtime.speculation.tree import Tree
from d2sd.runtime.stats import Clock
from d2sd.runtime.text import Decode, TextStream


@dataclass(frozen=True, slots=True)
class Output:
    """What one step gave one request."""

    sequence: Sequence
    tokens: tuple[int, ...]
    text: str  # what became certain; "" without a decoder
    finish: FinishReason | None


@dataclass(frozen=True, slots=True)
class StepTrace:
    """The tensors of the last decode step, for whoever wants to draw or count them."""

    sequences: tuple[Sequence, ...]
    policy: Policy
    first: Draft | None
    branches: Branches | None
    tree: Tree
    accepted: Accepted


class Engine:
    """In-flight batching over one executor and one tree policy. Not thread-safe: one thread steps and submits."""

    def __init__(
        self,
        runner: ModelRunner,
        policy: Policy,
        limits: Limits,
        decode: Decode | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        """`decode` turns token ids into text; without it outputs carry ids only and stop strings are refused.

        `calibration` straightens what the drafters say of themselves; without it they are taken at their word.
        """
        self.runner, self.policy, self.limits = runner, policy, limits
        self.selector: PolicySelector | None = None
        self._calibration = None if calibration is None else calibration.to(runner.device)
        self.clock = Clock()
        self.trace: StepTrace | None = None
        self._decode = decode
        self._scheduler = Scheduler(limits, runner.block_size)
        self._next_id = 0
        runner.allocate(self._scheduler.page_count, limits.page_size)

    def enable_auto(
        self, policies: SequenceOf[Policy], forecast: Forecast, advance: Callable[[int], None] = lambda buckets: None
    ) -> None:
        """Measure what a step of each policy costs at each batch size and serve what pays from now on.

        `policies` hold plain decoding and stand in the order of their rows.
        """
        seconds = profile_step_cost(self.runner, policies, forecast, self.limits, advance)
        self.selector = PolicySelector(policies, seconds, forecast)

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Sequence:
        """Queue a request; it joins at the next step there is room. Raises RequestError if it can never run."""
        self.check(request)
        text = TextStream(self._decode, request.stop) if self._decode else None
        sequence = Sequence(self._next_id, request, list(request.prompt), text)
        self._scheduler.add(sequence)
        self._next_id += 1
        return sequence

    def check(self, request: Request) -> None:
        """Raise RequestError where this engine can never serve the request."""
        self.limits.check(request, self.runner.vocab_size)
        self._scheduler.check(request)
        if request.stop and self._decode is None:
            raise RequestError(
                "stop strings need a tokenizer", where="stop",
                fix="pass token ids as stop_tokens, or give the engine `decode`",
            )  # fmt: skip
        if any(not s for s in request.stop):
            raise RequestError("a stop string is empty", where="stop", expected="at least one character")

    def cancel(self, sequence: Sequence) -> None:
        """Drop a request, waiting or running; one that has finished stays as it is."""
        if sequence.finish is None:
            sequence.finish = "cancelled"
            self._leave(sequence)

    @property
    def busy(self) -> bool:
        return bool(self._scheduler.waiting or self._scheduler.running)

    def stream(self, requests: Iterable[Request]) -> Iterator[Output]:
        """Submit all or, if one is refused, none; then step until all that was submitted (by anyone) has finished."""
        self._submit_all(requests)
        while self.busy:
            yield from self.step()

    def generate(self, requests: Iterable[Request]) -> list[Sequence]:
        """Run requests to their end; results in the order asked. One that is refused refuses all."""
        sequences = self._submit_all(requests)
        while any(s.finish is None for s in sequences):
            self.step()
        return sequences

    def _submit_all(self, requests: Iterable[Request]) -> list[Sequence]:
        asked = list(requests)
        for request in asked:
            self.check(request)
        return [self.submit(request) for request in asked]

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """One turn of the loop: prompt chunks, then one draft-and-verify cycle over all sequences that are ready."""
        sequences = self.admit()
        if not sequences:
            return []
        self._prepare(sequences)
        batch = self._batch(sequences)
        first = self.draft_first(batch, sequences)
        branches = self.pick_boundaries(batch, first)
        second = self.draft_second(batch, branches)
        tree = self.build_tree(batch, first, branches, second)
        verified = self.verify(batch, tree)
        accepted = self.accept(batch, tree, verified)
        self.commit(batch, verified, accepted)
        return self.retire(StepTrace(tuple(sequences), self.policy, first, branches, tree, accepted))

    def admit(self) -> list[Sequence]:
        """Let requests join, compute their prompts chunk by chunk; returns those ready to decode."""
        with self.clock.stage("prefill"):
            schedule = self._scheduler.schedule()
            for sequence, count in schedule.prefill:
                self._prefill(sequence, count)
        return schedule.decode

    def draft_first(self, batch: Batch, sequences: list[Sequence]) -> Draft | None:
        if self.policy.first_pass is FirstPass.NONE:
            return None
        with self.clock.stage("draft_first"):
            if self.policy.first_pass is FirstPass.PROMPT_LOOKUP:
                return self._look_up(batch, sequences)
            draft = self.runner.draft_first(batch, self.policy.topk)
            return self._calibrated(draft, batch, 0)

    def pick_boundaries(self, batch: Batch, first: Draft | None) -> Branches | None:
        if first is None or self.policy.second_pass is None:
            return None
        with self.clock.stage("pick_boundaries"):
            return self.policy.branches(batch, first)

    def draft_second(self, batch: Batch, branches: Branches | None) -> Draft | None:
        drafter = self.policy.second_pass
        if branches is None or drafter is None:
            return None
        with self.clock.stage("draft_second"):
            draft = self.runner.draft_second(batch, branches, drafter, self.policy.topk)
            return self._calibrated(draft, batch, drafter, branches)

    def build_tree(self, batch: Batch, first: Draft | None, branches: Branches | None, second: Draft | None) -> Tree:
        with self.clock.stage("build_tree"):
            return self.policy.build(batch, first, branches, second)

    def verify(self, batch: Batch, tree: Tree) -> Verified:
        with self.clock.stage("verify"):
            return self.runner.verify(batch, tree)

    def accept(self, batch: Batch, tree: Tree, verified: Verified) -> Accepted:
        with self.clock.stage("accept"), torch.inference_mode():
            depths = min(self.runner.block_size, self.policy.num_nodes)
            return accept(
                tree, sample_target(verified.logits, tree.depth, batch.context_len, depths, batch.sampling), depths
            )

    def commit(self, batch: Batch, verified: Verified, accepted: Accepted) -> None:
        with self.clock.stage("commit"):
            self.runner.commit(batch, verified, accepted)

    def retire(self, trace: StepTrace) -> list[Output]:
        """Read the step's tokens (its only wait for the device), hand them out, and let the finished leave."""
        with self.clock.stage("retire"):
            self.clock.steps += 1
            self.trace = trace
            accepted = trace.accepted
            counts, tokens, accepted_branches = (
                accepted.count.tolist(),
                accepted.tokens.tolist(),
                accepted.accepted_branch.tolist(),
            )
            if self.selector is not None:
                active = len(trace.sequences)
                self.selector.update(trace.policy, _temperature(trace.sequences), counts[:active])
            outputs = []
            for sequence, count, chosen, accepted_branch in zip(
                trace.sequences, counts, tokens, accepted_branches, strict=False
            ):
                sequence.cached += count
                sequence.stats.record(count, accepted_branch, trace.policy.num_nodes, str(trace.policy))
                outputs.append(self._take(sequence, chosen[:count]))
                if sequence.finish is not None:
                    self._leave(sequence)
            return outputs

    def _leave(self, sequence: Sequence) -> None:
        if sequence.pages:
            self.runner.forget(sequence.pages[0])
        self._scheduler.remove(sequence)

    # -- between host and device ---------------------------------------------------------------------------------------

    def _take(self, sequence: Sequence, tokens: list[int]) -> Output:
        """Append tokens one by one until one of them ends the answer; the rest of the step's gain is dropped."""
        request = sequence.request
        taken, text = [], ""
        for token in tokens:
            taken.append(token)
            sequence.tokens.append(token)
            if token in request.stop_tokens:
                sequence.finish = "stop"
            elif sequence.text is not None:
                text += sequence.text.feed(token)
                if sequence.text.stopped:
                    sequence.finish = "stop"
            if sequence.finish is None and len(sequence.tokens) >= len(request.prompt) + request.max_new_tokens:
                sequence.finish = "length"
            if sequence.finish is not None:
                break
        if sequence.finish is not None and sequence.text is not None:
            text += sequence.text.flush()
            if sequence.text.stopped:  # perhaps only now: the last characters, held back so far, complete a stop string
                sequence.finish = "stop"
        return Output(sequence, tuple(taken), text, sequence.finish)

    def _calibrated(self, draft: Draft, batch: Batch, drafter: int, branches: Branches | None = None) -> Draft:
        if self._calibration is None or not self.policy.uses_probabilities:
            return draft
        return self._calibration.apply(draft, batch, drafter, branches)

    def _look_up(self, batch: Batch, sequences: list[Sequence]) -> Draft:
        """What followed the last time; host work, so this policy is no part of a captured graph."""
        slots = self.runner.block_size - 1
        found = [lookup(sequence.tokens, slots) for sequence in sequences]
        found += [[]] * (len(batch.anchor) - len(found))
        tokens = torch.tensor([ids or [0] * slots for ids in found], device=self.runner.device)
        known = torch.tensor([bool(ids) for ids in found], device=self.runner.device)
        logprob = torch.where(known[:, None], 0.0, float("-inf")).expand(-1, slots)
        return Draft(tokens.view(-1, slots, 1).long(), logprob[..., None])

    def _prepare(self, sequences: list[Sequence]) -> None:
        """Choose the tree, and bring the drafters it runs up to date: what is owed differs from step to step."""
        if self.selector is not None:
            self.policy = self.selector.choose(_bucket(len(sequences)), _temperature(sequences))
        with self.clock.stage("commit"):
            self.runner.sync_drafters(self.policy.required_drafters)

    def _prefill(self, sequence: Sequence, count: int) -> None:
        """One chunk, padded to its bucket."""
        device = self.runner.device
        chunk = sequence.tokens[sequence.cached : sequence.cached + count]
        padded = min(_bucket(count), self.limits.prefill_chunk)
        self.runner.prefill(
            torch.tensor([chunk + [0] * (padded - count)], device=device),
            torch.tensor([count], device=device),
            self._page_table([sequence], 1),
            torch.tensor([sequence.cached], device=device),
        )
        sequence.cached += count

    def _batch(self, sequences: list[Sequence]) -> Batch:
        """Host state to device tensors, padded to the batch bucket."""
        device = self.runner.device
        size = _bucket(len(sequences))
        padding = [0] * (size - len(sequences))
        params = [s.request.sampling for s in sequences] + [SamplingParams()] * len(padding)
        return Batch(
            anchor=torch.tensor([s.anchor for s in sequences] + padding, device=device),
            page_table=self._page_table(sequences, size),
            context_len=torch.tensor([s.cached for s in sequences] + padding, device=device),
            active=torch.arange(size, device=device) < len(sequences),
            sampling=Sampling.of(params, self.runner.vocab_size, device),
        )

    def _page_table(self, sequences: list[Sequence], size: int) -> torch.Tensor:
        """[size, M] with M for the longest; unused entries name page 0, which holds nobody's tokens.

        On a CPU no shape is captured, and every page of padding is copied: there M is no bucket.
        """
        longest = max(len(s.pages) for s in sequences)
        width = longest if self.runner.device == "cpu" else _bucket(longest)
        table = torch.zeros(size, width, dtype=torch.long)
        for row, sequence in enumerate(sequences):
            table[row, : len(sequence.pages)] = torch.tensor(sequence.pages)
        return table.to(self.runner.device)


def _temperature(sequences: SequenceOf[Sequence]) -> float:
    """Mean over a batch."""
    return sum(s.request.sampling.temperature for s in sequences) / len(sequences)


def _bucket(count: int) -> int:
    """The next power of two: few shapes to compile or capture, at most half of the work on padding."""
    return 1 << (count - 1).bit_length()
