"""`auto` on a clock of GPUs: at every batch size it serves nearly as many tokens a second as the best tree would."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from d2sd.bundle.serving import candidate_policies, forecasts
from d2sd.calibration import CalibrationFile, load_calibration
from d2sd.policies import DrafterRole
from d2sd.recipe import Tree
from d2sd.runtime.policy_selector import PolicySelector
from d2sd.runtime.request import buckets
from d2sd.runtime.served_times import Choice
from d2sd.runtime.speculation.policy import AUTO_SIZES, Chain, DDTree, Hybrid, Off, Policy
from d2sd.runtime.step_times import StepTimes
from tests.runtime.gpu_steps import TABLE, Card

ROOT = Path(__file__).parents[2]
SHIPPED = load_calibration(ROOT / "models" / "smollm2-135m" / "calibration.json")
#: Qwen3-8B's, with no copies: nothing repeats itself here.
TREE = Tree(policy="auto", block_size=16, branches=4, row_budget=64, lookup=False)
BOTH = (DrafterRole.FIRST, DrafterRole.SECOND)
BATCH = 32
#: All that could be served, far more than `auto` compares.
EVERY: list[Policy] = [Off(1), Chain(16), *map(DDTree, AUTO_SIZES)]
EVERY += [Hybrid(size, branches) for size in AUTO_SIZES for branches in (1, 2, 4)]
#: What the likeliest 1 and 2 branches bring of what 4 do, by nodes: trees that SmolLM2's drafters made of the same
#: drafts in 122 greedy steps of ten prompts.
SHARES = {4: (0.8, 1), 8: (1, 1), 12: (0.78, 1), 16: (0.67, 0.95), 24: (0.64, 0.88), 32: (0.48, 0.8), 64: (0.46, 0.88)}


@dataclass(frozen=True)
class Pair:
    """Drafters: the shipped pair's curves, with `gain` times the drafts; the second brings `second` of all of them."""

    gain: float = 1.0
    second: float | None = None  # None: what the shipped one brings
    warm: Literal["0", "1"] = "0"
    told: bool = True  # whether its calibration tells numbers of branches apart, as the shipped one does not
    near: float = 0.97  # of the best tree's tokens a second, what `auto` must make

    def tau(self, policy: Policy) -> float:
        """Tokens a step of its trees, in truth."""
        curves = SHIPPED.tau[self.warm]
        if isinstance(policy, Off):
            return 1.0
        place = policy.num_nodes - 1
        first = curves["chain" if isinstance(policy, Chain) else "ddtree"][place]
        tau = 1 + self.gain * (first - 1)
        if not policy.num_branches:
            return tau
        brings = curves["hybrid"][place] / first - 1 if self.second is None else self.second * place / (place + 3)
        shares = *SHARES[max(size for size in SHARES if size <= max(4, policy.num_nodes))], 1.0
        return tau * (1 + brings * shares[policy.num_branches // 2])

    def file(self) -> CalibrationFile:
        """The file that `d2sd calibrate` writes."""
        trees: dict[str, Callable[[int], Policy]] = {"chain": Chain, "ddtree": DDTree}
        trees["hybrid"] = lambda nodes: Hybrid(nodes, 4)
        if self.told:
            trees["hybrid/1"], trees["hybrid/2"] = lambda nodes: Hybrid(nodes, 1), lambda nodes: Hybrid(nodes, 2)
        curves = {name: [1.0, *(self.tau(make(nodes)) for nodes in range(2, 65))] for name, make in trees.items()}
        return SHIPPED.model_copy(update={"tau": {"0": curves, "1": curves}})


PAIRS = {
    "shipped": Pair(told=False),
    "shipped at T = 1": Pair(warm="1", told=False),
    "with a strong second": Pair(1.6, 0.4),
    "strong": Pair(2.5, 0.3),
    "strong, with a strong second": Pair(2.5, 0.45),
    "the same by an older calibration": Pair(2.5, 0.45, told=False, near=0.95),
}


@dataclass
class Day:
    """Requests of one batch size that are served one step after another; a clock that steps move."""

    card: Card
    pair: Pair
    batch: int
    faster: float = 1.0  # steps than the card's
    host: float = 0.0  # seconds of its work in a step, half of it before the launch
    ahead: bool = False  # a step is launched before the tokens of the one before it are read
    own: PolicySelector = field(init=False)
    now: float = 0.0

    def __post_init__(self) -> None:
        file = self.pair.file()
        names = list(forecasts(file))
        policies = candidate_policies(TREE, 64, [name for name in ("chain", "ddtree", "hybrid") if name in names], BOTH)
        times = {(policy, size): self.seconds(policy, size) for policy in policies for size in buckets(BATCH)}
        self.own = PolicySelector(policies, StepTimes.of(times), forecasts(file, TREE.branches), lambda: self.now)

    def seconds(self, policy: Policy, batch: int) -> float:
        """Seconds of a step on the device."""
        return self.card.seconds(policy, batch) / self.faster

    def rate(self, policy: Policy) -> float:
        """Tokens a second of this policy alone."""
        device = self.seconds(policy, self.batch)
        return self.batch * self.pair.tau(policy) / (max(device, self.host) if self.ahead else device + self.host)

    def serve(self, steps: int) -> float:
        """Tokens a second of so many steps: lengths differ, and in the mean are those of the policies' trees."""
        dice, known = random.Random(self.batch), [self.own.usual.request() for _ in range(self.batch)]
        begun, tokens, launched, free = self.now, 0.0, deque[tuple[Choice, float, float]](), self.now
        for _ in range(steps):
            choice = self.own.choose(self.batch, 0.0, requests=known)
            self.now += self.host / 2
            at = self.now
            free = max(free, at) + self.seconds(choice.policy, self.batch)
            launched.append((choice, at, free))
            if len(launched) <= self.ahead:
                continue
            choice, at, end = launched.popleft()
            waited = max(0.0, end - self.now)
            self.now += waited
            tau = self.pair.tau(choice.policy)
            lengths = [int(tau) + (dice.random() < tau % 1) for _ in known]
            self.own.update(choice, lengths, requests=known, began=at, waited=waited)
            self.now += self.host / 2
            tokens += self.batch * tau
        return tokens / (self.now - begun)


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("pair", PAIRS)
def test_auto_is_nearly_as_fast_as_the_best_tree_at_every_batch_size(name: str, pair: str) -> None:
    card, drafters = Card(name), PAIRS[pair]
    for batch in (1, 2, 4, 8, 16, 32):
        rates = {policy: batch * drafters.tau(policy) / card.seconds(policy, batch) for policy in EVERY}
        best = max(rates, key=lambda policy: rates[policy])
        served = Day(card, drafters, batch).serve(80)
        assert served > drafters.near * rates[best], f"at {batch}: {served / rates[best]:.3f} of {best}"


@pytest.mark.parametrize("host", [0.5, 1.5, 3.0])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("pair", [PAIRS["shipped"], PAIRS["strong"], Pair(0.01, 0.0)])
def test_auto_is_as_fast_where_the_host_is_slow(host: float, ahead: bool, pair: Pair) -> None:
    """Milliseconds of the host's work, in front of plain steps of 1 to 1.5 that run beside it or behind it.

    Where the device waits for the host, steps of any length up to the host's cost the same.
    """
    for batch in (1, 4, 8, 16, 32):
        day = Day(Card("H200 bf16"), pair, batch, faster=5.0, host=host / 1000, ahead=ahead)
        best = max(EVERY, key=day.rate)
        day.serve(20)  # until it knows the host
        served = day.serve(160)
        assert served > 0.97 * day.rate(best), f"at {batch}: {served / day.rate(best):.3f} of {best}"
        assert served > 0.99 * day.rate(EVERY[0]), "slower than plain decoding"


def test_few_branches_are_compared_in_small_trees() -> None:
    """A batch size has as many timed and captured steps as with branches that never vary, and one fewer."""
    policies = candidate_policies(TREE, 64, ["chain", "ddtree", "hybrid"], BOTH)
    pairs = [(policy.num_nodes, policy.num_branches) for policy in policies if isinstance(policy, Hybrid)]
    assert pairs == [(8, 1), (12, 1), (16, 2), (32, 2), (32, 4), (64, 4)]
    assert len(policies) == 1 + 1 + len(AUTO_SIZES) + len(pairs)
    assert len({str(policy) for policy in policies}) == len(policies)
    assert policies[-1] == Hybrid(64, 4), "an engine without a calibration serves the largest"
    one = TREE.model_copy(update={"branches": 1})
    few = [str(policy) for policy in candidate_policies(one, 12, ["hybrid"], BOTH)]
    assert few == ["off", "hybrid of 8 rows and 1 branch", "hybrid of 12 rows and 1 branch"]


def test_forecasts_of_fewer_branches_lie_between_one_pass_and_all() -> None:
    """A calibration without fewer branches is interpolated; copies add to them what they add to all branches."""
    known = forecasts(SHIPPED, 7)
    assert {name for name in known if "/" in name} == {
        f"hybrid/{n}{more}" for n in (1, 2, 4) for more in ("", "+lookup")
    }
    for warm in (0, 1):
        for nodes in (16, 24, 32, 64):
            found = [known[name][warm][nodes - 1] for name in ("ddtree", "hybrid/1", "hybrid/2", "hybrid/4", "hybrid")]
            assert found == sorted(found)
            with_copies = [known[f"{name}+lookup"][warm][nodes - 1] for name in ("hybrid/1", "hybrid")]
            assert with_copies[0] - found[1] == pytest.approx(with_copies[1] - found[-1])
    assert not [name for name in forecasts(SHIPPED) if "/" in name]
    curve = [1.0, 9.0]
    tau = {key: curves | {"hybrid/2": curve} for key, curves in SHIPPED.tau.items()}
    told = SHIPPED.model_copy(update={"tau": tau})
    assert forecasts(told, 4)["hybrid/2"] == (curve, curve)
    assert not [name for name in told.among([DrafterRole.FIRST]).tau["0"] if name.startswith("hybrid")]
