"""A calibration that the recipe names: copied, verified, loaded; refused where it is not of these drafters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from d2sd.build.pipeline import build
from d2sd.bundle.load import load_bundle
from d2sd.bundle.serving import auto_policies, forecasts, make_engine, scores_of
from d2sd.calibration import load_calibration, write_calibration
from d2sd.convert.kinds import DFLASH, KINDS
from d2sd.errors import BuildError, BundleError, D2SDError
from d2sd.policies import DrafterRole, DraftUse
from d2sd.recipe import load_recipe
from d2sd.runtime.request import Request
from tests.convert.helpers import (
    add_calibration,
    calibration_of,
    edit_json,
    edit_tensors,
    edit_yaml,
    tree_bytes,
    write_project,
)
from tests.d2sd.build.helpers import Killed, killed_after, run
from tests.tiny import tiny_decoder, tiny_drafter

NAME = "calibration/calibration.json"
ROOT = Path(__file__).parents[3]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A project whose recipe names a calibration of its drafters."""
    path = write_project(tmp_path / "project")
    add_calibration(path)
    return path


# -- the file ----------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read(recipe: Path, tmp_path: Path) -> None:
    folder = recipe.parent
    calibration = calibration_of(folder / "first", folder / "second")
    write_calibration(tmp_path / "a.json", calibration)
    assert load_calibration(tmp_path / "a.json") == calibration
    lines = (tmp_path / "a.json").read_text().splitlines()
    assert [lines[0], lines[-1]] == ["{", "}"]
    assert [line.split('"')[1] for line in lines[1:-1]] == list(json.loads((tmp_path / "a.json").read_text()))


def test_a_file_without_uses_is_read(recipe: Path) -> None:
    """One that was written before they were told apart: each has the parameters of the one it is like."""
    path = recipe.with_name("calibration.json")
    apart = scores_of(load_calibration(path))
    edit_json(path, "uses", ...)
    one = scores_of(load_calibration(path))
    for use in DraftUse:
        assert torch.equal(one.slope[:, use], one.slope[:, use.like])
        assert torch.equal(one.slope[:, use], apart.slope[:, use]) == (use.like == use)
    for shipped in (ROOT / "models").glob("*/calibration.json"):
        load_calibration(shipped)


def test_a_file_without_a_policy_is_read(recipe: Path) -> None:
    """One that was written before the policy was: its drafters have the curves of others."""
    path = recipe.with_name("calibration.json")
    for regime in ("0", "1"):
        edit_json(path, f"tau.{regime}.ddtree", ...)
    assert forecasts(load_calibration(path)).keys() == {"chain", "hybrid", "flex_parallel"}  # a chain too


