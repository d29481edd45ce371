"""Pair heads in training: what is asked of them, what they learn, and how an interrupted training goes on."""

from __future__ import annotations

import math
from copy import deepcopy
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from d2sd.errors import D2SDError
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.head_configs import PairConfig
from d2sd.modeling.drafters.pair import PairHead
from d2sd.train.data.features import TrainingData
from d2sd.train.data.responses import Response
from d2sd.train.pair_head import PairTrainer, Slots, with_pair_head
from d2sd.train_recipe import PairSettings
from tests.train.helpers import BLOCK, VOCAB, Killed, exact_features, greedy_responses, new_drafter, target
from tests.train.helpers import settings as second_settings

IDS = tuple(range(0, VOCAB, 2))


@cache
def data() -> TrainingData:
    return exact_features(greedy_responses())


def settings(**changes: object) -> PairSettings:
    quick = {
        "kl": 0.5,
        "learning_rate": 2e-3,
        "rank": 8,
        "candidates": 6,
        "steps": 6,
        "batch": 2,
        "blocks": 6,
        "precision": "fp32",
        "save_every": 2,
    }
    return PairSettings.model_validate(quick | changes)


def trainer(
    *, second: bool = False, ids: tuple[int, ...] | None = None, told: TrainingData | None = None, **changes: object
) -> PairTrainer:
    chosen = settings(**changes)
    plain = new_drafter(0.9 if second else None)
    drafter = with_pair_head(plain, PairConfig(chosen.rank, chosen.candidates), ids, torch.Generator().manual_seed(1))
    of_second = (new_drafter(), second_settings(on_rejection=0.8)) if second else (None, None)
    return PairTrainer(target(), drafter, told or data(), chosen, *of_second)


def slots_of(made: PairTrainer) -> Slots:
    return made._of(made.data, range(3), range(3))


def scattered(made: PairTrainer) -> None:
    for parameter in made.head.parameters():
        parameter.data.normal_(std=0.3, generator=torch.Generator().manual_seed(5))


def quiet(step: int, metrics: dict[str, float]) -> None:
    pass


@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("ids", [None, IDS], ids=["whole vocabulary", "draft vocabulary"])
def test_loss_is_the_sum_over_slots(*, second: bool, ids: tuple[int, ...] | None) -> None:
    """Nested loops in fp64, from the logits of the whole draft vocabulary, and δ as the runtime computes it."""
    made = trainer(second=second, ids=ids)
    scattered(made)
    slots = slots_of(made)
    drafted = list(ids or range(VOCAB))
    made.drafter.join(target())
    with torch.no_grad():
        total = weights = 0.0
        logits = target().logits(slots.hidden).double()[:, drafted]
        tokens = torch.tensor(drafted)[slots.candidates]
        added = made.head.added(slots.hidden[:, None], slots.before[:, None, None], tokens[:, None])[:, 0, 0].double()
    classes = slots.candidates.shape[1]
    banned = 0
    for row in range(len(slots.weight)):
        u = logits[row].tolist()
        chosen: list[int] = slots.candidates[row].tolist()
        allowed = sorted(range(len(u)), key=lambda c: -u[c])
        left_out = [c for c in allowed[: classes + 1] if c not in chosen][:1] if chosen != allowed[:classes] else []
        banned += len(left_out)
        kept = [c for c in allowed if c not in left_out]
        assert chosen == kept[:classes]
        rest = sum(math.exp(u[c]) for c in kept[classes:])
        scores = [math.exp(u[c] + float(added[row, m])) for m, c in enumerate(chosen)]
        q = [x / (rest + sum(scores)) for x in (*scores, rest)]
        right = math.log(q[int(slots.label[row])])
        distilled = sum(float(p) * math.log(x) for p, x in zip(slots.wanted[row], q, strict=True))
        weight = float(slots.weight[row])
        total -= weight * (right + distilled) / 2
        weights += weight
        assert math.isclose(float(slots.wanted[row].sum()), 1, rel_tol=1e-5)
    assert (banned > 0) == second, "what the first had wrong is no candidate"
    torch.testing.assert_close(made._loss(slots).item(), total / weights, atol=2e-5, rtol=2e-5)


