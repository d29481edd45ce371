"""`draft_vocab.json`: written next to the z-lab files without touching them, read strictly, carried into the bundle."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from d2sd.build.pipeline import build
from d2sd.bundle.load import load_bundle
from d2sd.convert.checkpoint.own_files import DRAFT_VOCABULARY
from d2sd.convert.kinds import DFLASH
from d2sd.errors import BuildError, BundleError, CheckpointError
from d2sd.modeling.config import DrafterConfig
from d2sd.policies import DrafterRole
from d2sd.recipe import load_recipe
from tests.convert.helpers import add_calibration, edit_json, tree_bytes, write_project
from tests.tiny import tiny_decoder, tiny_drafter

IDS = (0, 3, 17, 40, 62)  # the tiny vocabulary is 0 .. 63, the mask 63


def written(folder: Path, ids: tuple[int, ...] | None = IDS) -> DrafterConfig:
    drafter = tiny_drafter(tiny_decoder().config)
    config = replace(drafter.config, draft_vocabulary=ids)
    DFLASH.write(folder, config, drafter.state_dict())
    return config


def test_round_trip(tmp_path: Path) -> None:
    config = written(tmp_path / "a")
    assert json.loads((tmp_path / "a" / DRAFT_VOCABULARY).read_text()) == {
        "d2sd_draft_vocab": 1,
        "vocab_size": 64,
        "ids": [0, 3, 17, 40, 62],
    }
    assert DFLASH.read_config(tmp_path / "a") == config
    DFLASH.check_tensors(tmp_path / "a", config)
    drafter = DFLASH.load(tmp_path / "a", torch.bfloat16)
    assert drafter.draft_ids is not None
    assert drafter.draft_ids.tolist() == list(IDS)
    DFLASH.write(tmp_path / "b", drafter.config, DFLASH.load(tmp_path / "a", torch.float32).state_dict())
    assert tree_bytes(tmp_path / "a") == tree_bytes(tmp_path / "b")


def test_other_readers_find_the_files_they_know_and_nothing_is_inherited(tmp_path: Path) -> None:
    written(tmp_path / "reduced")
    written(tmp_path / "whole", None)
    reduced, whole = tree_bytes(tmp_path / "reduced"), tree_bytes(tmp_path / "whole")
    del reduced[DRAFT_VOCABULARY]
    assert reduced == whole
    written(tmp_path / "reduced", None)
    assert DFLASH.read_config(tmp_path / "reduced").draft_vocabulary is None


def test_a_fingerprint_is_of_the_vocabulary_too(tmp_path: Path) -> None:
    """A calibration was fitted to what the drafter says, and the vocabulary has a part in that."""
    marks = []
    for name, ids in {"whole": None, "reduced": IDS, "again": IDS, "other": (0, 3, 17, 40, 61)}.items():
        written(tmp_path / name, ids)
        marks.append(DFLASH.fingerprint(DFLASH.load(tmp_path / name, torch.float32)))
    assert marks[0] == DFLASH.fingerprint(tiny_drafter(tiny_decoder().config))
    assert marks[1] == marks[2]
    assert len(set(marks)) == 3


def test_without_a_vocabulary_a_fingerprint_is_of_the_weights_alone() -> None:
    """Calibrations made before there were vocabularies stay those of their drafters."""
    drafter = tiny_drafter(tiny_decoder().config)
    for parameter in drafter.parameters():
        parameter.fill_(0.5)
    assert DFLASH.fingerprint(drafter) == "0a040a28c373e3fab5945fddc5f7d41b57ead66475cc09a5087340b94a95002e"


def key(name: str, value: Any) -> Callable[[Path], object]:
    return lambda path: edit_json(path, name, value)


def into_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "not JSON": (lambda path: path.write_text("{"), f"{DRAFT_VOCABULARY}(.|\n)*not JSON"),
    "not text": (lambda path: path.write_bytes(b"\xff"), f"{DRAFT_VOCABULARY}(.|\n)*not UTF-8"),
    "a folder": (into_a_folder, f"cannot be read(.|\n)*{DRAFT_VOCABULARY}"),
    "a list": (
        lambda path: path.write_text("[1, 2]"),
        f"damaged(.|\n)*{DRAFT_VOCABULARY}\n  found: no key d2sd_draft_vocab",
    ),
    "another schema": (key("d2sd_draft_vocab", 2), "schema(.|\n)*: d2sd_draft_vocab\n  found: 2\n  expected: 1"),
    "no schema": (key("d2sd_draft_vocab", ...), f"damaged(.|\n)*{DRAFT_VOCABULARY}\n  found: no key d2sd_draft_vocab"),
    "schema true": (key("d2sd_draft_vocab", True), "schema(.|\n)*: d2sd_draft_vocab\n  found: True"),
    "another target": (key("vocab_size", 65), "another target(.|\n)*: vocab_size\n  found: 65\n  expected: 64"),
    "no ids": (key("ids", ...), "damaged(.|\n)*: ids\n  found: Field required"),
    "unknown key": (key("offsets", []), "damaged(.|\n)*: offsets\n  found: .*Unknown key"),
    "ids no list": (key("ids", {"3": 0, "5": 1}), "damaged(.|\n)*: ids\n  found: .*valid list"),
    "empty": (key("ids", []), "vocabulary is too small(.|\n)*: ids\n"),
    "one": (key("ids", [4]), r"vocabulary is too small(.|\n)*: ids\n  found: \[4\]"),
    "unsorted": (key("ids", [3, 9, 8]), r": ids\[2\]\n  found: 8\n  expected: above 9"),
    "twice": (key("ids", [3, 9, 9]), r": ids\[2\]\n  found: 9\n  expected: above 9"),
    "negative": (key("ids", [-1, 9]), r": ids\[0\]\n  found: -1\n  expected: 0 to 63"),
    "outside": (key("ids", [3, 64]), r": ids\[1\]\n  found: 64\n  expected: 0 to 63"),
    "mask": (key("ids", [3, 63]), r": ids\[1\]\n  found: 63\n  expected: any token but the mask"),
    "no integer": (key("ids", [3, 9.0]), r": ids\[1\]\n  found: 9.0\n  expected: an integer"),
    "no number": (key("ids", [3, True]), r": ids\[1\]\n  found: true\n  expected: an integer"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    written(tmp_path)
    damage(tmp_path / DRAFT_VOCABULARY)
    with pytest.raises(CheckpointError, match=message) as caught:
        DFLASH.read_config(tmp_path)
    assert str(caught.value.where).startswith(str(tmp_path / DRAFT_VOCABULARY))


def test_a_bundle_carries_each_drafters_own(tmp_path: Path) -> None:
    recipe = write_project(tmp_path / "project")
    written(recipe.parent / "first")
    for name in ("plain", "calibrated"):
        if name == "calibrated":
            add_calibration(recipe)
        build(load_recipe(recipe), tmp_path / name, validate=False)
        bundle = load_bundle(tmp_path / name)
        assert [drafter.config.draft_vocabulary for drafter in bundle.drafters.values()] == [IDS, None]
        assert f"drafter_first/{DRAFT_VOCABULARY}" in bundle.manifest.files
    edit_json(tmp_path / "plain/drafter_first" / DRAFT_VOCABULARY, "ids", list(IDS[1:]))
    with pytest.raises(BundleError, match=rf"changed(.|\n)*drafter_first/{DRAFT_VOCABULARY}"):
        load_bundle(tmp_path / "plain")


def test_a_calibration_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    recipe = write_project(tmp_path / "project")
    add_calibration(recipe)
    written(recipe.parent / "first")
    with pytest.raises(BuildError, match="another first drafter"):
        build(load_recipe(recipe), tmp_path / "out", validate=False)


def test_a_killed_build_goes_on_with_the_vocabulary_of_now(tmp_path: Path) -> None:
    recipe = write_project(tmp_path / "project")
    written(recipe.parent / "first")

    def stop(stage: str) -> None:
        if stage == "drafter_first":
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        build(load_recipe(recipe), tmp_path / "out", validate=False, finished=stop)
    written(recipe.parent / "first", IDS[1:])
    build(load_recipe(recipe), tmp_path / "out", validate=False)
    first = load_bundle(tmp_path / "out").drafters[DrafterRole.FIRST]
    assert first.config.draft_vocabulary == IDS[1:]
