"""A recipe with a FlexDraft head: its bundle, what it serves, and heads that do not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from d2sd.build.plan import make_plan
from d2sd.bundle.serving import auto_policies, can_run, make_engine, offer_choices
from d2sd.convert.kinds.flexdraft import KIND as FLEXDRAFT
from d2sd.errors import BundleError, CheckpointError, D2SDError, RecipeError
from d2sd.manifest import Engines, load_manifest
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.policies import DrafterRole
from d2sd.recipe import Policy, load_recipe
from tests.convert.helpers import add_flex, edit_json, tree_bytes, write_project
from tests.d2sd.build.helpers import REQUESTS, answers, made


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The target and the head alone."""
    path = write_project(tmp_path / "project", drafters={})
    add_flex(path)
    return path


def test_a_bundle_with_a_head_alone(recipe: Path) -> None:
    """Every check of a build, the same bytes from a head of its own, and the text of plain decoding."""
    bundle = made(recipe, validate=True)
    assert bundle.drafters[DrafterRole.FIRST].norm is bundle.target.norm
    folder = recipe.parent / "flex"
    files = {f"drafter_first/{name}": content for name, content in tree_bytes(folder).items()}
    assert files.items() <= tree_bytes(bundle.path).items()
    manifest = load_manifest(bundle.path)
    parameters = sum(p.numel() for p in FLEXDRAFT.load(folder, torch.float32).parameters())
    assert {name: drafter.model_dump() for name, drafter in manifest.drafters.items()} == {
        "first": {
            "num_layers": 1,
            "block_size": 4,
            "licence": "not stated",
            "parameters": parameters,
            "split_layer": 2,
            "calibration_size": 8,
        }
    }
    greedy: Any = manifest.checks["greedy"]
    assert greedy["chain"]["equal_to_plain_decoding"] > 0
    kinds: tuple[Policy, ...] = ("off", "lookup", "chain", "auto", "reanchor", "hybrid", "flex_parallel")
    runs = [name for name in kinds if can_run(bundle.draft_configs, name)]
    assert runs == ["off", "lookup", "chain", "auto", "flex_parallel"]
    names: tuple[Policy, ...] = ("off", "chain", "auto")
    engines = [make_engine(bundle, policy=name) for name in names]
    assert [str(engine.policy) for engine in engines] == ["off", "chain of 4 rows", "ddtree+lookup of 16 rows"]
    offer_choices(bundle, engines[1])
    assert list(engines[1].choices) == ["off", "lookup", "chain", "ddtree", "flex_parallel"], "no branches"
    off, *others = ([s.answer for s in engine.generate(REQUESTS)] for engine in engines)
    params = [replace(request.sampling, speculative={"policy": "flex_parallel"}) for request in REQUESTS]
    asked = engines[1].generate([replace(one, sampling=own) for one, own in zip(REQUESTS, params, strict=True)])
    assert [sequence.answer for sequence in asked] == off
    assert [list(sequence.stats.policies) for sequence in asked] == [["flex_parallel of 4 rows"]] * 2
    assert others == [off, off]


def test_a_head_has_no_second_drafter(tmp_path: Path) -> None:
    """Behind it, or in its place."""
    path = write_project(tmp_path / "project")
    add_flex(path)
    with pytest.raises(RecipeError, match=r"one pass a step[\s\S]*drafters\.second"):
        make_plan(load_recipe(path, ["drafters.second={path: second}"]))
    with pytest.raises(CheckpointError, match="cannot be a second drafter"):
        make_plan(load_recipe(path, ["drafters.first={path: first}", "drafters.second={path: flex}"]))


