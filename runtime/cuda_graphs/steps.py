"""Runs decode steps: on CUDA as graphs, one launch a step, else operator by operator.

    host tensors of a batch -> one pinned buffer -> one copy -> static inputs -> graph -> one tensor that the host reads

A graph holds a whole step, from the first draft to the K/V of the committed tokens in the target's pages. Their K/V in
the drafters' pages is made by the next step's drafts (`drafting/context.py`). The state of requests whose tokens the
host has not read comes from the step before it (`Handover`), so the engine launches it while that one runs. There is
one for each (policy, batch bucket, kind of sampling), captured by `warm_ups` or at its first use; the page table always
has the width of the longest context, because attention reads `context_len` tokens of it. Drafters that the policy does
not run get this context through their queue.

Batches whose shapes vary take the other path on CUDA too: those with a grammar, log-probabilities, biases or penalties
(`Batch.has_static_shapes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from d2sd.plugins import handover
from d2sd.runtime.batch import Batch
from d2sd.runtime.cuda_graphs.inputs import Link, StaticInputs
from d2sd.runtime.cuda_graphs.prefills import PrefillGraphs
from d2sd.runtime.cuda_graphs.refusal import lacks_memory, refuse, warn_of_memory
from d2sd.runtime.decode import Committed, StepResult, Timer, decode_step
from d2sd.runtime.grammar.step import NoGrammar, StepGrammar
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import Limits, bucket, power_of_two
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.sequence import Sequence as Running
from d2sd.runtime.speculation.calibration import Calibration
from d2sd.runtime.speculation.policy import Policy

#: The kinds of sampling that have graphs of their own; see `StaticInputs.batch`.
_KINDS = SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.5)
#: And those that have none. Kernels choose the tokens of the first three too, from inputs that are not a graph's.
_REPORTED = [replace(kind, logprobs=1) for kind in _KINDS]
_CHANGED = replace(_KINDS[-1], repetition_penalty=1.1, frequency_penalty=0.1, logit_bias={0: 1.0}, logprobs=1)


class DecodeSteps:
    """The decode steps of one engine: one model runner with its pools allocated, one calibration."""

    def __init__(self, runner: ModelRunner, limits: Limits, calibration: Calibration | None = None) -> None:
        self._runner, self._calibration = runner, calibration
        self._pages = power_of_two(limits.pages_for(limits.max_context + runner.block_size))
        self._inputs: dict[int, StaticInputs] = {}  # by batch bucket
        self._graphs: dict[tuple[object, ...], Graph | None] = {}  # None: memory does not hold it
        self._most = bucket(limits.max_batch)
        self._handover = Handover(self._most, runner.device)
        self.prefills = PrefillGraphs(runner, limits)
        self.refused = False  # a capture failed: nothing is captured any more

    def graph_for(self, policy: Policy, batch: Batch) -> Graph | None:
        """The graph of this step, captured now if it is the first of its kind; None if it runs without one.

        Raises D2SDError if CUDA cannot capture the step, under `D2SD_NO_FALLBACK=1`; else that is a warning.
        """
        if self._runner.capture is None or self.refused or not batch.has_static_shapes:
            return None
        size, sampling = len(batch.anchor), batch.sampling
        key = (policy, size, sampling.any_sampled, sampling.any_filter)
        if key not in self._graphs:
            try:
                self._graphs[key] = self.capture(policy, batch)
            except Exception as error:  # of PyTorch, Triton or TensorRT
                self._graphs[key] = None
                if lacks_memory(error):
                    warn_of_memory(f"decode steps of {size} requests", error)
                else:
                    self.refused = True
                    refuse("decode steps", error)
        return self._graphs[key]

    def run(
        self, policy: Policy, batch: Batch, timer: Timer = nullcontext, link: Link | None = None, *, graph: Graph | None
    ) -> StepResult:
        """`decode_step` of tensors on the host: replays `graph`, which is `graph_for` this step, or runs operator by
        operator. The next call may overwrite its result (`fetch`).

        `link` says which rows follow from the call before. None: rows are independent and never finish (timing).
        """
        if graph is None:
            with timer("commit"):
                self._runner.context.inject(policy.drafters, batch.where)
            device = self._runner.device
            if self._runner.capture is not None:
                batch = self._as_captured(batch)
            return decode_step(self._runner, policy, batch.to(device), self._calibration, timer)
        with timer("decode"):
            size, length = graph.result.accepted.path.shape
            graph.inputs.load(batch, Link.pack([], size) if link is None else link)
            with self._runner.context.replay(size, length, policy.drafters):
                graph.replay()
        return graph.result

    def fetch(self, result: StepResult, sequences: Sequence[Running] = ()) -> Callable[[], list[Committed]]:
        """Begin to copy the tokens of the last `run`, of these requests, to the host; the function returned waits.

        Its `result.packed` may be overwritten by then.
        """
        if self._runner.capture is None or self.refused:
            return result.read  # nothing overwrites it
        wait = self._runner.capture.fetch(result.packed)
        return lambda: result.unpack(wait())

    def _as_captured(self, batch: Batch) -> Batch:
        """The batch with page tables and filters as a graph has them, so that it runs the kernels of one."""

        def wide(table: Tensor) -> Tensor:
            return torch.nn.functional.pad(table, (0, self._pages - table.shape[1]))

        return replace(batch, where=batch.where.map_tables(wide), sampling=batch.sampling.with_all_filters())

    def warm_ups(self, served: Iterable[tuple[Policy, int]]) -> list[Callable[[], object]]:
        """The work that captures the graphs of these policies and batch buckets for all kinds of sampling, and runs
        their steps without a graph once; nothing on a CPU.

        Before the first request, so that none waits; graphs of smaller batches fit in the memory of larger ones.
        """
        if self._runner.capture is None:
            return []
        largest_first = sorted(served, key=lambda pair: -pair[1])
        captured = [partial(self._warm, *pair, kind) for pair in largest_first for kind in _KINDS]
        guided = [partial(self._warm, *pair, kind, NoGrammar()) for pair in largest_first for kind in _KINDS]
        others = [partial(self._warm, *pair, kind) for pair in largest_first for kind in (*_REPORTED, _CHANGED)]
        return [*captured, *guided, *others]

    def _warm(self, policy: Policy, size: int, kind: SamplingParams, grammar: StepGrammar | None = None) -> None:
        """Capture the graph of such a step, or run it, if it has none."""
        batch = Batch.dummy(self._runner.scratch(size, 1), self._runner.vocab_size, self._runner.device, kind)
        batch = replace(batch, grammar=grammar)
        if self.graph_for(policy, batch) is None:
            self.run(policy, batch, graph=None)

    def capture(self, policy: Policy, batch: Batch) -> Graph:
        """Capture a step over inputs like these. Raises what PyTorch, Triton or TensorRT do."""
        size = len(batch.anchor)
        if size not in self._inputs:
            self._inputs[size] = StaticInputs(batch, self._pages, self._runner.device)
        return self._captured(policy, self._inputs[size], batch.sampling)

    def _captured(self, policy: Policy, inputs: StaticInputs, sampling: Sampling) -> Graph:
        assert self._runner.capture is not None
        batch = inputs.batch(sampling)
        self._runner.context.reserve(self._most, self._pages, self._runner.block_size)

        def run() -> StepResult:
            return captured_step(self._runner, policy, batch, inputs.link, self._handover, self._calibration)

        inputs.clear()  # what runs before the capture then writes to the scratch page alone
        with self._runner.context.preserved(), self._handover.kept():
            result, replay = self._runner.capture(run)
        return Graph(inputs, result, replay)


class Handover:
    """The state of the captured step that ran last, on the device."""

    @torch.inference_mode(False)
    def __init__(self, rows: int, device: str) -> None:
        #: [3, rows] int64: anchor, context length, and whether the row is still active
        self._state = torch.zeros(3, rows, dtype=torch.long, device=device)

    @torch.inference_mode()
    def begin(self, batch: Batch, link: Link) -> Batch:
        """The batch with anchors and context lengths of its late rows."""
        rows = batch.anchor, batch.where.context_len, batch.active
        anchor, context_len, active = handover.begin(*rows, link.late, link.source, self._state)
        return replace(batch, anchor=anchor, where=replace(batch.where, context_len=context_len), active=active)

    @torch.inference_mode()
    def end(self, batch: Batch, link: Link, result: StepResult) -> None:
        """Keep the state of the rows of this step."""
        count, tokens = result.accepted.count, result.accepted.tokens
        rows = batch.where.context_len, batch.active
        handover.end(*rows, tokens, count, link.limit, link.stop, self._state)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Steps that run inside do not change the state."""
        before = self._state.clone()
        try:
            yield
        finally:
            self._state.copy_(before)


def captured_step(
    runner: ModelRunner,
    policy: Policy,
    batch: Batch,
    link: Link,
    state: Handover,
    calibration: Calibration | None = None,
    timer: Timer = nullcontext,
) -> StepResult:
    """The body of a graph: `decode_step`, with what it takes from the step before and leaves to the next."""
    with timer("handover"):
        batch = state.begin(batch, link)
        runner.context.begin(len(batch.anchor), policy.drafters)
    result = decode_step(runner, policy, batch, calibration, timer)
    with timer("handover"):
        state.end(batch, link, result)
        runner.context.end()
    return result


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured step; `result` is in the graph's memory."""

    inputs: StaticInputs
    result: StepResult
    replay: Callable[[], None]