def test_it_is_copied_verified_and_loaded(recipe: Path, out: Path, tmp_path: Path) -> None:
    found = run(recipe, out / "tiny")
    assert found[NAME] == recipe.with_name("calibration.json").read_bytes()
    manifest = json.loads(found["manifest.json"])
    assert NAME in manifest["files"]
    bundle = load_bundle(out / "tiny")
    assert bundle.calibration == load_calibration(recipe.with_name("calibration.json"))
    changed = bytearray(found[NAME])
    changed[len(changed) // 2] ^= 1
    (out / "tiny" / NAME).write_bytes(changed)
    with pytest.raises(BundleError, match=rf"changed(.|\n)*{NAME}"):
        load_bundle(out / "tiny")
    (out / "tiny" / NAME).unlink()
    with pytest.raises(BundleError, match=rf"missing(.|\n)*{NAME}"):
        load_bundle(out / "tiny")
    assert NAME not in run(write_project(tmp_path / "other"), out / "plain")
    assert load_bundle(out / "plain").calibration is None


# -- what is refused ---------------------------------------------------------------------------------------------------


def on(key: str, value: Any) -> Callable[[Path], object]:
    return lambda path: edit_json(path, key, value)


def on_table(key: str, change: Callable[[Any], object]) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        values = json.loads(path.read_text())
        change(values[key])
        path.write_text(json.dumps(values))

    return damage


def wider(path: Path) -> None:
    """One that would fit blocks of 5 and says so."""
    folder = path.parent
    write_calibration(path, calibration_of(folder / "first", folder / "second", slots=4))


def becomes_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def not_positive(table: Any) -> None:
    table[1][0][2][1] = 0.0


DAMAGE: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "missing": (Path.unlink, ("cannot be read",)),
    "a folder": (becomes_a_folder, ("cannot be read",)),
    "not JSON": (lambda p: p.write_text("{"), ("damaged",)),
    "not text": (lambda p: p.write_bytes(b"\xff\xfe"), ("damaged",)),
    "no mapping": (lambda p: p.write_text("[]"), ("damaged",)),
    "another version": (on("d2sd_calibration", 2), ("d2sd_calibration",)),
    "unknown key": (on("extra", 1), ("extra",)),
    "no drafters": (on("drafters", ...), ("drafters",)),
    "a second drafter without its tokens a step": (
        on_table("tau", lambda tau: [curves.pop("hybrid") for curves in tau.values()]),
        ("second", "tau of hybrid"),
    ),
    "a drafter of another name": (on("drafters.third", "ab"), ("drafters.third",)),
    "nothing at all": (on("drafters", {}), ("drafters is empty",)),
    "no fingerprint of the first alone": (on("drafters.first", ...), ("drafters.second",)),
    "the older form, a drafter too many": (on("drafters", ["ab", "cd", "ef"]), ("drafters",)),
    "not a number": (on("report", {"prompts": "many"}), ("report.prompts",)),
    "NaN": (lambda p: p.write_text(p.read_text().replace("0.5", "NaN", 1)), ("slope",)),
    "another temperature": (on("tau", {"0.5": {}}), ("tau",)),
    "blocks of one": (on("block_size", 1), ("block_size",)),
    "one temperature": (on_table("slope", lambda t: t.pop()), ("slope", "[2, 2, 3, 2]")),
    "one drafter at T = 1": (on_table("offset", lambda t: t[1].pop()), ("offset", "[2, 2, 3, 2]")),
    "a distance too many": (on_table("slope", lambda t: t[0][1].append([1.0, 1.0])), ("slope", "[2, 2, 3, 2]")),
    "one kind": (on_table("offset", lambda t: t[1][1][2].pop()), ("offset", "[2, 2, 3, 2]")),
    "empty": (on("slope", []), ("slope", "[2, 2, 3, 2]")),
    "another block size": (wider, ("block_size", "5", "4")),
    "a slope that turns the order round": (on_table("slope", not_positive), ("slope",)),
    "a use of no drafter": (on_table("uses", lambda uses: uses.update(first=uses["chain"])), ("uses.first", "slope")),
    "an unknown use": (on_table("uses", lambda uses: uses.update(third=uses["chain"])), ("uses.third",)),
    "a use that turns the order round": (on("uses.d2sd.slope", [[1.0, 0.0, 1.0]] * 2), ("uses.d2sd", "above 0")),
    "a use of another size": (on("uses.chain.offset", [[1.0, 0.0]] * 2), ("uses.chain", "3 distances")),
    "a use at one temperature": (on("uses.reanchor.slope", [[1.0] * 3]), ("uses.reanchor.slope",)),
    "no gain at T = 1": (on("tau.1", ...), ("tau",)),
    "a policy's gain at T = 0 alone": (on("tau.1.chain", ...), ("tau", "chain")),
    "no rows": (on("tau.0.ddtree", []), ("tau of ddtree",)),
    "less than the bonus token": (on("tau.0.ddtree", [1.0, 0.5]), ("tau.0.ddtree.1", "0.5")),
}


