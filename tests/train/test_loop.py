"""The training loop: it learns, what it draws, how a step adds up, and what it refuses to go on with."""

from __future__ import annotations

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from d2sd.errors import D2SDError
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.train import products
from d2sd.train.data.draws import draw_kinds, first_errors
from d2sd.train.data.features import TrainingData, cache_features
from d2sd.train.data.packing import pack_blocks
from d2sd.train.dflash import block_hidden
from d2sd.train.dist import Dist
from d2sd.train.loop import Trainer
from d2sd.train.state import Optimizer, rate_factor
from d2sd.train_recipe import SecondSettings
from tests.train.helpers import (
    BLOCK,
    TAPS,
    VOCAB,
    exact_features,
    greedy_responses,
    greedy_tau,
    new_drafter,
    settings,
    target,
)


def quiet(step: int, said: dict[str, float]) -> None:
    pass


def trainer(data: TrainingData | None = None, first: Drafter | None = None, /, **changes: object) -> Trainer:
    drafter = new_drafter(None if first is None else 0.9)
    return Trainer(target(), drafter, data or exact_features(greedy_responses()), settings(**changes), first)


def told(made: Trainer, folder: Path) -> list[dict[str, float]]:
    """Train, and give what every step said."""
    said: list[dict[str, float]] = []
    made.run(folder, lambda step, values: said.append(values))
    return said


def parameters(made: Trainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in made.drafter.parameters()])


# --- It learns -------------------------------------------------------------------------------------------------------

LONG: dict[str, object] = {"steps": 40, "learning_rate": 1e-2, "blocks": 16, "negatives": 16, "save_every": 100}


@pytest.fixture(scope="module")
def data() -> TrainingData:
    return exact_features(greedy_responses())


