"""Interruptions: a training that was cut at any moment ends in the same bits, and a changed one is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from d2sd.errors import D2SDError
from d2sd.train import state
from d2sd.train.loop import Trainer
from tests.train.helpers import Killed, exact_features, greedy_responses, new_drafter, settings, target

Said = list[tuple[int, dict[str, float]]]


def fresh(kind: str = "first", /, **changes: object) -> Trainer:
    """Six steps of two sequences, saved after every second."""
    data = exact_features(greedy_responses())
    if kind == "first":
        return Trainer(target(), new_drafter(), data, settings(**changes))
    return Trainer(target(), new_drafter(prefix_base=0.9), data, settings(**changes), new_drafter())


def into(said: Said) -> Callable[[int, dict[str, float]], None]:
    return lambda step, values: said.append((step, values))


def killed_at(last: int) -> Callable[[int, dict[str, float]], None]:
    """A report that ends the run once a step is taken, before it is saved."""

    def report(step: int, said: dict[str, float]) -> None:
        if step == last:
            raise Killed

    return report


def saved_step(folder: Path) -> int:
    with safe_open(folder / "state.safetensors", "pt") as handle:
        return int(json.loads(handle.metadata()["d2sd"])["step"])


def assert_same(folder: Path, other: Path) -> None:
    """Weights, moments and metadata, to the byte."""
    assert (folder / "state.safetensors").read_bytes() == (other / "state.safetensors").read_bytes()


# --- Cut and resumed -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["first", "second"])
def test_a_training_cut_at_any_moment_ends_in_the_same_bits(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before anything was saved, between two states, as a state is written, and right behind a state."""
    told: Said = []
    fresh(kind).run(tmp_path / "whole", into(told))
    assert [step for step, _ in told] == [1, 2, 3, 4, 5, 6]
    cut = tmp_path / "cut"

    with pytest.raises(Killed):
        fresh(kind).run(cut, killed_at(1))
    assert not (cut / "state.safetensors").exists()
    with pytest.raises(Killed):
        fresh(kind).run(cut, killed_at(3))
    assert saved_step(cut) == 2

    def dying(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(state, "save_file", dying)
        with pytest.raises(Killed):
            fresh(kind).run(cut, killed_at(99))
    assert saved_step(cut) == 2

    def evaluate(step: int) -> None:
        raise Killed

    with pytest.raises(Killed):
        fresh(kind, evaluate_every=4).run(cut, killed_at(99), evaluate)
    resumed, again = fresh(kind), list[tuple[int, dict[str, float]]]()
    resumed.run(cut, into(again))
    assert again == told[-len(again) :], "and it says the same on the way"
    assert 2 <= len(again) < 6
    assert_same(tmp_path / "whole", cut)


def test_a_finished_training_is_not_repeated(tmp_path: Path) -> None:
    fresh(steps=5).run(tmp_path, killed_at(99))  # no multiple of save_every
    assert saved_step(tmp_path) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"], "moved into place, not copied"
    again = fresh(steps=5)
    again.run(tmp_path, lambda step, said: pytest.fail("a step was taken"))
    assert again.step == 5
    assert all(
        torch.equal(p, load_file(tmp_path / "state.safetensors")[f"drafter.{name}"])
        for name, p in again.drafter.named_parameters()
    )


def test_what_a_killed_process_was_saving_is_removed(tmp_path: Path) -> None:
    """With another process number than the next run's; files of others stay."""
    for name in ("state.safetensors.4194303.partial", "state.safetensors.1.partial", "data.1.partial", "state.partial"):
        (tmp_path / name).write_bytes(b"half")
    fresh().run(tmp_path, into([]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.1.partial", "state.partial", "state.safetensors"]


def test_evaluations_are_called_on_their_steps(tmp_path: Path) -> None:
    """And after the last one."""
    steps: list[int] = []
    fresh(steps=5, evaluate_every=2).run(tmp_path, killed_at(99), steps.append)
    assert steps == [2, 4, 5]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("changes", [{"save_every": 1}, {"evaluate_every": 1}], ids=str)
def test_what_decides_nothing_may_change(changes: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(Killed):
        fresh().run(tmp_path / "cut", killed_at(4))
    fresh(**changes).run(tmp_path / "cut", killed_at(99))
    fresh().run(tmp_path / "whole", killed_at(99))
    assert_same(tmp_path / "cut", tmp_path / "whole")


# --- Changed ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished second drafter, which depends on everything there is."""
    folder = tmp_path_factory.mktemp("done")
    fresh("second").run(folder, killed_at(99))
    return folder


def refused(made: Trainer, folder: Path) -> D2SDError:
    before = (folder / "state.safetensors").read_bytes()
    weights = [p.clone() for p in made.drafter.parameters()]
    with pytest.raises(D2SDError) as caught:
        made.run(folder, lambda step, said: pytest.fail("a step was taken"))
    assert (folder / "state.safetensors").read_bytes() == before
    assert all(torch.equal(a, b) for a, b in zip(weights, made.drafter.parameters(), strict=True)), "nothing is loaded"
    assert caught.value.where == folder / "state.safetensors"
    return caught.value


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps", 8),
        ("batch", 1),
        ("micro_batch", 2),
        ("blocks", 5),
        ("learning_rate", 1.0),
        ("warmup", 0.5),
        ("weight_decay", 0.5),
        ("clip", 0.5),
        ("prefix_base", 0.5),
        ("on_rejection", 0.1),
        ("frequent", 9),
        ("negatives", 9),
        ("seed", 1),
        ("precision", "bf16"),
        ("objective", {"ce": 0.3, "kl": 0.8}),
    ],
)
def test_changed_settings_are_named(done: Path, key: str, value: object) -> None:
    error = refused(fresh("second", **{key: value}), done)
    assert error.what == "the settings changed since this training began"
    assert error.fix == "restore the recipe, or train in another folder of --work, or under another `name`"
    assert error.found == {key: settings(**{key: value}).model_dump()[key]}
    assert error.expected == {key: settings().model_dump()[key]}


def test_another_drafter_or_first_drafter_or_other_data_is_named(done: Path) -> None:
    """One token fewer in one answer; and a drafter whose tensors have the same shapes: here the other role."""
    error = refused(fresh("first"), done)
    assert error.found == {"role": "first", "prefix_weight_base": None}
    answers = greedy_responses()
    shorter = [*answers[:3], replace(answers[3], response_ids=answers[3].response_ids[:-1])]
    other = new_drafter()
    with torch.no_grad():
        other.norm.weight[0] += 1e-3  # a second drafter learns where one very first drafter goes wrong
    made = [
        Trainer(target(), new_drafter(0.9), exact_features(data), settings(), first)
        for data, first in ((shorter, new_drafter()), (answers, other))
    ]
    told = [error.what, *(refused(one, done).what for one in made)]
    assert told == [f"the {what} changed since this training began" for what in ("drafter", "data", "first drafter")]


@pytest.mark.parametrize(
    "left", [0, 4, 100, 5000, -1, None], ids=["empty", "length", "header", "tensors", "last byte", "no training's"]
)
def test_a_damaged_state_is_named(done: Path, left: int | None, tmp_path: Path) -> None:
    file = tmp_path / "state.safetensors"
    if left is None:
        save_file({"x": torch.zeros(1)}, file)
    else:
        file.write_bytes((done / file.name).read_bytes()[:left])
    error = refused(fresh("second"), tmp_path)
    assert error.what == "the training checkpoint cannot be read"
    assert "delete" in str(error.fix)
