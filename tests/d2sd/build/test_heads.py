"""Recipes whose drafters have heads: their bundles, what they serve, and what is refused when it is planned."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from d2sd.build.plan import make_plan
from d2sd.build.validate.drafter_config import Hypothesis, evaluate_configs
from d2sd.bundle.load import load_bundle
from d2sd.bundle.serving import make_engine
from d2sd.convert.kinds import DFLASH
from d2sd.convert.trtllm.llm_args import unsupported_reason
from d2sd.errors import RecipeError
from d2sd.manifest import load_manifest
from d2sd.modeling.config import Role
from d2sd.modeling.drafters.head_configs import MarkovConfig
from d2sd.plugins.trees import Draft
from d2sd.policies import DrafterRole, PolicyName
from d2sd.recipe import load_recipe
from d2sd.runtime.drafting.passes import DraftPasses
from tests.convert.helpers import tree_bytes, write_project
from tests.d2sd.build.helpers import REQUESTS, answers, made
from tests.tiny import HEADS, tiny_decoder, tiny_drafter

POLICIES: tuple[PolicyName, ...] = ("chain", "reanchor", "d2sd", "ddtree", "hybrid")


def project(folder: Path, first: str, second: str, **changes: Any) -> Path:
    """A recipe with drafters of these kinds, of three drafts each."""
    recipe = write_project(folder, checks={"count": 1, "tokens": 8}, **changes)
    roles: dict[str, tuple[str, Role]] = {"first": (first, "first"), "second": (second, "variable_prefix")}
    for name, (head, role) in roles.items():
        from_anchor = isinstance(HEADS[head], MarkovConfig)
        drafter = tiny_drafter(
            tiny_decoder().config,
            role=role,
            block_size=4 - from_anchor,
            head=HEADS[head],
            sample_from_anchor=from_anchor,
            attention={"causal": (True, True)} if head == "injection" else {},
            seed=len(name),
        )
        DFLASH.write(folder / name, drafter.config, drafter.state_dict())
    return recipe


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [("markov", "selector"), ("selector", "gated markov"), ("pair", "pair"), ("injection", "injection")],
)
def test_a_bundle_of_drafters_with_heads(tmp_path: Path, first: str, second: str) -> None:
    """Every check of a build, the same bytes, and the text of plain decoding by every policy."""
    recipe = project(tmp_path / "project", first, second)
    bundle = made(recipe, validate=True)
    for name in ("first", "second"):
        files = {f"drafter_{name}/{file}": content for file, content in tree_bytes(recipe.parent / name).items()}
        assert files.items() <= tree_bytes(bundle.path).items()
    manifest = load_manifest(bundle.path)
    told = {name: drafter.model_dump() for name, drafter in manifest.drafters.items()}
    heads = {name: head.name for name, head in HEADS.items()}
    assert [told[name]["head"] for name in ("first", "second")] == [heads[first], heads[second]]
    assert [told[name].get("sample_from_anchor", False) for name in told] == [
        heads[n] == "dspark" for n in (first, second)
    ]
    fit = manifest.checks["fit"]
    assert isinstance(fit, dict)
    assert fit.keys() == {"first", "second"}
    plain = answers(bundle, "off")
    for policy in POLICIES:
        assert answers(bundle, policy) == plain


def test_a_plan_counts_the_tensors_of_a_head(tmp_path: Path) -> None:
    recipe = project(tmp_path / "project", "selector", "injection")
    plan = make_plan(load_recipe(recipe))
    for role in (DrafterRole.FIRST, DrafterRole.SECOND):
        loaded = DFLASH.load(recipe.parent / role.key, torch.float32)
        assert plan.drafters[role].parameters == sum(tensor.numel() for tensor in loaded.state_dict().values())


def test_fp16_is_refused_where_convolutions_would_overflow(tmp_path: Path) -> None:
    recipe = project(tmp_path / "project", "selector", "markov", precision="fp16")
    with pytest.raises(RecipeError, match=r"exceed the range of fp16(.|\n)*precision(.|\n)*bf16 or fp32"):
        make_plan(load_recipe(recipe))
    make_plan(load_recipe(project(tmp_path / "other", "markov", "gated markov", precision="fp16")))


def test_no_graph_is_made_of_layers_that_read_codes(tmp_path: Path) -> None:
    recipe = project(tmp_path / "project", "injection", "markov", engines={"compute": ["portable"]})
    with pytest.raises(RecipeError, match=r"DSpine drafters are not exported(.|\n)*remove engines"):
        make_plan(load_recipe(recipe))


def test_other_engines_are_given_no_arguments_for_a_head(tmp_path: Path) -> None:
    """Other engines would start, draft without the head, and hardly ever be right."""
    recipe = project(tmp_path / "project", "markov", "selector", precision="bf16")
    bundle = made(recipe).path
    assert {path.name for path in bundle.iterdir() if path.is_dir()} == {"drafter_first", "drafter_second", "target"}
    config = DFLASH.read_config(bundle / "drafter_first")
    assert unsupported_reason(load_recipe(recipe), config) == "its DFlash runs no dspark head"
    other = project(tmp_path / "other", "pair", "pair", precision="bf16")
    assert unsupported_reason(load_recipe(other), DFLASH.read_config(other.parent / "first")) is None


def test_a_mask_is_tried_with_the_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another reading of a config drafts as a drafter that has it: the head walks behind masks, not tokens."""
    recipe = project(tmp_path / "project", "markov", "selector")
    bundle = made(recipe)
    plain = make_engine(bundle, policy="off").generate(REQUESTS)
    role = DrafterRole.FIRST

    drafted: list[list[int]] = []
    second = DraftPasses.second

    def watched(*arguments: Any) -> Draft:
        draft: Draft = second(*arguments)
        drafted.extend(draft.top1.flatten(1).tolist())
        return draft

    monkeypatch.setattr(DraftPasses, "second", watched)

    def read(folder: Path, mask: int) -> list[list[int]]:
        drafted.clear()
        own = DFLASH.load(folder, torch.float32)
        evaluate_configs(load_bundle(bundle.path), {role: own}, {role: [Hypothesis("a mask", own.config, mask)]}, plain)
        return drafted[:]

    other = recipe.parent / "other"
    values = json.loads((recipe.parent / "first" / "config.json").read_text())
    other.mkdir()
    (other / "model.safetensors").write_bytes((recipe.parent / "first" / "model.safetensors").read_bytes())
    values["dflash_config"]["mask_token_id"] = 7
    (other / "config.json").write_text(json.dumps(values))
    assert read(recipe.parent / "first", 7) == read(other, 7) != read(recipe.parent / "first", 63)


def test_other_layers_are_tried_with_the_head(tmp_path: Path) -> None:
    """A drafter that is read again for a trial, since packed layers do not change, has its head's tables too."""
    recipe = project(tmp_path / "project", "pair", "pair")
    bundle = made(recipe)
    plain = make_engine(bundle, policy="off").generate(REQUESTS)
    bundle, role = load_bundle(bundle.path), DrafterRole.FIRST
    own = DFLASH.load(bundle.path / role.folder, torch.float32)
    DFLASH.attach(own, bundle.target)
    changed = replace(own.config, body=replace(own.config.body, rms_norm_eps=0.5))
    tried = [
        Hypothesis(name, config, own.config.mask_token_id) for name, config in (("own", own.config), ("eps", changed))
    ]
    found = evaluate_configs(bundle, {role: own}, {role: tried}, plain)
    assert [found[role][reading].lengths.numel() > 0 for reading in tried] == [True, True]
