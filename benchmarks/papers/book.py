"""One text, and what the drafters say behind each of its tokens: asked once, and remembered.

At T = 0, and at T = 1 with noise keyed by position, the target's text does not depend on what is drafted. So a plain
answer is the answer of every policy, and a step of any of them can be played from what its drafters propose there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from d2sd.modeling.where import Where
from d2sd.plugins.trees import Branches
from d2sd.policies import DrafterRole, DraftUse
from d2sd.runtime.batch import Batch
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.speculation.calibration import Calibration

# Shape letters: B asks, S = γ - 1 slots, M pages of the text.

#: Blocks of one pass.
_TOGETHER = 64


class Ask(NamedTuple):
    """A block that a drafter is asked for, behind the anchor at `place` of the text."""

    place: int
    role: DrafterRole = DrafterRole.FIRST
    kept: tuple[int, ...] = ()  # drafts of an earlier pass, which the block continues
    rejected: int = -1  # the token that may not follow them; -1: any may
    seed: int | None = None  # of samples at T = 1; None: as the text itself is sampled

    @property
    def use(self) -> DraftUse:
        """The use whose calibration applies to the block."""
        if self.role is DrafterRole.SECOND:
            return DraftUse.D2SD
        return DraftUse.REANCHOR if self.kept or self.rejected >= 0 else DraftUse.CHAIN


class Block(NamedTuple):
    """A proposal of a drafter: S tokens, the kept ones first, and of each the log-probability to be accepted behind
    those before it, as drafted and as calibrated; 0 of kept tokens.
    """

    tokens: tuple[int, ...]
    confidence: tuple[float, ...]
    calibrated: tuple[float, ...]


class Book:
    """Asks the drafters of a runner about one text, of which they read the whole context once."""

    def __init__(
        self, runner: ModelRunner, calibration: Calibration | None, text: Sequence[int], sampling: SamplingParams
    ) -> None:
        """`text` is a prompt and its answer, which must fit the runner's pages; `sampling` is how drafts are chosen.

        The book before it, of the same runner, cannot be asked any more.
        """
        self.text, self.slots = list(text), runner.block_size - 1
        self._runner, self._calibration, self._sampling = runner, calibration, sampling
        self._known = dict[Ask, Block]()
        pages = list(range(1, 2 + len(text) // runner.target_pool.page_size))
        assert len(pages) < runner.page_counts[0], "the text is too long for the pool"
        self._table = torch.tensor([pages])
        runner.drop(pages)
        runner.prefill(torch.tensor(self.text), [len(text)], Where(self._table, torch.zeros(1, dtype=torch.long)))
        runner.context.inject(runner.drafters)

    def ask(self, *asks: Ask) -> list[Block]:
        """The blocks of `asks`; those not asked before are drafted together."""
        new = sorted(set(asks).difference(self._known), key=lambda ask: ask.use)
        for use, own in groupby(new, key=lambda ask: ask.use):
            for some in _parts(list(own)):
                self._known.update(zip(some, self._drafted(use, some), strict=True))
        return [self._known[ask] for ask in asks]

    def _drafted(self, use: DraftUse, asks: Sequence[Ask]) -> list[Block]:
        runner, slots = self._runner, self.slots
        places = torch.tensor([ask.place for ask in asks])
        params = [self._sampling if ask.seed is None else SamplingParams(1.0, seed=ask.seed) for ask in asks]
        batch = Batch(
            anchor=torch.tensor(self.text)[places],
            where=Where(self._table.expand(len(asks), -1), places),
            active=torch.ones(len(asks), dtype=torch.bool),
            sampling=Sampling.of(params, runner.vocab_size, runner.device),
        )
        branches = Branches(
            torch.tensor([[*ask.kept, *[0] * (slots - len(ask.kept))] for ask in asks])[:, None],
            torch.tensor([[len(ask.kept)] for ask in asks]),
            torch.tensor([[ask.rejected] for ask in asks]),
        )
        draft = straight = runner.drafts.second(batch, branches, asks[0].role, 1)
        if self._calibration is not None:
            straight = self._calibration.apply(draft, batch, use, branches)
        columns = draft.top1[:, 0], draft.confidence[:, 0], straight.confidence[:, 0]
        rows = zip(asks, *(column.tolist() for column in columns), strict=True)
        return [_block(ask.kept, *row) for ask, *row in rows]


def _block(kept: tuple[int, ...], tokens: list[int], raw: list[float], calibrated: list[float]) -> Block:
    count = len(kept)
    return Block((*kept, *tokens[count:]), *((0.0,) * count + tuple(own[count:]) for own in (raw, calibrated)))


def _parts(asks: list[Ask]) -> Iterator[list[Ask]]:
    for start in range(0, len(asks), _TOGETHER):
        yield asks[start : start + _TOGETHER]