@pytest.fixture(scope="module")
def first(data: TrainingData, tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    """A first drafter that has learnt two of the four answers by heart."""
    made = trainer(data.split(2)[0], **LONG)
    made.run(tmp_path_factory.mktemp("first"), quiet)
    assert isinstance(made.drafter, Drafter)
    return made.drafter


def test_first_drafter_overfits_responses(first: Drafter, data: TrainingData) -> None:
    known, unknown = data.split(2)
    assert greedy_tau(new_drafter(), known) < 0.5 * BLOCK
    assert greedy_tau(first, known) > 0.9 * BLOCK
    assert greedy_tau(first, unknown) < 0.9 * BLOCK, "by heart, not because the task is easy"


@pytest.mark.slow
def test_second_drafter_overfits_responses(first: Drafter, data: TrainingData, tmp_path: Path) -> None:
    """Two that the first one errs on, behind any number of right tokens."""
    before = [p.clone() for p in first.parameters()]
    unknown = data.split(2)[1]
    made = trainer(unknown, first, **LONG)
    assert greedy_tau(made.drafter, unknown) < 0.5 * BLOCK
    said = told(made, tmp_path)
    for visible in range(1, BLOCK):
        assert greedy_tau(made.drafter, unknown, visible) > 0.9 * BLOCK
    assert sum(values["loss"] for values in said[-5:]) < 0.5 * sum(values["loss"] for values in said[:5])
    assert all(torch.equal(a, b) for a, b in zip(before, first.parameters(), strict=True)), "the first one stays"


@pytest.mark.slow
@pytest.mark.parametrize("terms", [{"ce": 1, "focal": 0.5, "chain": 0.5}, {"lk": 1}, {"nla": 1, "tv": 0.5}], ids=str)
def test_every_objective_teaches(terms: dict[str, float], data: TrainingData, tmp_path: Path) -> None:
    """In bf16, with D-PACE's weights: the likelier paths through a step."""
    known = data.split(2)[0]
    made = trainer(known, **LONG | {"objective": {"slots": "dpace", **terms}, "precision": "bf16"})
    said = told(made, tmp_path)
    assert set(said[0]) == {"loss", "gradient norm", "learning rate", *terms}
    assert said[0]["loss"] == pytest.approx(sum(weight * said[0][name] for name, weight in terms.items()), rel=1e-5)
    assert greedy_tau(new_drafter(), known) < 1.2
    assert greedy_tau(made.drafter, known) > 2


# --- What it draws ---------------------------------------------------------------------------------------------------


def test_every_step_and_every_seed_draws_anew() -> None:
    """The same sequence in three epochs and under two seeds: other anchors, other ids, other prefixes."""
    anchors, ids = set(), set()
    for seed in (0, 1):
        made = trainer(exact_features(greedy_responses()[:1]), batch=1, seed=seed)
        for made.step in range(3):
            packed, _ = made._draw(made._draws.numbers(made.step))
            anchors.add(tuple(packed.positions[0, :, 0].tolist()))
            ids.add(tuple(made._candidates([packed], made.step).ids.tolist()))
    assert len(anchors) == len(ids) == 6


def test_candidates_hold_the_labels_of_all_micro_batches() -> None:
    """And the most frequent ids of the data, whether this step has them or not."""
    made = trainer(batch=4, frequent=5)
    batches = [made._draw(made._draws.numbers(made.step)[i : i + 1]) for i in range(4)]
    found = made._candidates([packed for packed, _ in batches], made.step)
    labels = set(torch.cat([packed.tokens.flatten() for packed, _ in batches]).tolist())
    frequent = set(made.data.frequent(5, VOCAB).nonzero()[:, 0].tolist())
    assert labels | frequent <= set(found.ids.tolist())
    assert len(found.ids) == len(labels | frequent) + 8


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_prefixes_on_rejection_end_where_the_first_drafter_errs(
    first: Drafter, data: TrainingData, share: float
) -> None:
    """On an answer that it knows and one that it does not, both in one batch."""
    made = trainer(data, first, on_rejection=share, blocks=260)
    anchors = torch.arange(4, 17).repeat(20)
    packed = pack_blocks([data[0], data[2]], [anchors, anchors], BLOCK)
    candidates = made._candidates([packed], made.step)
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    assert isinstance(made.settings, SecondSettings)
    visible, rejected = made._visible(packed, candidates, draw_kinds(made.settings, BLOCK, generators))
    said = target().logits(block_hidden(first, made._embedding, packed, torch.ones_like(visible)))
    drafted = candidates.ids[said[..., candidates.ids].argmax(-1)].flatten(0, 1)
    tokens = packed.tokens.flatten(0, 1)
    errors = first_errors(drafted, tokens).view_as(visible)
    conditioned = rejected >= 0
    assert torch.equal(visible[conditioned], errors[conditioned])
    places = visible.flatten()[conditioned.flatten(), None]
    names = rejected[conditioned]
    assert torch.equal(names, drafted[conditioned.flatten()].gather(1, places)[:, 0])
    assert (names != tokens[conditioned.flatten()].gather(1, places)[:, 0]).all(), "never the label itself"
    if share < 1:
        assert set(visible[~conditioned].tolist()) == {1, 2, 3}
    wrong, right = int((errors < BLOCK).sum()), int((errors == BLOCK).sum())
    assert min(wrong, right) > 50
    assert int(conditioned.sum()) / wrong == pytest.approx(share, abs=0.1)


def test_what_a_sequence_is_packed_with_changes_nothing_that_is_drawn(first: Drafter) -> None:
    """Answers of two lengths, one by one and together: anchors, prefixes and rejections, and the sampled ids."""
    answers = greedy_responses()[:3] + greedy_responses(4, 5, 6)[3:]
    made = trainer(exact_features(answers), first, batch=4, blocks=9)
    alone = [made._draw(made._draws.numbers(made.step)[i : i + 1]) for i in range(4)]
    wrap_ddp = made._draw(made._draws.numbers(made.step))
    candidates = made._candidates([packed for packed, _ in alone], made.step)
    assert torch.equal(candidates.ids, made._candidates([wrap_ddp[0]], made.step).ids)
    visible, rejected = made._visible(wrap_ddp[0], candidates, wrap_ddp[1])
    for row, (packed, draws) in enumerate(alone):
        blocks = packed.tokens.shape[1]
        assert torch.equal(packed.positions[0], wrap_ddp[0].positions[row, :blocks])
        found, names = made._visible(packed, candidates, draws)
        assert torch.equal(found[0], visible[row, :blocks])
        assert torch.equal(names[0], rejected[row, :blocks])


def test_a_first_drafter_sees_its_anchor_alone() -> None:
    made = trainer()
    packed, draws = made._draw(made._draws.numbers(made.step))
    visible, rejected = made._visible(packed, made._candidates([packed], made.step), draws)
    assert (visible == 1).all()
    assert (rejected == -1).all()


def test_learning_rate_warms_up_then_falls_to_a_twentieth() -> None:
    rates = [rate_factor(settings(steps=100, warmup=0.1), step) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10] == pytest.approx(1)
    assert rates[55] == pytest.approx(0.525)
    assert rates[-1] == pytest.approx(0.05, abs=0.001)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_a_training_ends_when_its_seconds_have_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate falls with the time, which is counted from the end of the first step on, and a run behind it is over."""
    times = iter([5.0, 5.0, 6.0, 9.0, 13.0, 15.0])  # begun, and after each step
    made = trainer(steps=100, seconds=10.0, warmup=0.0, learning_rate=1.0)
    places: list[float] = []
    with monkeypatch.context() as patch:
        patch.setattr("d2sd.train.loop.time", SimpleNamespace(monotonic=lambda: next(times)))
        patch.setattr("d2sd.train.state.time", SimpleNamespace(monotonic=lambda: next(times)))
        rates = []

        def report(step: int, values: dict[str, float]) -> None:
            rates.append(values["learning rate"])
            places.append(made.reached)

        made.run(tmp_path, report)
    assert places == [1, 10, 40, 80, 100]
    assert rates == [rate_factor(made.settings, place) for place in (0, *places[:-1])]
    again = trainer(steps=100, seconds=10.0, warmup=0.0, learning_rate=1.0)
    assert told(again, tmp_path) == []
    assert torch.equal(parameters(again), parameters(made))


def test_the_scheduled_rate_is_what_a_step_takes(tmp_path: Path) -> None:
    """AdamW's first step moves every weight that has a gradient by the rate itself, and its decay by rate × decay."""
    made = trainer(steps=1, warmup=0.0, weight_decay=0.0, learning_rate=1e-3)
    before = parameters(made)
    (said,) = told(made, tmp_path)
    assert said["learning rate"] == pytest.approx(1e-3)
    assert float((parameters(made) - before).abs().max()) == pytest.approx(1e-3, rel=0.01)


# --- How a step adds up ----------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("terms", [{"ce": 0.3, "kl": 0.7}, {"slots": "dpace", "lk": 1}], ids=["decay", "dpace"])
def test_micro_batches_change_nothing(terms: dict[str, object], tmp_path: Path) -> None:
    """Four answers of one length, blocks everywhere, all ids: one by one, three and one, or all at once is then the
    same sum. What is left is rounding: 1e-5 of the values, and a thousandth of the way that the weights went, since
    AdamW makes steps of the rate's size out of gradients of any.
    """
    ways = {}
    for size in (1, 3, 4):
        made = trainer(batch=4, micro_batch=size, blocks=99, negatives=VOCAB, steps=4, objective=terms)
        said = told(made, tmp_path / str(size))
        ways[size] = said, parameters(made)
    said, weights = ways.pop(1)
    way = float((weights - parameters(trainer())).norm())
    for others, found in ways.values():
        for mine, theirs in zip(said, others, strict=True):
            assert theirs == pytest.approx(mine, rel=1e-5)
        assert float((found - weights).norm()) < 1e-3 * way


def test_steps_that_are_prepared_ahead_are_the_same(first: Drafter, data: TrainingData, tmp_path: Path) -> None:
    """Another thread prepares steps ahead, as on a GPU."""
    plain, ahead = trainer(data, first), trainer(data, first)
    ahead._ahead = ThreadPoolExecutor(1)
    assert told(ahead, tmp_path / "ahead") == told(plain, tmp_path / "plain")
    assert ahead._next is not None
    assert ahead._next[0] == ahead.settings.steps - 1
    assert torch.equal(parameters(ahead), parameters(plain))


def test_a_step_is_the_mean_of_its_sequences_clipped(tmp_path: Path) -> None:
    """Plain gradient descent in place of AdamW shows the gradient itself."""
    made = trainer(batch=2, micro_batch=1, clip=0.5, learning_rate=0.125, warmup=0.0, steps=1)
    before = parameters(made)
    batches = [made._draw(made._draws.numbers(made.step)[i : i + 1]) for i in range(2)]
    candidates = made._candidates([packed for packed, _ in batches], made.step)
    losses = []
    for packed, draws in batches:
        terms = made._loss(packed, *made._visible(packed, candidates, draws), candidates)
        losses.append(0.3 * terms["ce"] + 0.7 * terms["kl"])
    mean = torch.stack(losses).mean()
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(mean, list(made.drafter.parameters()))])
    made._optimizer._parts = [torch.optim.SGD(made.drafter.parameters(), lr=9.0)]
    said = made._update()()
    assert said["loss"] == pytest.approx(float(mean.detach()), rel=1e-5)
    norm = float(gradient.norm())
    assert said["gradient norm"] == pytest.approx(norm, rel=1e-5)
    assert norm > 0.5
    torch.testing.assert_close(before - parameters(made), 0.125 * 0.5 / norm * gradient, rtol=1e-4, atol=1e-6)


