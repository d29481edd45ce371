"""The choice of `auto` over whole batches, against its formulas request by request."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from d2sd.policies import DrafterRole
from d2sd.runtime.policy_selector import _COPY_MARGIN, Asked, PolicySelector
from d2sd.runtime.request import bucket
from d2sd.runtime.served_times import StepKind
from d2sd.runtime.speculation.policy import Chain, DDTree, Hybrid, Lookup, Off, Policy
from d2sd.runtime.step_times import RowTimes, StepTimes
from tests.runtime import scalar_choice

POLICIES: tuple[Policy, ...] = (
    Off(1),
    *map(Lookup, (4, 8)),
    Chain(8),
    *(DDTree(size, lookup=copies) for size in (4, 16, 64) for copies in (False, True)),
    *(Hybrid(size, branches, lookup=True) for size, branches in ((8, 1), (32, 2), (64, 4))),
)


def forecast(dice: random.Random) -> dict[str, tuple[list[float], list[float]]]:
    """Curves that rise to at most a block, and of some policies none."""
    found = {}
    for name in ("chain", "ddtree", "ddtree+lookup", "hybrid", "hybrid+lookup", "hybrid/1"):
        if dice.random() < 0.9:
            ends = sorted(dice.uniform(1, 7) for _ in range(2))
            sampled, greedy = ([1 + (end - 1) * (1 - 0.9**n) for n in range(64)] for end in ends)
            found[name] = greedy, sampled
    return found


def selector(dice: random.Random) -> PolicySelector:
    """Step times, forecasts and what serving has shown are random; half are a CPU's, which prices rows."""
    sizes = (1, 2, 3, 4, 6, 8)
    steps = [(policy, size) for policy in POLICIES for size in sizes if isinstance(policy, Off) or dice.random() < 0.9]
    seconds = {step: dice.uniform(0.5, 1.5) * (1 + step[0].num_nodes * step[1] / 30) for step in steps}
    context = {step: dice.choice((0.0, 1e-3)) for step in steps}
    times = StepTimes(seconds, context, {role: dice.random() / 100 for role in DrafterRole})
    dice.random()  # the cases below are of these draws; in others plans may tie in their last bit
    verify = RowTimes.of(times) if dice.random() < 0.5 else None
    own = PolicySelector(POLICIES, times, forecast(dice), lambda: 0.0, verify=verify)
    own.usual.drafts = dice.choice((1.0, dice.uniform(0.02, 3)))
    own.usual.hits.chance = [dice.uniform(0.01, 0.99) for _ in own.usual.hits.chance]
    served = own.served
    served.plain, served.by_kind[StepKind.DRAFTS] = dice.uniform(0.5, 2), dice.uniform(0.5, 2)
    served.host, served._ahead = dice.choice((0.0, dice.uniform(0, 9))), verify is None and dice.random() < 0.5
    others = random.Random(served.plain)
    served.by_kind[StepKind.COPIES] = others.uniform(0.5, 2)
    own.kept[1:] = others.uniform(0.5, 1.5), others.uniform(0.5, 1.5)
    served._errors = {size: np.array([others.uniform(0.8, 1.2) for _ in POLICIES]) for size in sizes}
    return own


def asked(dice: random.Random, own: PolicySelector) -> Asked:
    """A batch of up to eight requests, none where nothing is known of them."""
    requests = [own.usual.request() for _ in range(dice.choice((0, 1, 2, 3, 5, 7, 8)))]
    for known in requests:
        known.read([dice.randrange(dice.choice((2, 9, 99))) for _ in range(dice.randrange(1, 40))])
        known.drafts, known.steps = dice.choice((1.0, 0.02, dice.uniform(0, 4))), dice.randrange(99)
        known.right, known.expected = (dice.uniform(0.1, 30) for _ in range(2))
    return Asked(
        bucket(max(1, len(requests))),
        dice.choice((0.0, 1.0, dice.random())),
        dice.uniform(0, 999),
        dice.choice((math.inf, 0.0, dice.uniform(1, 20))),
        {role: dice.randrange(99) for role in DrafterRole if dice.random() < 0.5},
        requests,
    )


@pytest.mark.parametrize("seed", range(100))
def test_a_batch_is_planned_as_its_requests_say(seed: int) -> None:
    dice = random.Random(seed)
    own = selector(dice)
    for _ in range(3):
        batch = asked(dice, own)
        found, told = own.plans(batch), [scalar_choice.plan(own, policy, batch) for policy in POLICIES]
        for place, one in enumerate(told):
            if one is None:
                assert np.isnan(found.rates[place])
                continue
            rate, seconds, rows, tokens = one
            assert found.tokens[place] == pytest.approx(tokens, rel=1e-9)
            assert found.rates[place] == pytest.approx(rate, rel=1e-9)
            assert found.seconds[place] == pytest.approx(seconds)
            assert found.rows.get(place) == rows
        chosen = own.choose(*batch)
        place = POLICIES.index(chosen.policy)
        assert told[place] is not None
        assert chosen[1:] == (
            found.seconds[place],
            batch.bucket,
            batch.temperature,
            found.rows.get(place),
            found.tokens[place],
        )


@pytest.mark.parametrize("seed", range(40))
def test_plain_decoding_holds_where_no_copy_would_be_chosen(seed: int) -> None:
    """The cost of a row is bounded from below, so that a copy that pays is never passed over."""
    dice, held, chosen = random.Random(seed), 0, 0
    for _ in range(20):
        own = selector(dice)
        batch = asked(dice, own)._replace(context=0.0, remaining=math.inf)
        if not batch.requests:
            continue
        own.verify, own.served.by_kind[StepKind.COPIES], own.served._errors = RowTimes.of(own.times), 1.0, {}
        own.served._ahead, own._held, own._requests = False, 1, len(batch.requests)
        assert not own._holds(batch), "these requests were not asked about before"
        found, off = own.plans(batch), own._places[own.off]
        copying = own.served.kinds == StepKind.COPIES
        pays = found.rates[copying] * own.kept[StepKind.COPIES] > _COPY_MARGIN * found.rates[off]
        held += own._holds(batch)
        chosen += bool(pays.any())
        assert not (pays.any() and own._holds(batch))
        own._requests += 1
        assert not own._holds(batch), "a request has ended"
    assert held
    assert chosen


@pytest.mark.parametrize("seed", range(20))
def test_what_a_copy_is_worth_is_what_its_rows_bring_above_the_price(seed: int) -> None:
    dice = random.Random(seed)
    own = selector(dice)
    for known in asked(dice, own).requests:
        for price in (0.0, 0.2, 0.7):
            expected = sum(max(0.0, chance - price) for chance in scalar_choice.run(known, 5))
            assert known.worth(price, 5) == pytest.approx(expected)
