"""Ranks that share a target give the tokens of one process, and exchange the bytes that docs/parallel.md says."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from d2sd.errors import D2SDError
from d2sd.modeling.tensor_parallel import Group
from d2sd.runtime.decode import Committed
from d2sd.runtime.engine import Engine
from d2sd.runtime.parallel.agreement import Heard, Said
from d2sd.runtime.parallel.leader import LeadingSteps
from d2sd.runtime.request import Limits
from d2sd.runtime.sequence import Output, Sequence
from d2sd.runtime.speculation.policy import make_policy
from tests.runtime.helpers import BLOCK, BRANCHES, BUDGET, afterwards, copies, expected, run_staggered, some_requests
from tests.runtime.recorded_graphs import RecordedGraphs
from tests.runtime.thread_ranks import Threads
from tests.tiny import PAIR_CASES

LIMITS = Limits(max_batch=4, max_context=64, page_size=4, prefill_chunk=16, kv_memory=None, prefix_cache=True)
REQUESTS = some_requests()[:6]
#: Of the pools: requests have to be preempted.
FEW_PAGES = 22
#: All policies without a FlexDraft head, which reads the target's own pages.
SHARED = PAIR_CASES


def engine_of(ranks: Threads) -> Engine:
    """The engine that all follow."""
    policy = make_policy("hybrid", block_size=BLOCK, branches=BRANCHES, row_budget=BUDGET)
    memory = (1 + FEW_PAGES) * ranks.runner.layout.bytes_of(LIMITS.page_size).page
    engine = Engine(ranks.runner, policy, replace(LIMITS, kv_memory=memory), make_steps=LeadingSteps)
    return RecordedGraphs(rerun=True).guard(engine) if ranks.captured else engine


def take_turns(engine: Engine) -> None:
    """Let every two steps be another policy's."""
    made = [make_policy(name, block_size=BLOCK, branches=BRANCHES, row_budget=BUDGET, lookup=True) for name in SHARED]
    engine.allow(made)
    step, steps = engine.step, 0

    def next_policy() -> list[Output]:
        nonlocal steps
        engine.policy = made[steps // 2 % len(made)]
        steps += 1
        return step()

    engine.step = next_policy  # type: ignore[method-assign]


def check_answers(engine: Engine) -> None:
    """Requests join and leave and are preempted, then again with prefixes in the cache."""
    preempted = 0
    for seed in (1, 2):
        order = list(range(len(REQUESTS)))
        random.Random(seed).shuffle(order)
        sequences = run_staggered(engine, REQUESTS, order=order, gap=2)
        assert [s.answer for s in sequences] == [expected(r) for r in REQUESTS]
        preempted += sum(s.stats.preemptions for s in sequences)
    assert preempted > 0
    assert engine.stats.prefix_hit_tokens > 0


def check_bytes(engine: Engine, group: Group) -> None:
    """The bytes that a step exchanges are those of the formulas in docs/parallel.md."""
    target, size, captured = engine.runner.target.config, group.shard.size, engine.runner.capture is not None
    engine.record_trace = True
    pending = [engine.submit(request) for request in REQUESTS[:3]]
    while any(s.pending for s in pending):
        engine.step()
    counted = 2 if captured else 1  # these graphs run their function again, which counts too
    checked, sent = 0, list[str]()
    afterwards(engine.runner, "send", lambda kind, *values: sent.append(kind))
    while True:
        before = group.bytes.copy()
        sent.clear()
        engine.step()
        if any(s.finish is not None for s in pending):
            break
        if sent != ["step"]:  # pages were given up, or a step was captured
            continue
        trace, added, pages = engine.trace, group.bytes - before, max(len(s.pages) for s in pending)
        assert trace is not None
        requests, nodes = trace.tree.tokens.shape
        hidden, layers = target.body.hidden_size, target.body.num_layers
        assert added["all_reduce"] == counted * 2 * layers * requests * nodes * hidden * 4
        verified = requests * nodes if captured else int(trace.tree.valid.sum())
        first = 0 if not trace.policy.drafters else requests * (BLOCK - 1)
        second = 0 if trace.branches is None else requests * trace.branches.tokens.shape[1] * (BLOCK - 1)
        assert added["gather"] == counted * (verified + first + second) * size * -(-target.vocab_size // size) * 4
        of_request = [8, 8 * pages, 8, 1, 4, 4, 8, 4, 4, 8, 8] + ([1, 8, 8, 64] if captured else [])
        assert added["broadcast"] == 4096 + sum(-(-requests * one // 8) * 8 for one in of_request)
        checked += 1
    assert checked > 1
    while engine.busy:
        engine.step()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("size", "captured"), [(2, True), (4, False), pytest.param(2, False, marks=pytest.mark.slow)])
def test_ranks_give_the_tokens_of_one(size: int, captured: bool, tmp_path: Path) -> None:
    """Four ranks of two K/V heads: every head is two ranks'. Captured, steps run ahead of the host, as on CUDA."""
    ranks = Threads(size, tmp_path, copies, LIMITS, captured=captured)
    engine = engine_of(ranks)
    take_turns(engine)
    check_answers(engine)
    check_bytes(engine, ranks.group)
    ranks.close()


def test_ranks_that_accept_other_tokens_are_found() -> None:
    """In a step behind which others have run; rows of requests that have ended may differ."""
    sequences = [Sequence(number, request, list(request.prompt), None) for number, request in enumerate(REQUESTS[:3])]
    said, heard = Said(), Heard(1)

    def step(*tokens: int, other: int = 0) -> str:
        """Run a step whose rows commit these tokens, in the other rank the last but one of them plus `other`."""
        message = said.next()
        mine = [Committed(1, 0, [token], []) for token in tokens]
        theirs = [*mine[:-2], Committed(1, 0, [tokens[-2] + other], []), mine[-1]]
        said.noting(lambda: mine, sequences)()
        heard.compare(message)
        heard.keep(lambda: theirs)
        return message

    assert not step(1, 2, 3)
    assert step(4, 5, 6)
    sequences[1].finish = "length"
    step(7, 8, 9, other=1)
    step(1, 2, 3)
    sequences[1].finish = None
    step(4, 5, 6, other=1)
    with pytest.raises(D2SDError, match="Rank 1 accepted other tokens than rank 0") as raised:
        step(7, 8, 9)
    assert "decode step 5" in str(raised.value)
