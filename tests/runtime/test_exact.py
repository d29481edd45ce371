"""`exact`: the logits of every committed position are those of plain decoding, bit for bit, in half precision too."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache

import pytest
import torch

from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.plugins.cpu import library
from d2sd.plugins.trees import Accepted
from d2sd.runtime.batch import Batch
from d2sd.runtime.model_runner import ModelRunner, Verified
from d2sd.runtime.request import Request
from tests.runtime.cheating import CheatingRunner
from tests.runtime.helpers import make_engine, models, run_staggered, some_requests
from tests.tiny import CASES, of_case, prepared

pytestmark = pytest.mark.skipif(not library.available(), reason=f"no CPU kernels: {library.load()}")

TYPES = [torch.float32, torch.bfloat16, torch.float16]
#: Logits [V] of the position after each committed token, by seed and position.
Logits = dict[tuple[int, int], torch.Tensor]


class _Recorder:
    """Mixin: keeps the logits along every accepted path."""

    logits: Logits

    def commit(self, batch: Batch, verified: Verified, accepted: Accepted) -> None:
        super().commit(batch, verified, accepted)  # type: ignore[misc]
        for row in range(int(batch.active.sum())):
            start, seed = int(batch.where.context_len[row]), int(batch.sampling.seed[row])
            for step, node in enumerate(accepted.path[row, : accepted.count[row]].tolist()):
                self.logits[seed, start + step] = verified.at(row, node).clone()


class _Plain(_Recorder, ModelRunner):
    pass


class _Drafting(_Recorder, CheatingRunner):
    pass


def run(
    runner: _Plain | _Drafting, policy: str, requests: Sequence[Request], batch: int, chunk: int, pages: int | None
) -> tuple[list[list[int]], Logits]:
    runner.logits = {}
    order = list(range(len(requests)))
    random.Random(batch).shuffle(order)
    engine = make_engine(runner, policy, max_batch=batch, prefill_chunk=chunk, pages=pages)
    sequences = run_staggered(engine, requests, order=order, gap=1)
    return [sequence.answer for sequence in sequences], runner.logits


def in_type(dtype: torch.dtype) -> tuple[Decoder, Drafter, Drafter, FlexHead]:
    target, first, second, flex = deepcopy(models())
    return target.to(dtype), first.to(dtype), second.to(dtype), flex.to(dtype)


def requests(seeds: int) -> list[Request]:
    """Each of ten prompts and ways to sample, with as many seeds as asked."""
    return [
        replace(one, sampling=replace(one.sampling, seed=one.seed % 2**32 + 1000 * turn))
        for turn in range(seeds)
        for one in some_requests()
    ]


@cache
def plain(dtype: torch.dtype, seeds: int) -> tuple[list[list[int]], Logits]:
    """One request at a time, one token a step, prompts whole."""
    return run(_Plain(*prepared(*in_type(dtype)[:3])), "off", requests(seeds), 1, 32, None)


def check(dtype: torch.dtype, policy: str, batch: int, chunk: int, pages: int | None, seeds: int = 1) -> int:
    """Compare with `plain`; returns the committed positions."""
    answers, logits = plain(dtype, seeds)
    asked = requests(seeds)
    texts = {one.seed: [*one.prompt, *text, *[0] * 8] for one, text in zip(asked, answers, strict=True)}
    target, *drafters = in_type(dtype)
    runner = _Drafting(target, *of_case(policy, *drafters), texts)
    found, ours = run(runner, policy, asked, batch, chunk, pages)
    assert found == answers
    for place, row in ours.items():
        if place in logits:  # a step may commit past the last token that was asked for
            assert torch.equal(row, logits[place]), place
    return len(ours)


@pytest.mark.sampled(15)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("policy", CASES)
def test_logits_are_those_of_plain_decoding(policy: str, dtype: torch.dtype) -> None:
    """In a shuffled batch of 8, prompts in chunks of 3, too few pages: requests are preempted."""
    assert check(dtype, policy, 8, 3, 24) > 100


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("batch", "seeds"), [(1, 1), *(pytest.param(batch, 4, marks=pytest.mark.full) for batch in (1, 8))]
)
def test_hundreds_of_answers(batch: int, seeds: int, dtype: torch.dtype) -> None:
    """Ten by each policy, alone; or forty, at both batch sizes."""
    for policy in CASES:
        assert check(dtype, policy, batch, 5, None, seeds=seeds) > 150 * seeds
