"""Rank 0's side: a model runner and decode steps that send their inputs to the other ranks first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from d2sd.errors import D2SDError
from d2sd.modeling.decoder import TargetModel
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.modeling.joining import Joining
from d2sd.modeling.kv_pool import PoolSizes
from d2sd.modeling.tensor_parallel import Group
from d2sd.modeling.where import Where
from d2sd.plugins.trees import Tree
from d2sd.policies import DrafterRole
from d2sd.runtime.batch import Batch, Prefilled
from d2sd.runtime.cuda_graphs.inputs import Link
from d2sd.runtime.cuda_graphs.steps import DecodeSteps, Graph
from d2sd.runtime.decode import Committed, StepResult, Timer
from d2sd.runtime.model_runner import ModelRunner, Verified
from d2sd.runtime.parallel.agreement import Said
from d2sd.runtime.parallel.grammars import SendingGrammar
from d2sd.runtime.parallel.messages import send
from d2sd.runtime.request import Limits
from d2sd.runtime.sequence import Sequence as Running
from d2sd.runtime.speculation.calibration import Calibration
from d2sd.runtime.speculation.policy import Policy


class Others(Protocol):
    """The processes of the other ranks."""

    group: Group

    def on_failure(self, report: Callable[[D2SDError], None]) -> None:
        """Call `report`, in another thread, when one of them ends before it should."""

    def close(self) -> None:
        """End them."""


class LeadingRunner(ModelRunner):
    """A runner whose passes all ranks run, in its order."""

    def __init__(
        self, target: TargetModel, drafters: Mapping[DrafterRole, DraftModel], block_size: int, others: Others
    ) -> None:
        super().__init__(target, drafters, block_size=block_size)
        self.others, self.group = others, others.group
        self.passes = 0  # calls of `verify`

    def send(self, kind: str, *values: object) -> None:
        """Let the other ranks run what this one is about to run."""
        send(self.group, kind, *values)

    def allocate(self, sizes: PoolSizes) -> None:
        assert not self.layout.state_bytes, "recurrent state is on one GPU"
        self.send("allocate", sizes)
        super().allocate(sizes)

    def free_memory(self, requests: int) -> int:
        """The least of all ranks'."""
        self.send("free_memory", requests)
        return self.group.least(super().free_memory(requests))

    def keep_text(self) -> None:
        self.send("keep_text")
        super().keep_text()

    def drop(self, *pages: Sequence[int]) -> None:
        if any(pages) and not self.static_shapes:  # else it does nothing
            self.send("drop", *map(tuple, pages))
        super().drop(*pages)

    def prefill(
        self, tokens: Tensor, lengths: Sequence[int], where: Where, following: Tensor | None = None
    ) -> Prefilled:
        self.send("prefill", tokens, tuple(lengths), where)
        return super().prefill(tokens, lengths, where, following)

    def prompt_logits(self, hidden: Tensor) -> Tensor:
        self.send("prompt_logits", hidden)
        return super().prompt_logits(hidden)

    def verify(self, batch: Batch, tree: Tree, joining: Joining | None = None) -> Verified:
        self.passes += 1
        return super().verify(batch, tree, joining)

    def on_failure(self, report: Callable[[D2SDError], None]) -> None:
        self.others.on_failure(report)

    @property
    def exchanged(self) -> Mapping[str, int]:
        return dict(self.group.bytes)

    def close(self) -> None:
        self.others.close()


class LeadingSteps(DecodeSteps):
    """Decode steps that all ranks run; the inputs of each are one message."""

    _runner: LeadingRunner

    def __init__(self, runner: ModelRunner, limits: Limits, calibration: Calibration | None = None) -> None:
        assert isinstance(runner, LeadingRunner)
        super().__init__(runner, limits, calibration)
        self._said = Said()
        self._graph_bytes: dict[int, Counter[str]] = {}  # of a replay, by the identity of its graph

    def run(
        self, policy: Policy, batch: Batch, timer: Timer = nullcontext, link: Link | None = None, *, graph: Graph | None
    ) -> StepResult:
        runner, plain = self._runner, replace(batch, grammar=None)
        runner.send("step", policy, plain, link, graph is not None, bool(batch.grammar), self._said.next())
        if batch.grammar is not None:
            batch = replace(batch, grammar=SendingGrammar(batch.grammar, runner.group))
        if graph is not None:
            runner.group.bytes.update(self._graph_bytes[id(graph)])
        return super().run(policy, batch, timer, link, graph=graph)

    def fetch(self, result: StepResult, sequences: Sequence[Running] = ()) -> Callable[[], list[Committed]]:
        return self._said.noting(super().fetch(result), sequences)

    def capture(self, policy: Policy, batch: Batch) -> Graph:
        """See `DecodeSteps.capture`; what the step exchanges is counted at each replay, not here."""
        runner = self._runner
        runner.send("capture", policy, batch)
        before, passes = runner.group.bytes.copy(), runner.passes
        graph = super().capture(policy, batch)
        added, runs = runner.group.bytes - before, runner.passes - passes
        self._graph_bytes[id(graph)] = Counter({name: total // runs for name, total in added.items()})
        runner.group.bytes = before
        return graph