def test_bf16_takes_nearly_the_same_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 keeps 8 bits: the first loss within 2 %. Emulated where the processor has no such products."""
    monkeypatch.setattr(products, "multiplies_bf16", lambda device: True)
    losses = [told(trainer(precision=p, steps=1), tmp_path / p)[0]["loss"] for p in ("fp32", "bf16")]
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["target fp32", "target bf16"])
def test_targets_and_features_of_any_precision(dtype: torch.dtype, precision: str, tmp_path: Path) -> None:
    """Features are cached in bf16 whatever the target's dtype. Three times 8 bits: within 5 % of the exact loss."""
    exact = told(trainer(steps=1), tmp_path / "exact")[0]["loss"]
    rounded = deepcopy(target()).to(dtype)
    data = cache_features(rounded, TAPS, greedy_responses(), tmp_path / "features", lambda count: None)
    made = Trainer(rounded, new_drafter(), data, settings(steps=1, precision=precision))
    assert told(made, tmp_path)[0]["loss"] == pytest.approx(exact, rel=0.05)


# --- What it refuses -------------------------------------------------------------------------------------------------


def test_a_loss_that_is_no_number_is_named_and_not_saved(tmp_path: Path) -> None:
    """Response a2 has damaged features; it comes up within the first epoch of four steps."""
    answers = greedy_responses()
    good = exact_features(answers)

    def features(number: int) -> Tensor:
        rows = torch.cat([good[number].features, good[number].hidden], -1)
        return rows * float("nan") if number == 2 else rows

    made = trainer(TrainingData(answers, len(TAPS), features), batch=1, save_every=1)
    hit = next(number for number in range(4) if made._draws.index(number) == 2)
    assert hit > 0, "a step before it is saved"
    steps: list[int] = []
    with pytest.raises(D2SDError, match="not finite") as caught:
        made.run(tmp_path, lambda step, said: steps.append(step))
    assert caught.value.where == f"step {hit + 1}"
    assert str(caught.value.found).endswith("responses a2")
    assert steps == list(range(1, hit + 1))
    with safe_open(tmp_path / "state.safetensors", "pt") as state:
        assert json.loads(state.metadata()["d2sd"])["step"] == hit
        assert all(torch.isfinite(state.get_tensor(name)).all() for name in state.keys())  # noqa: SIM118


