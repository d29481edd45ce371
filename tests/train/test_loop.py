"""The training loop: it learns, what it learns from is aligned, and an interruption changes no bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from d2sd.errors import D2SDError
from d2sd.modeling.drafter import Drafter
from d2sd.train.blocks import blocks_at
from d2sd.train.estimate import estimate_tau
from d2sd.train.features import FeatureCache
from d2sd.train.loop import Trainer
from d2sd.train.objectives import first_errors
from d2sd.train_recipe import TrainSettings
from tests.train.helpers import BLOCK, MASK, exact_features, greedy_answers, new_drafter, settings, target


def quiet(step: int, loss: float) -> None:
    pass


def no_sampling(data: FeatureCache | None = None, first: Drafter | None = None, **changes: object) -> Trainer:
    """A trainer over the whole vocabulary, so that its loss can be computed by hand."""
    drafter = new_drafter(None if first is None else 0.9)
    return Trainer(
        target(), drafter, data or exact_features(greedy_answers()), settings(negatives=64, **changes), first
    )


def loss_of(trainer: Trainer, index: int = 0, seed: int = 0, draw: int = 0) -> Tensor:
    """The loss of one sequence in fp32; `seed` decides its blocks, `draw` the sampled ids."""
    candidates, correction = trainer._candidates(torch.Generator().manual_seed(draw))
    head = target().head.detach()[candidates]
    return trainer._loss(trainer.data[index], head, correction, torch.Generator().manual_seed(seed))


LONG = settings(steps=40, learning_rate=1e-2, blocks=16, negatives=16, save_every=100)


# --- It learns --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data() -> FeatureCache:
    return exact_features(greedy_answers())


@pytest.fixture(scope="module")
def first(data: FeatureCache, tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    """A first drafter that has learnt two of the four answers by heart."""
    drafter = new_drafter()
    Trainer(target(), drafter, data.split(2)[0], LONG).run(tmp_path_factory.mktemp("first"), quiet)
    return drafter


def test_learns_answers_by_heart(first: Drafter, data: FeatureCache) -> None:
    known, unknown = data.split(2)
    assert estimate_tau(target(), new_drafter(), known) < 0.5 * BLOCK
    assert estimate_tau(target(), first, known) > 0.9 * BLOCK
    assert estimate_tau(target(), first, unknown) < 0.9 * BLOCK


@pytest.mark.parametrize("on_rejection", [0.0, 1.0])
def test_second_drafter_learns_from_variable_prefixes(
    first: Drafter, data: FeatureCache, tmp_path: Path, on_rejection: float
) -> None:
    """Of the two answers that the first drafter does not know: it is wrong there."""
    before = {name: x.clone() for name, x in first.state_dict().items()}
    second = new_drafter(prefix_base=0.9)
    losses: list[float] = []
    long = LONG.model_copy(update={"on_rejection": on_rejection})
    Trainer(target(), second, data.split(2)[1], long, first).run(tmp_path, lambda step, loss: losses.append(loss))
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    assert all(torch.equal(x, before[name]) for name, x in first.state_dict().items()), "the first one stays"


def test_loss_falls_to_the_labels_own_entropy(data: FeatureCache, tmp_path: Path) -> None:
    """A drafter that says just what the target says at the token before has nothing left to learn: rows are aligned."""
    trainer = no_sampling(hard=0.0)
    said: list[Tensor] = []

    def oracle(drafter: Drafter, sequence: object, blocks: object, visible: Tensor) -> Tensor:
        positions = (blocks.positions - 1).clamp(0, len(sequence.tokens) - 1)  # type: ignore[attr-defined]
        said.append(sequence.hidden[positions].clone().requires_grad_())  # type: ignore[attr-defined]
        return said[-1]

    plain = float(loss_of(trainer).detach())
    trainer._hidden = oracle  # type: ignore[method-assign]
    loss = loss_of(trainer)
    (gradient,) = torch.autograd.grad(loss, said)
    assert float(gradient.abs().max()) < 1e-5
    assert float(loss.detach()) < plain - 0.5


# --- What it learns from ----------------------------------------------------------------------------------------------


def used_slots(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    """([A, G] slots whose output the loss depends on, [A, G] slots inside the sequence)."""
    seen: list[tuple[Tensor, Tensor]] = []
    real = trainer._hidden

    def watched(drafter: Drafter, sequence: object, blocks: object, visible: Tensor) -> Tensor:
        hidden = real(drafter, sequence, blocks, visible)  # type: ignore[arg-type]
        if drafter is trainer.drafter:
            hidden.retain_grad()
            seen.append((hidden, blocks.inside))  # type: ignore[attr-defined]
        return hidden

    monkeypatch.setattr(trainer, "_hidden", watched)
    loss_of(trainer).backward()  # type: ignore[no-untyped-call]
    ((hidden, inside),) = seen
    assert hidden.grad is not None
    return hidden.grad.abs().sum(-1) > 0, inside


def test_first_drafter_learns_from_every_slot_but_the_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    used, inside = used_slots(no_sampling(blocks=99), monkeypatch)
    assert torch.equal(used, inside & (torch.arange(BLOCK) >= 1))
    assert not inside.all(), "blocks at the end are part of it"


def test_second_drafter_never_learns_from_what_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = no_sampling(first=new_drafter(), blocks=99)
    visible = torch.arange(16) % (BLOCK - 1) + 1
    monkeypatch.setattr(trainer, "_prefixes", lambda *args: (visible, torch.full((16, BLOCK), -1)))
    used, inside = used_slots(trainer, monkeypatch)
    assert torch.equal(used, inside & (torch.arange(BLOCK) >= visible[:, None]))


def test_what_a_drafter_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real tokens where visible, masks behind: the answer itself must not leak."""
    trainer = no_sampling()
    blocks = blocks_at(trainer.data[0], torch.tensor([4, 6]), BLOCK)
    marked = torch.arange(64.0)[:, None].expand(64, 32)
    trainer._embedding = marked
    shown: list[Tensor] = []

    def forward(embedded: Tensor, positions: Tensor, attend: object) -> Tensor:
        assert torch.equal(positions, blocks.positions)
        shown.append(embedded[..., 0].long())
        return embedded

    monkeypatch.setattr(trainer.drafter, "forward", forward)
    trainer._hidden(trainer.drafter, trainer.data[0], blocks, torch.tensor([1, 3]))
    tokens = trainer.data[0].tokens.tolist()
    assert shown[0].tolist() == [[tokens[4], MASK, MASK, MASK], [tokens[6], tokens[7], tokens[8], MASK]]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_prefixes_on_rejection_end_where_the_first_drafter_errs(
    first: Drafter, data: FeatureCache, share: float
) -> None:
    """On one answer that it knows, and one that it does not."""
    trainer = no_sampling(data, first, on_rejection=share)
    taken = drawn = right = 0
    for index in (0, 2):
        sequence = trainer.data[index]
        anchors = torch.arange(4, 17).repeat(20)
        blocks = blocks_at(sequence, anchors, BLOCK)
        visible, rejected = trainer._prefixes(first, sequence, blocks, torch.Generator().manual_seed(index))
        hidden = trainer._hidden(first, sequence, blocks, torch.ones(len(anchors), dtype=torch.long)).detach()
        drafted = trainer._seen[(hidden @ target().head[trainer._seen].T).argmax(-1)]
        errors = first_errors(drafted, blocks.tokens)
        conditioned = (rejected >= 0).any(1)
        assert torch.equal(visible[conditioned], errors[conditioned])
        slots = visible[conditioned]
        names = trainer._seen[rejected[conditioned].gather(1, slots[:, None])[:, 0]]
        assert torch.equal(names, drafted[conditioned].gather(1, slots[:, None])[:, 0])
        assert (names != blocks.tokens[conditioned].gather(1, slots[:, None])[:, 0]).all(), "never the label itself"
        assert ((rejected >= 0).sum(1) <= 1).all()
        if share < 1:
            assert set(visible[~conditioned].tolist()) == {1, 2, 3}
        taken += int(conditioned.sum())
        drawn += int((errors < BLOCK).sum())
        right += int((errors == BLOCK).sum())
    assert right > 50
    assert drawn > 50
    assert taken / drawn == pytest.approx(share, abs=0.1)


