"""Ranks that share a target, as threads with groups of their own: tests/d2sd/bundle/test_ranks.py has the processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

from d2sd.errors import D2SDError
from d2sd.modeling.decoder import TargetModel
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.modeling.shard import Shard
from d2sd.modeling.tensor_parallel import Group, connect, cut
from d2sd.policies import DrafterRole
from d2sd.runtime.cuda_graphs.steps import DecodeSteps
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.parallel.follower import END, Follower
from d2sd.runtime.parallel.join import join
from d2sd.runtime.parallel.leader import LeadingRunner
from d2sd.runtime.parallel.messages import send
from d2sd.runtime.request import Limits
from tests.runtime.helpers import BLOCK
from tests.runtime.recorded_graphs import RecordedGraphs
from tests.tiny import prepared


class Threads:
    """The ranks of a target; this thread is rank 0, whose runner is `runner`. Steps are captured where asked."""

    def __init__(
        self,
        size: int,
        folder: Path,
        models: Callable[[], tuple[Any, ...]],
        limits: Limits,
        *,
        captured: bool = False,
        block_size: int = BLOCK,
    ) -> None:
        self._errors: list[BaseException] = []
        self._folder, self.captured, self._make = folder, captured, models
        self._limits, self._block_size = limits, block_size
        self._threads = [Thread(target=self._follow, args=(Shard(rank, size),), daemon=True) for rank in range(1, size)]
        for thread in self._threads:
            thread.start()
        (target, drafters), self.group = self._joined(Shard(0, size))
        self.runner = LeadingRunner(target, drafters, block_size, self)

    def _joined(self, shard: Shard) -> tuple[tuple[TargetModel, dict[DrafterRole, DraftModel]], Group]:
        target, first, second, *_ = self._make()
        cut(target, shard)
        group = join(shard, self._folder, "cpu")
        connect(target, group)
        return prepared(target, first, second), group

    def _follow(self, shard: Shard) -> None:
        try:
            models, group = self._joined(shard)
            runner = ModelRunner(*models, block_size=self._block_size)
            if self.captured:
                runner.capture, runner.static_shapes = RecordedGraphs(rerun=True), True
            Follower(runner, DecodeSteps(runner, self._limits), group).run()
        except BaseException as error:
            self._errors.append(error)
            raise

    def on_failure(self, report: Callable[[D2SDError], None]) -> None:
        """Threads do not end."""

    def close(self) -> None:
        send(self.group, END)
        for thread in self._threads:
            thread.join(10)
        assert not self._errors