def test_sequences_that_do_not_divide_among_processes_are_refused() -> None:
    Dist(rank=1, size=3).check(6, "first.batch")
    with pytest.raises(D2SDError, match=r"first\.batch(.|\n)*multiple of 3") as caught:
        Dist(rank=1, size=3).check(4, "first.batch")
    assert caught.value.found == 4


def stepped(optimizer: Optimizer, drafter: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.update(1e-2)
    assert all(parameter.grad is None for parameter in drafter.parameters())


def test_muon_takes_the_matrices_and_adamw_the_rest() -> None:
    """Muon's step is orthogonal: the rows of a wide matrix move in directions at right angles."""
    drafter = new_drafter()
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    stepped(Optimizer(drafter, settings(optimizer="muon", weight_decay=0)), drafter, 0)
    for name, parameter in drafter.named_parameters():
        moved = (parameter.detach() - before[name]).float()
        if moved.dim() == 1:
            assert torch.allclose(moved.abs(), torch.full_like(moved, 1e-2), rtol=1e-3), "AdamW's first step"
            continue
        spectrum = torch.linalg.svdvals(moved)
        # five Newton-Schulz iterations leave singular values between 0.7 and 1.2 of their aim
        assert float(spectrum.max() / spectrum.min()) < 2.5, name
        assert 0.1e-2 < float(moved.square().mean().sqrt()) < 0.3e-2, "as large as AdamW's, in its authors' measure"


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_what_is_remembered_survives(kind: str) -> None:
    drafter = new_drafter()
    optimizer = Optimizer(drafter, settings(optimizer=kind))
    stepped(optimizer, drafter, 0)
    saved, twin = copy.deepcopy(optimizer.tensors()), copy.deepcopy(drafter)
    stepped(optimizer, drafter, 1)
    other = Optimizer(twin, settings(optimizer=kind))
    other.restore(saved)
    stepped(other, twin, 1)
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), twin.parameters(), strict=True))
    forgetful, third = Optimizer(new_drafter(), settings(optimizer=kind)), copy.deepcopy(twin)
    assert not forgetful.tensors()
    stepped(Optimizer(third, settings(optimizer=kind)), third, 2)
    stepped(optimizer, drafter, 2)
    assert not all(torch.equal(a, b) for a, b in zip(drafter.parameters(), third.parameters(), strict=True))


@pytest.mark.slow
def test_muon_overfits_responses(tmp_path: Path) -> None:
    known = exact_features(greedy_responses()).split(2)[0]
    made = trainer(known, optimizer="muon", steps=40, learning_rate=4e-2, blocks=16, negatives=16)
    made.run(tmp_path, quiet)
    assert greedy_tau(made.drafter, known) > 0.9 * BLOCK