@pytest.mark.parametrize(("damage", "told"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_named_before_anything_is_written(
    recipe: Path, out: Path, damage: Callable[[Path], object], told: tuple[str, ...]
) -> None:
    damage(recipe.with_name("calibration.json"))
    with pytest.raises(D2SDError) as caught:
        run(recipe, out / "tiny")
    for part in ("calibration.json", *told):
        assert part in str(caught.value)
    assert list(out.iterdir()) == []


def test_trees_that_are_deeper_than_the_blocks_it_was_fitted_on(recipe: Path, out: Path) -> None:
    """Curves repeat their last slot, and `auto` serves the bundle's trees; a calibration of that depth is unchanged."""
    path = recipe.with_name("calibration.json")
    edit_json(path, "copies", {key: {"length": [0.0] * 7, "support": [1.0] * 8, "slot": [1, 2, 3]} for key in "01"})
    for key, value in (("policy", "auto"), ("max_depth", 9)):
        edit_yaml(recipe, f"tree.{key}", value)
    run(recipe, out / "tiny")
    known, bundle = load_calibration(path), load_bundle(out / "tiny")
    found = bundle.calibration
    assert found is not None
    assert found.copies is not None
    assert (found.block_size, found.copies["1"].slot) == (9, [1, 2, 3, 3, 3, 3, 3, 3])
    assert found.slope[1][0] == [*known.slope[1][0], *known.slope[1][0][-1:] * 5]
    assert found.uses["d2sd"].offset[0] == [*known.uses["d2sd"].offset[0], *known.uses["d2sd"].offset[0][-1:] * 5]
    request = Request((3, 4, 5, 3, 4, 5, 3, 4), 16)
    answers = [make_engine(bundle, policy=name).generate([request])[0].answer for name in ("off", "auto")]
    assert answers[0] == answers[1]
    write_calibration(path, found)
    assert run(recipe, out / "again")[NAME] == run(recipe, out / "tiny")[NAME]


@pytest.mark.parametrize("name", ["first", "second"])
def test_of_another_drafter(recipe: Path, out: Path, name: str) -> None:
    """A bundle that was there stays; what was built is kept for the next run, which a calibration of these ends."""
    before = run(recipe, out / "tiny")
    edit_tensors(recipe.parent / name / "model.safetensors", norm__weight=torch.ones(32))
    with pytest.raises(BuildError) as caught:
        run(recipe, out / "tiny")
    for part in (f"another {name} drafter", "calibration.json", "d2sd calibrate"):
        assert part in str(caught.value)
    assert tree_bytes(out / "tiny") == before
    with pytest.raises(BuildError):
        run(recipe, out / "new")
    assert sorted(path.name for path in out.iterdir()) == [".new.building", ".tiny.building", "tiny"]
    assert not (out / ".new.building" / "bundle" / "calibration").exists()
    add_calibration(recipe)
    assert run(recipe, out / "tiny") == run(recipe, out / "new") != before


def test_the_drafters_may_not_be_swapped(tmp_path: Path, out: Path) -> None:
    recipe = write_project(tmp_path / "project")
    edit_tensors(recipe.parent / "second/model.safetensors", norm__weight=torch.ones(32))  # else they are alike
    path = add_calibration(recipe)
    values = json.loads(path.read_text())["drafters"]
    edit_json(path, "drafters", {"first": values["second"], "second": values["first"]})
    with pytest.raises(BuildError, match="another first drafter"):
        run(recipe, out / "tiny")


def test_of_a_pair_serves_its_first_alone_but_not_the_reverse(recipe: Path, out: Path) -> None:
    pair = {"first": {"path": "first"}, "second": {"path": "second"}}
    named = {"calibration": "calibration.json"}
    edit_yaml(recipe, "drafters", {"first": {"path": "first"}} | named)
    assert NAME in run(recipe, out / "alone")
    bundle, whole = load_bundle(out / "alone"), load_calibration(recipe.with_name("calibration.json"))
    assert bundle.calibration is not None
    found = bundle.calibration
    assert found.drafters.keys() == {"first"}
    assert found.uses.keys() == {"chain", "reanchor"} < whole.uses.keys()
    # the first would make both passes of hybrid, which forecasts and scores of the second say nothing about
    assert auto_policies(bundle.draft_configs, found) == ["chain", "ddtree"]
    for table, neutral in (("slope", 1.0), ("offset", 0.0)):
        told, kept = getattr(found, table), getattr(whole, table)
        for warm in (0, 1):
            assert told[warm][0] == kept[warm][0]
            assert told[warm][1] == [[neutral, neutral]] * 3 != kept[warm][1]
    assert found.among(bundle.drafters) == found
    assert whole.among([*DrafterRole]) == whole
    add_calibration(recipe)  # now of the first alone
    edit_yaml(recipe, "drafters", pair | named)
    with pytest.raises(BuildError, match="another second drafter"):
        run(recipe, out / "pair")


# -- stages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", ["calibration", "check"])
def test_stopped_behind_its_stage_a_build_resumes_to_the_same_bytes(recipe: Path, out: Path, last: str) -> None:
    with pytest.raises(Killed):
        run(recipe, out / "tiny", finished=killed_after(last))
    assert (out / ".tiny.building" / "bundle" / NAME).exists()
    assert run(recipe, out / "tiny") == run(recipe, out / "whole")


def test_drafters_that_changed_on_the_way_are_held_against_it_again(recipe: Path, out: Path) -> None:
    """The stage was finished, for other drafters."""
    with pytest.raises(Killed):
        run(recipe, out / "tiny", finished=killed_after("calibration"))
    edit_tensors(recipe.parent / "second/model.safetensors", norm__weight=torch.ones(32))
    with pytest.raises(BuildError, match="another second drafter"):
        run(recipe, out / "tiny")


def test_one_that_changed_or_went_on_the_way(recipe: Path, out: Path) -> None:
    changes: dict[str, Callable[[Path], object]] = {
        "changed": on("report", {"prompts": 3}),
        "gone": lambda path: edit_yaml(recipe, "drafters", {"first": {"path": "first"}}),
    }
    for name, change in changes.items():
        with pytest.raises(Killed):
            run(recipe, out / name, finished=killed_after("check"))
        change(recipe.with_name("calibration.json"))
        assert run(recipe, out / name) == run(recipe, out / f"{name}, whole")
    assert load_bundle(out / "changed").calibration is not None
    assert load_bundle(out / "gone").calibration is None


# -- fingerprints ------------------------------------------------------------------------------------------------------


def test_a_fingerprint_is_the_same_in_fp32_and_bf16(tmp_path: Path, out: Path) -> None:
    """Drafters come in bf16: what was calibrated on the bundle in fp32 is taken for the one in bf16."""
    recipe = write_project(tmp_path / "project")
    for name in ("first", "second"):
        drafter = DFLASH.load(recipe.parent / name, torch.bfloat16)
        DFLASH.write(recipe.parent / name, drafter.config, drafter.state_dict())
    expected = load_calibration(add_calibration(recipe)).drafters
    for precision in ("fp32", "bf16"):
        build(load_recipe(recipe, [f"precision={precision}"]), out / precision, validate=False)
        bundle = load_bundle(out / precision)
        assert {p.dtype for p in bundle.drafters[DrafterRole.FIRST].parameters()} == {
            bundle.target.embed_tokens.weight.dtype
        }
        found = {role.key: KINDS[drafter.config.kind].fingerprint(drafter) for role, drafter in bundle.drafters.items()}
        assert found == expected


def test_a_fingerprint_is_of_every_weight() -> None:
    def drafter() -> Any:
        return tiny_drafter(tiny_decoder().config)

    whole = DFLASH.fingerprint(drafter())
    assert DFLASH.fingerprint(drafter()) == whole
    seen = {whole}
    for name in drafter().state_dict():
        changed = drafter()
        changed.state_dict()[name].view(-1)[-1] += 1
        seen.add(DFLASH.fingerprint(changed))
    assert len(seen) == 1 + len(drafter().state_dict())
    assert DFLASH.fingerprint(tiny_drafter(tiny_decoder().config, role="variable_prefix", seed=2)) not in seen
