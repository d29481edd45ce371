"""The other ranks' side: they run the passes that rank 0 sends, in its order, with the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from d2sd.modeling.kv_pool import PoolSizes
from d2sd.modeling.tensor_parallel import Group
from d2sd.modeling.where import Where
from d2sd.runtime.batch import Batch
from d2sd.runtime.cuda_graphs.inputs import Link
from d2sd.runtime.cuda_graphs.steps import DecodeSteps
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.parallel.agreement import Heard
from d2sd.runtime.parallel.grammars import ReceivingGrammar
from d2sd.runtime.parallel.messages import receive
from d2sd.runtime.speculation.calibration import default_scores
from d2sd.runtime.speculation.policy import Policy

#: The message that ends an engine.
END = "end"


class Follower:
    """A rank behind rank 0: its methods have the names of messages."""

    def __init__(self, runner: ModelRunner, steps: DecodeSteps, group: Group) -> None:
        self._runner, self._steps, self._group = runner, steps, group
        self._heard = Heard(group.shard.rank)

    def run(self) -> None:
        """Follow until rank 0 ends its engine. Raises PeerLost if it is gone."""
        while True:
            kind, values = receive(self._group)
            if kind == END:
                return
            action: Callable[..., Any] = getattr(self, f"on_{kind}")
            action(*values)

    def on_free_memory(self, requests: int) -> None:
        self._group.least(self._runner.free_memory(requests))

    def on_allocate(self, sizes: PoolSizes) -> None:
        self._runner.allocate(sizes)

    def on_keep_text(self) -> None:
        self._runner.keep_text()
        default_scores(self._runner.block_size - 1, self._runner.device)  # made now, not inside a captured step

    def on_drop(self, *pages: tuple[int, ...]) -> None:
        self._runner.drop(*pages)

    def on_prefill(self, tokens: Tensor, lengths: tuple[int, ...], where: Where) -> None:
        self._runner.prefill(tokens, lengths, where)

    def on_prompt_logits(self, hidden: Tensor) -> None:
        self._runner.prompt_logits(hidden.to(self._runner.device))

    def on_capture(self, policy: Policy, batch: Batch) -> None:
        self._steps.graph_for(policy, batch)

    def on_step(
        self, policy: Policy, batch: Batch, link: Link | None, captured: bool, guided: bool, checked: str
    ) -> None:
        graph = self._steps.graph_for(policy, batch) if captured else None
        if guided:
            batch = replace(batch, grammar=ReceivingGrammar(self._group))
        result = self._steps.run(policy, batch, link=link, graph=graph)
        self._heard.compare(checked)  # of an earlier step, while a GPU computes this one
        self._heard.keep(self._steps.fetch(result))
