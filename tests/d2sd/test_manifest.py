"""The manifest of a bundle that was built before drafters had names in one mapping."""

from __future__ import annotations

import json
from pathlib import Path

from d2sd.build import build
from d2sd.bundle.load import load_bundle
from d2sd.manifest import load_manifest
from d2sd.recipe import load_recipe
from tests.convert.helpers import add_flex, edit_json, write_project


def test_a_bundle_with_a_key_for_each_drafter_opens(tmp_path: Path) -> None:
    """Null, or no key at all, without the drafter; it is the same manifest, and its models load."""
    recipe = write_project(tmp_path / "project", drafters={"first": {"path": "first"}})
    add_flex(recipe, policy="off")
    build(load_recipe(recipe), tmp_path / "bundle", validate=False)
    file = tmp_path / "bundle" / "manifest.json"
    named = load_manifest(file.parent)
    drafters = json.loads(file.read_text())["drafters"]
    assert drafters.keys() == {"first", "flex"}
    edit_json(file, "drafters", ...)
    for name, geometry in (drafters | {"second": None}).items():
        edit_json(file, name, geometry)
    assert load_manifest(file.parent) == named
    assert [role.key for role in load_bundle(file.parent).drafters] == ["first", "flex"]
    for name in ("second", "flex"):
        edit_json(file, name, ...)
    assert load_manifest(file.parent).drafters.keys() == {"first"}
