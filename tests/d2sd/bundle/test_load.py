"""Opening a bundle: the contents of a complete one, and the error that names the damage in a damaged one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from d2sd.build.pipeline import build
from d2sd.bundle.files import verify_files
from d2sd.bundle.load import load_bundle
from d2sd.errors import BundleError
from d2sd.manifest import load_manifest
from d2sd.policies import DrafterRole
from d2sd.recipe import load_recipe
from tests.convert.helpers import edit_json, write_project
from tests.tiny import tiny_decoder


def make(folder: Path, **changes: Any) -> Path:
    build(load_recipe(write_project(folder / "project", **changes)), folder / "bundle", validate=False)
    return folder / "bundle"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("bundle"))


@pytest.fixture
def bundle(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "bundle"))


def test_a_bundle_gives_back_its_models(bundle: Path) -> None:
    loaded = load_bundle(bundle)
    expected = tiny_decoder().state_dict()
    assert loaded.target.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.target.state_dict().items())
    assert list(loaded.drafters) == [DrafterRole.FIRST, DrafterRole.SECOND]
    assert [getattr(drafter.config, "role", None) for drafter in loaded.drafters.values()] == [
        "first",
        "variable_prefix",
    ]
    assert loaded.stop_token_ids == (2,)
    assert loaded.tokenizer("w5 w7").input_ids == [5, 7]
    assert loaded.recipe.tree.row_budget == 16
    for model in (loaded.target, *loaded.drafters.values()):
        assert not model.training
        assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_tensors_are_stored_and_loaded_in_the_recipes_precision(
    tmp_path: Path, precision: str, dtype: torch.dtype
) -> None:
    bundle = make(tmp_path, precision=precision)
    loaded = load_bundle(bundle)
    assert {p.dtype for m in (loaded.target, *loaded.drafters.values()) for p in m.parameters()} == {dtype}
    elements = sum(p.numel() for p in loaded.target.parameters())
    assert elements * 2 < (bundle / "target/model.safetensors").stat().st_size < elements * 4


def test_a_bundle_without_a_second_drafter(tmp_path: Path) -> None:
    tree = {"policy": "chain", "block_size": 4, "branches": 3}
    loaded = load_bundle(make(tmp_path, drafters={"first": {"path": "first"}}, tree=tree))
    assert list(loaded.drafters) == [DrafterRole.FIRST]


@pytest.mark.parametrize("name", ["target/model.safetensors", "target/tokenizer.json", "drafter_second/config.json"])
def test_one_changed_byte_is_found(bundle: Path, name: str) -> None:
    content = bytearray((bundle / name).read_bytes())
    content[len(content) // 2] ^= 1
    (bundle / name).write_bytes(content)
    with pytest.raises(BundleError, match=rf"changed(.|\n)*{name}"):
        load_bundle(bundle)


def relink(file: Path, target: Path) -> None:
    """Replace a file by a link to `target`, with the same bytes there if it can hold any."""
    content = file.read_bytes()
    file.unlink()
    if target != file and not target.exists():
        target.write_bytes(content)
    file.symlink_to(target)


def test_links_inside_a_bundle_are_read(bundle: Path) -> None:
    """Some stores keep every file under its hash and link to it."""
    files = load_bundle(bundle).manifest.files
    (bundle.parent / "linked").symlink_to(bundle)
    name, same = "target/generation_config.json", "drafter_first/config.json"
    edit_json(bundle / "manifest.json", "files", files | {name: files[same]})
    (bundle / name).unlink()
    (bundle / name).symlink_to(f"../{same}")
    verify_files(bundle.parent / "linked", load_manifest(bundle.parent / "linked"))


def rename_in_manifest(new: str) -> Callable[[Path], object]:
    def damage(bundle: Path) -> None:
        path = bundle / "manifest.json"
        path.write_text(path.read_text().replace('"target/config.json"', f'"{new}"'))

    return damage


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda b: (b / "manifest.json").unlink(), "manifest.json"),
    "manifest is not JSON": (lambda b: (b / "manifest.json").write_text("[]"), "manifest.json"),
    "missing file": (lambda b: (b / "target/tokenizer.json").unlink(), "missing(.|\n)*target/tokenizer.json"),
    "extra file": (lambda b: (b / "target/evil.py").touch(), "does not list(.|\n)*target/evil.py"),
    "a linked folder": (
        lambda b: (b / "more").symlink_to("target", target_is_directory=True),
        "symbolic link(.|\n)*bundle/more",
    ),
    "a link that leaves": (lambda b: relink(b / "target/config.json", b.parent / "config.json"), "leaves the bundle"),
    "a link to a device": (lambda b: relink(b / "target/config.json", Path("/dev/zero")), "target/config.json"),
    "a loop of links": (lambda b: relink(b / "target/config.json", b / "target/config.json"), "target/config.json"),
    "a pipe": (lambda b: os.mkfifo(b / "target/pipe"), "not a regular file(.|\n)*target/pipe"),
    "another schema": (lambda b: edit_json(b / "manifest.json", "d2sd_bundle", 2), "schema version(.|\n)*found: 2"),
    "unknown key": (lambda b: edit_json(b / "manifest.json", "extra", 1), "extra"),
    "a damaged recipe": (
        lambda b: edit_json(b / "manifest.json", "recipe.tree.branches", 9),
        "recipe(.|\n)*branches 9",
    ),
    "name above": (rename_in_manifest("../config.json"), "leaves the bundle"),
    "name inside and up": (rename_in_manifest("target/../../config.json"), "leaves the bundle"),
    "absolute name": (rename_in_manifest("/etc/passwd"), "leaves the bundle"),
    "name of Windows": (rename_in_manifest("..\\\\config.json"), "leaves the bundle"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_named(bundle: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(bundle)
    with pytest.raises(BundleError, match=message):
        load_bundle(bundle)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="nowhere"):
        load_bundle(tmp_path / "nowhere")