def test_who_cannot_run_it(tmp_path: Path, recipe: Path) -> None:
    bundle = made(recipe)
    with pytest.raises(BundleError, match="neither graphs nor engines"):
        make_engine(bundle, policy="chain", backend="onnx")
    with pytest.raises(BundleError, match=r"do not draft in the pass that verifies"):
        make_engine(bundle, policy="flex_parallel", backend="onnx")
    assert auto_policies(bundle.draft_configs, bundle.calibration, "onnx") == ["chain", "ddtree"]
    older = Engines(
        builder="tensorrt-rtx", version="1", plugin_abi="1", compute=(), profiles={"target": []}, plugins={}
    )
    object.__setattr__(bundle, "manifest", bundle.manifest.model_copy(update={"engines": older}))
    for backend in ("onnx", "tensorrt"):
        for policy in cast("tuple[Policy, ...]", ("chain", "auto")):
            with pytest.raises(
                BundleError, match=r"neither a graph nor an engine of drafter_first[\s\S]*build it again"
            ):
                make_engine(bundle, policy=policy, backend=backend)
    plain = write_project(
        tmp_path / "plain" / "project", drafters={}, tree={"policy": "off", "block_size": 4, "branches": 3}
    )
    with pytest.raises(BundleError, match=r"drafters\.first in its recipe"):
        make_engine(made(plain), policy="chain")
    with pytest.raises(RecipeError, match=r"needs drafters\.first"):
        load_recipe(plain, ["tree.policy=chain"])


def test_a_head_that_cannot_join_the_target_drafts_sequentially(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither `auto` nor an engine of its policy meets rows that cannot join."""
    bundle = made(recipe)
    monkeypatch.setattr(FlexHead, "joins", lambda *_: False)
    with pytest.raises(BundleError, match="cannot draft in the target's pass"):
        make_engine(bundle, policy="flex_parallel")
    engine = make_engine(bundle, policy="auto", row_budget=4)
    offer_choices(bundle, engine)
    assert "flex_parallel" not in engine.choices
    assert [one.answer for one in engine.generate(REQUESTS)] == answers(bundle, "off")
    assert engine.policy.name == "ddtree"


def test_an_anchored_head_drafts_in_sequential_mode_alone(tmp_path: Path) -> None:
    """The text of plain decoding; parallel mode is refused by the build, and where it is served, and no candidate."""
    path = write_project(tmp_path / "project", drafters={})
    add_flex(path, anchored=True)
    bundle = made(path, validate=True)
    head = bundle.drafters[DrafterRole.FIRST]
    assert isinstance(head, FlexHead)
    assert head.config.anchored
    greedy: Any = bundle.manifest.checks["greedy"]
    assert greedy["chain"]["equal_to_plain_decoding"] == greedy["chain"]["prompts"]
    assert "flex_parallel" not in greedy
    with pytest.raises(BundleError, match="anchored FlexDraft head has no parallel mode"):
        make_engine(bundle, policy="flex_parallel")
    with pytest.raises(RecipeError, match="anchored FlexDraft head has no parallel mode"):
        make_plan(load_recipe(path, ["tree.policy=flex_parallel"]))
    assert answers(bundle, "off") == answers(bundle, "chain") == answers(bundle, "ddtree")


UNFIT: dict[str, tuple[str, Any, str]] = {
    "another target": ("hidden_size", 16, "another target"),
    "split out of range": ("num_hidden_layers", 3, "split layer"),
    "no calibration": ("flexdraft_config.enable_anchor_bias_logits", False, "calibration"),
    "another block": ("block_size", 8, "another block size"),
}


@pytest.mark.parametrize(("key", "value", "what"), UNFIT.values(), ids=UNFIT)
def test_a_head_that_does_not_fit_leaves_nothing(recipe: Path, key: str, value: Any, what: str) -> None:
    edit_json(recipe.parent / "flex" / "config.json", key, value)
    with pytest.raises(CheckpointError, match=what):
        make_plan(load_recipe(recipe))
    with pytest.raises(D2SDError, match=what):
        made(recipe)
    assert [path.name for path in recipe.parent.parent.iterdir()] == ["project"]


def test_a_released_head_is_written_in_full(recipe: Path) -> None:
    """The block under the release's key becomes the one that its loader reads."""
    config = recipe.parent / "flex" / "config.json"
    values = json.loads(config.read_text())
    edit_json(config, "dflash_config", values["flexdraft_config"] | {"target_layer_ids": [2]})
    edit_json(config, "flexdraft_config", ...)
    assert json.loads((made(recipe).path / "drafter_first" / "config.json").read_text()) == values