def test_labels_are_the_responses_tokens() -> None:
    made = trainer(ids=IDS)
    slots, texts = slots_of(made), [data()[i].tokens.tolist() for i in range(3)]
    pairs = {pair for text in texts for pair in pairwise(text)}
    seen = set[bool]()
    for before, candidates, label in zip(
        slots.before.tolist(), slots.candidates.tolist(), slots.label.tolist(), strict=True
    ):
        seen.add(label < 6)
        if label < 6:
            assert (before, IDS[candidates[label]]) in pairs
    assert seen == {True, False}
    outside = slots.label == 6
    assert (slots.wanted[outside].sum(-1) - 1).abs().max() < 1e-5


def test_a_new_head_adds_nothing_and_the_trunk_stays(tmp_path: Path) -> None:
    made = trainer(steps=3)
    before = {name: tensor.clone() for name, tensor in made.drafter.state_dict().items()}
    assert not before["pair_head.successor_projection"].any()
    slots = slots_of(made)
    assert not made._added(slots).any()
    made.run(tmp_path, quiet)
    for name, tensor in made.drafter.state_dict().items():
        assert torch.equal(tensor, before[name]) != name.startswith("pair_head."), name
    assert made._added(slots).any()


def bigrams(count: int) -> TrainingData:
    """Responses in which each token determines the next."""
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(7)).tolist()
    responses = []
    for number in range(count):
        text = [5 * number % VOCAB]
        while len(text) < 20:
            text.append(order[text[-1]])
        responses.append(Response(f"b{number}", text[:5], text[5:]))
    return exact_features(responses)


@pytest.mark.slow
def test_it_learns_which_token_follows_which(tmp_path: Path) -> None:
    """Over a drafter that was never trained, behind whose tokens only the pair knows more."""
    told = bigrams(12)
    made = trainer(
        told=told, rank=32, candidates=VOCAB, steps=150, batch=6, blocks=12, learning_rate=2e-2, kl=0, save_every=999
    )
    assert made.figures(told)["right"] == made.figures(told)["right without"] < 0.2
    made.run(tmp_path, quiet)
    found = made.figures(told)
    assert found["right"] > 0.9
    assert found["nats"] < 0.5 * found["nats without"]
    assert found["recall"] == 1


def weights(made: PairTrainer) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in made.head.parameters()]


@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
def test_an_interrupted_training_ends_the_same(tmp_path: Path, *, second: bool) -> None:
    whole, cut, again = (trainer(second=second) for _ in range(3))
    whole.run(tmp_path / "whole", quiet)

    def killed(step: int, metrics: dict[str, float]) -> None:
        if step == 3:
            raise Killed

    with pytest.raises(Killed):
        cut.run(tmp_path / "cut", killed)
    again.run(tmp_path / "cut", quiet)
    assert again.step == 6
    for one, other in zip(weights(whole), weights(again), strict=True):
        assert torch.equal(one, other)


def test_another_drafter_below_is_refused(tmp_path: Path) -> None:
    trainer().run(tmp_path, quiet)
    with pytest.raises(D2SDError, match="learning_rate"):
        trainer(learning_rate=1e-3).run(tmp_path, quiet)
    other = deepcopy(trainer().drafter)
    other.fc.weight.data[0, 0] += 1
    with pytest.raises(D2SDError, match="sha256"):
        PairTrainer(target(), other, data(), settings()).run(tmp_path, quiet)


def test_a_drafter_keeps_its_vocabulary_and_loses_an_older_head() -> None:
    made = trainer(ids=IDS)
    again = with_pair_head(made.drafter, PairConfig(3), IDS, torch.Generator())
    assert isinstance(again, Drafter)
    assert again.config.draft_vocabulary == IDS
    assert again.config.block_size == BLOCK
    assert again.get_parameter("pair_head.hidden_projection.weight").shape == (3, 32)


def test_a_head_goes_on_from_one_of_its_shape() -> None:
    made, given = trainer(), torch.Generator()
    with torch.no_grad():
        for weight in made.head.parameters():
            weight.normal_(generator=torch.Generator().manual_seed(3))
    same, other = (
        with_pair_head(new_drafter(), config, None, given, made.drafter) for config in (PairConfig(8, 6), PairConfig(3))
    )
    learnt = made.head.state_dict()
    assert isinstance(same.head, PairHead)
    assert all(torch.equal(same.head.state_dict()[name], learnt[name]) for name in learnt)
    assert all(weight.requires_grad for weight in same.head.parameters())
    assert isinstance(other.head, PairHead)
    assert other.head.hidden_projection.weight.shape[0] == 3