def test_a_rejected_token_is_left_out_of_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: one block, n = 2, a token rejected at slot 2; full vocabulary."""
    trainer = no_sampling(first=new_drafter(), blocks=1, hard=0.3, decay=4.0)
    sequence, anchor, banned = trainer.data[0], 7, 3
    monkeypatch.setattr("d2sd.train.loop.draw_blocks", lambda *args: blocks_at(sequence, torch.tensor([anchor]), BLOCK))
    rejected = torch.tensor([[-1, -1, banned, -1]])
    monkeypatch.setattr(trainer, "_prefixes", lambda *args: (torch.tensor([2]), rejected))
    found = float(loss_of(trainer).detach())

    candidates, correction = trainer._candidates(torch.Generator())
    assert sorted(candidates.tolist()) == list(range(64))
    assert not correction.any()
    blocks = blocks_at(sequence, torch.tensor([anchor]), BLOCK)
    hidden = trainer._hidden(trainer.drafter, sequence, blocks, torch.tensor([2]))[0].detach()
    total = weights = 0.0
    for slot, weight in ((2, 1.0), (3, math.exp(-1 / 4))):
        logits = target().logits(hidden[slot])
        if slot == 2:
            logits[candidates[banned]] = float("-inf")
        log_q = logits.log_softmax(-1)
        p = target().logits(sequence.hidden[anchor + slot - 1]).softmax(-1)
        soft = -sum(float(p[c] * log_q[c]) for c in range(64) if log_q[c] > -math.inf)
        total += weight * (0.7 * soft - 0.3 * float(log_q[sequence.tokens[anchor + slot]]))
        weights += weight
    assert found == pytest.approx(total / weights, rel=1e-4)


@pytest.mark.parametrize(("hard", "error"), [(1.0, 0.02), (0.3, 0.05)])
def test_sampled_softmax_estimates_the_whole_vocabularys_loss(hard: float, error: float) -> None:
    """Of 54 ids outside the answers 16 are drawn. Without the correction the loss is a fifth too small."""
    data = exact_features(greedy_answers()).split(1)[0]
    drafter = new_drafter()
    drafter.norm.weight.data *= 0.3  # a drafter that is less sure: the logarithm of an estimate then has little bias
    whole = Trainer(target(), drafter, data, settings(negatives=64, hard=hard))
    sampled = Trainer(target(), drafter, data, settings(negatives=16, hard=hard))
    exact = float(loss_of(whole).detach())
    draws = torch.stack([loss_of(sampled, draw=i).detach() for i in range(60)])
    assert float(draws.std()) > 0.01, "a fresh draw each time"
    assert float(draws.mean()) == pytest.approx(exact, rel=error)


def test_sampled_denominators_are_unbiased() -> None:
    trainer = Trainer(target(), new_drafter(), exact_features(greedy_answers()), settings(negatives=8))
    logits = target().logits(trainer.data[0].hidden[6])
    draws = []
    for i in range(400):
        candidates, correction = trainer._candidates(torch.Generator().manual_seed(i))
        assert len(set(candidates.tolist())) == len(candidates) == len(trainer._seen) + 8
        draws.append(float((logits[candidates] + correction).exp().sum()))
    assert sum(draws) / 400 == pytest.approx(float(logits.exp().sum()), rel=0.02)


def test_every_sequence_is_used_once_an_epoch() -> None:
    trainer = no_sampling(batch=3)
    order: list[int] = []
    for step in range(8):  # 24 sequences: 6 epochs of 4
        trainer.step = step
        order += trainer._sequences()
    epochs = [order[i : i + 4] for i in range(0, 24, 4)]
    assert all(sorted(epoch) == [0, 1, 2, 3] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1, "shuffled anew"


def test_learning_rate_warms_up_then_falls_to_a_twentieth() -> None:
    trainer = no_sampling(steps=100, warmup=0.1)
    rates = []
    for trainer.step in range(100):
        rates.append(trainer._schedule())
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10] == pytest.approx(1)
    assert rates[55] == pytest.approx(0.525)
    assert rates[-1] == pytest.approx(0.05, abs=0.001)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_every_step_draws_anew_and_learns_at_its_own_rate(tmp_path: Path) -> None:
    def seeds(seed: int) -> list[int]:
        trainer, found = no_sampling(seed=seed), []
        real = trainer._update

        def update(generator: torch.Generator) -> float:
            found.append(generator.initial_seed())
            loss = real(generator)
            assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(5e-3 * trainer._schedule())
            return loss

        trainer._update = update  # type: ignore[method-assign]
        trainer.run(tmp_path / str(seed), quiet)
        return found

    assert len({*seeds(0), *seeds(1)}) == 12


def test_a_step_averages_its_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = no_sampling(batch=2)
    found: list[Tensor] = []

    def look(parameters: object, norm: float) -> None:
        assert norm == trainer.settings.clip
        found.append(torch.cat([p.grad.flatten() for p in trainer.drafter.parameters() if p.grad is not None]))

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", look)
    monkeypatch.setattr(torch, "autocast", lambda *args: nullcontext())
    monkeypatch.setattr(torch, "bfloat16", torch.float32)  # the head's precision
    monkeypatch.setattr(trainer.optimizer, "step", lambda: None)
    told = trainer._update(torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(5)
    candidates, correction = trainer._candidates(generator)
    losses = [trainer._loss(trainer.data[i], target().head[candidates], correction, generator)
              for i in trainer._sequences()]  # fmt: skip
    mean = torch.stack(losses).mean()
    assert told == pytest.approx(float(mean.detach()))
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(mean, list(trainer.drafter.parameters()))])
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-5)


# --- Interruptions ---------------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


def killed_at(last: int) -> Callable[[int, float], None]:
    def report(step: int, loss: float) -> None:
        if step == last:
            raise Killed

    return report


def fresh(kind: str, **changes: object) -> Trainer:
    data = exact_features(greedy_answers())
    if kind == "first":
        return Trainer(target(), new_drafter(), data, settings(**changes))
    return Trainer(target(), new_drafter(prefix_base=0.9), data, settings(**changes), new_drafter())


def parameters(trainer: Trainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.drafter.parameters()])


@pytest.mark.parametrize("kind", ["first", "second"])
def test_an_interrupted_training_ends_in_the_same_bits(kind: str, tmp_path: Path) -> None:
    whole = fresh(kind)
    told: list[tuple[int, float]] = []
    whole.run(tmp_path / "whole", lambda step, loss: told.append((step, loss)))
    assert [step for step, _ in told] == [1, 2, 3, 4, 5, 6]

    for last in (1, 3, 6):  # before any state, between two, behind the last step but before its state
        with pytest.raises(Killed):
            fresh(kind).run(tmp_path / "cut", killed_at(last))
    resumed = fresh(kind)
    again: list[tuple[int, float]] = []
    resumed.run(tmp_path / "cut", lambda step, loss: again.append((step, loss)))
    assert again == told[4:], "the last state was that of step 4"
    assert torch.equal(parameters(resumed), parameters(whole))
    assert not torch.equal(parameters(resumed), parameters(fresh(kind)))


def test_a_finished_training_is_not_repeated(tmp_path: Path) -> None:
    done = fresh("first", steps=5)  # no multiple of save_every
    done.run(tmp_path, quiet)
    again = fresh("first", steps=5)
    again.run(tmp_path, lambda step, loss: pytest.fail("a step was taken"))
    assert again.step == 5
    assert torch.equal(parameters(again), parameters(done))


def test_a_state_half_written_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fresh("first")
    whole.run(tmp_path / "whole", quiet)
    cut = fresh("first")
    with pytest.raises(Killed):
        cut.run(tmp_path / "cut", killed_at(3))

    def dying(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("d2sd.train.loop.save_file", dying)
        with pytest.raises(Killed):
            fresh("first").run(tmp_path / "cut", quiet)
    resumed = fresh("first")
    resumed.run(tmp_path / "cut", quiet)
    assert torch.equal(parameters(resumed), parameters(whole))


@pytest.mark.parametrize(
    ("key", "value"), [("steps", 8), ("hard", 0.4), ("seed", 1), ("batch", 1), ("on_rejection", 0.1)]
)
def test_changed_settings_are_refused(tmp_path: Path, key: str, value: float) -> None:
    fresh("first").run(tmp_path, quiet)
    state = (tmp_path / "state.safetensors").read_bytes()
    with pytest.raises(D2SDError, match="the settings changed") as caught:
        fresh("first", **{key: value}).run(tmp_path, quiet)
    assert caught.value.found == {key: value}
    assert caught.value.expected == {key: settings().model_dump()[key]}
    assert (tmp_path / "state.safetensors").read_bytes() == state


def test_another_drafters_state_is_refused(tmp_path: Path) -> None:
    """Also one whose tensors have the same shapes: here the other role."""
    fresh("first").run(tmp_path, quiet)
    with pytest.raises(D2SDError, match="the drafter changed") as caught:
        fresh("second").run(tmp_path, quiet)
    assert caught.value.found == {"role": "variable_prefix", "prefix_weight_base": 0.9}


def test_a_second_drafter_goes_on_with_the_first_it_began_with(tmp_path: Path) -> None:
    fresh("second").run(tmp_path, quiet)
    retrained = fresh("second")
    assert retrained.first is not None
    with torch.no_grad():
        retrained.first.fc.weight.mul_(1.01)
    with pytest.raises(D2SDError, match="the first drafter changed"):
        retrained.run(tmp_path, quiet)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_before_it_does_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: float
) -> None:
    trainer = fresh("first")
    with pytest.raises(Killed):
        trainer.run(tmp_path, killed_at(3))
    trainer = fresh("first")
    monkeypatch.setattr("d2sd.train.loop.soft_cross_entropy", lambda logits, *args: logits.sum(-1) * 0 + broken)
    with pytest.raises(D2SDError, match=r"not finite(.|\n)*step \d"):
        trainer.run(tmp_path, quiet)
    assert parameters(trainer).isfinite().all()
    assert all(x.isfinite().all() for x in load_file(tmp_path / "state.safetensors").values())


def test_settings_are_a_recipes(tmp_path: Path) -> None:
    """What the tests shorten is nothing but lengths: the loss's own settings are the defaults."""
    changed = {k for k, v in settings().model_dump().items() if v != TrainSettings(steps=1).model_dump()[k]}
    assert changed == {"steps", "batch", "blocks", "learning_rate", "negatives", "save_every"}
