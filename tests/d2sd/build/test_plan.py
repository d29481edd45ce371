"""Plans: the memory of models whose source checkpoint is FP8, and targets that cannot be planned."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

from d2sd.build.pipeline import build
from d2sd.build.plan import Plan, make_plan
from d2sd.build.tables import _memory, kv_lines, show_plan
from d2sd.bundle.contents import show_manifest
from d2sd.console import show_table
from d2sd.convert.checkpoint.families import parse_target_config
from d2sd.convert.checkpoint.headers import Shapes, stored_as
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.checkpoint.own_files import FP8_INPUTS
from d2sd.convert.checkpoint.quantization import KEY, Quantization, described
from d2sd.convert.checkpoint.target_shapes import target_shapes
from d2sd.convert.kinds import DFLASH
from d2sd.errors import CheckpointError, RecipeError
from d2sd.manifest import load_manifest
from d2sd.model_warnings import model_warnings
from d2sd.modeling.config import Family
from d2sd.policies import DrafterRole
from d2sd.recipe import Engines, load_recipe
from tests.convert.helpers import edit_json, write_project
from tests.tiny import tiny_decoder

_TYPES = {"unquantized": torch.bfloat16, "FP8": torch.float8_e4m3fn, "scale": torch.float32}


def test_a_context_beyond_the_targets_says_what_to_set(tmp_path: Path) -> None:
    recipe = load_recipe(write_project(tmp_path), ["limits={max_context: 4096, page_size: 8, prefill_chunk: 32}"])
    with pytest.raises(RecipeError, match=r"fix: set limits\.max_context to \d+, or less"):
        make_plan(recipe)


def test_a_target_stretched_by_yarn_is_explained(tmp_path: Path) -> None:
    """Qwen3's way to long contexts; the public drafters were trained without it."""
    recipe = write_project(tmp_path / "project")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    edit_json(tmp_path / "project" / "target" / "config.json", "rope_scaling", yarn)
    with pytest.raises(CheckpointError, match=r"its positions \(RoPE\) differ") as caught:
        make_plan(load_recipe(recipe))
    told = str(caught.value)
    assert 'found: {"rope_theta": 10000.0, "rope_scaling": null}' in told
    assert 'expected: {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "yarn", "factor": 4.0' in told
    assert "fix: remove the scaling from the target's config.json, and serve contexts of up to 128 tokens" in told


def test_an_architecture_that_is_not_run_comes_with_a_way_on(tmp_path: Path) -> None:
    recipe = write_project(tmp_path / "project")
    edit_json(tmp_path / "project" / "target" / "config.json", "model_type", "gemma3")
    told = r"not supported(.|\n)*gemma3(.|\n)*gpt_oss(.|\n)*fix: it reads images, and d2sd reads gemma3_text"
    with pytest.raises(CheckpointError, match=told):
        make_plan(load_recipe(recipe))


ENGINES = "engines={compute: [portable]}"


@pytest.mark.parametrize(
    ("family", "change", "told"),
    [
        ("qwen3_moe", ENGINES, r"(?i)experts(.|\n)*where: recipe: engines\n(.|\n)*found: qwen3_moe in(.|\n)*fix: "),
        (
            "qwen3_moe",
            "fp8={drafters: false}",
            r"(?i)experts(.|\n)*fp8\.target\n(.|\n)*found: qwen3_moe in(.|\n)*fix: ",
        ),
        ("qwen3_moe", "exact=true", r"(?i)experts(.|\n)*where: recipe: exact\n(.|\n)*found: qwen3_moe in(.|\n)*fix: "),
        ("gemma3_text", ENGINES, r"where: recipe: engines\n(.|\n)*found: gemma3_text in(.|\n)*fix: remove engines"),
        ("gemma3_text", "exact=true", r"where: recipe: exact\n(.|\n)*found: gemma3_text in(.|\n)*fix: remove exact"),
        ("gemma3_text", "limits.page_size=16", ""),
        ("gemma4_text", ENGINES, r"where: recipe: engines\n(.|\n)*found: gemma4_text in(.|\n)*fix: remove engines"),
        ("gemma4_text", "fp8={kv: true}", r"made of the keys' product(.|\n)*fp8\.target\n(.|\n)*found: gemma4_text in"),
        ("gemma4_text", "exact=true", r"where: recipe: exact\n(.|\n)*found: gemma4_text in(.|\n)*fix: remove exact"),
    ],
)
def test_what_a_family_has_not_is_refused(tmp_path: Path, family: Family, change: str, told: str) -> None:
    """Products of experts, and layers that are not fused where they have to be."""
    recipe = load_recipe(write_project(tmp_path, tiny_decoder(family), precision="bf16"), [change])
    if not told:
        assert make_plan(recipe).parts
        return
    with pytest.raises(RecipeError, match=told):
        make_plan(recipe)


def test_memory_of_experts_is_all_of_them_and_few_are_active(tmp_path: Path) -> None:
    recipe = write_project(tmp_path, tiny_decoder("qwen3_moe"), precision="bf16")
    plan = make_plan(load_recipe(recipe))
    target = plan.parts[0]
    # 3 layers of q and o (32 x 32), k and v (32 x 16), four norms; a router and 6 experts of 24 in two, an MLP in one
    inside = 3 * (2 * 32 * 32 + 2 * 32 * 16 + 2 * 32 + 2 * 8) + 2 * (6 * 32 + 6 * 3 * 32 * 24) + 3 * 32 * 64
    assert target.parameters == 64 * 32 + inside + 32
    assert target.weight_bytes == 2 * target.parameters
    show_table(_memory(plan), Console(file=(out := StringIO()), width=200))
    assert f"{target.parameters:,}, {target.parameters - 2 * 4 * 3 * 32 * 24:,} active" in out.getvalue()


def test_layers_with_windows_take_pages_for_their_windows(tmp_path: Path) -> None:
    """A target of three layers, one without a window; the first drafter's two layers have windows."""
    found = make_plan(
        load_recipe(
            write_project(tmp_path), ["limits={max_batch: 4, max_context: 128, page_size: 8, prefill_chunk: 32}"]
        )
    )
    first = found.drafters[DrafterRole.FIRST]
    parts = [
        replace(part, config=replace(part.config, body=replace(part.body, windows=windows)))  # type: ignore[type-var]
        for part, windows in ((found.parts[0], (9, None, 5)), (first, (17, 12)))
    ]
    windowed = replace(found, target=parts[0], drafters=found.drafters | {DrafterRole.FIRST: parts[1]})
    layer = 2 * 2 * 8 * 4  # keys and values of two heads of 8 in fp32
    assert [part.kv_token_bytes for part in windowed.parts] == [3 * layer, 2 * layer, 2 * layer]
    assert [windowed.windowed_token_bytes(part) for part in windowed.parts] == [2 * layer, 2 * layer, 0]
    graphs = replace(windowed, recipe=found.recipe.model_copy(update={"engines": Engines(compute=["portable"])}))
    assert [graphs.windowed_token_bytes(part) for part in graphs.parts] == [0, 2 * layer, 0], "one page table a graph"
    memory, block, chunk = windowed.kv_memory(), found.recipe.tree.block_size, found.recipe.limits.prefill_chunk
    each = -(-(16 + block + chunk) // 8) + 1  # 16 tokens in front of a row, a chunk and a step; not at pages' edges
    whole = -(-(128 + block) // 8)
    assert each < whole
    assert (memory.pages, memory.windowed_pages) == (4 * whole, 4 * each)
    assert memory.total_bytes == 8 * layer * ((1 + 4 * whole) * 3 + (1 + 4 * each) * 4)
    assert sum(windowed.kv_bytes(part) for part in windowed.parts) == memory.total_bytes < found.kv_memory().total_bytes
    assert windowed.request_bytes == layer * (128 * 3 + 8 * each * 4)
    show_table(_memory(windowed), Console(file=(out := StringIO()), width=200))
    assert f"{7 * layer} B, {4 * layer} B within windows" in out.getvalue()
    told = " ".join(text for _, text in kv_lines(windowed))
    assert f"{4 * each} pages of {8 * 4 * layer:,} B of layers with windows, {each} a request at most" in told
    assert "windows" not in " ".join(text for _, text in kv_lines(found))


def test_deeper_trees_are_of_whole_drafts(tmp_path: Path) -> None:
    """Pages of deeper trees are counted; a recipe that cuts drafts is refused, since a deeper tree has all of them."""
    project = write_project(tmp_path)
    limits = "limits={max_batch: 4, max_context: 64, page_size: 8, prefill_chunk: 32}"
    plain, deep = (make_plan(load_recipe(project, [limits, f"tree.max_depth={depth}"])) for depth in ("null", 12))
    assert (plain.recipe.tree.depth, deep.recipe.tree.depth) == (4, 12)
    assert (plain.kv_memory().pages, deep.kv_memory().pages) == (4 * 9, 4 * 10)
    assert (deep.recipe.tree.longest("chain"), deep.recipe.tree.longest("lookup")) == (4, 12)
    with pytest.raises(RecipeError, match=r"set tree\.block_size to 4, or remove max_depth"):
        make_plan(load_recipe(project, ["tree.block_size=3", "tree.branches=2", "tree.max_depth=12"]))


def test_states_are_counted_beside_pages(tmp_path: Path) -> None:
    recipe = load_recipe(write_project(tmp_path), ["limits={max_batch: 4, max_context: 128, page_size: 8}"])
    dense = make_plan(recipe)
    assert dense.target is not None
    hybrid = replace(dense, target=replace(dense.target, state_bytes=50_000))
    before, memory = dense.kv_memory(), hybrid.kv_memory()
    assert (before.states, memory.states, memory.pages) == (0, 1 + 4 + 4, before.pages)
    assert memory.total_bytes == sum(map(hybrid.kv_bytes, hybrid.parts)) == before.total_bytes + 9 * 50_000
    assert hybrid.request_bytes == dense.request_bytes + 50_000
    told = dict(kv_lines(hybrid))
    assert told["K/V pages"] == dict(kv_lines(dense))["K/V pages"]
    assert told["states"] == (
        "9 slots of 50,000 B: 0.5 MB; one a request, one of zeros, 4 for snapshots of the prefix cache"
    )
    assert "states" not in dict(kv_lines(dense))


def test_fp8_at_its_source_is_one_byte_and_its_scales_are_no_parameters(tmp_path: Path) -> None:
    recipe = write_project(tmp_path, precision="bf16")
    before = make_plan(load_recipe(recipe))
    by_recipe = make_plan(load_recipe(recipe, ["fp8={kv: true}"]))
    make_target_fp8(tmp_path / "target")
    make_drafter_fp8(tmp_path / "first")
    make_drafter_fp8(tmp_path / "second")
    found = make_plan(load_recipe(recipe))
    assert figures(found) == figures(by_recipe)
    (tmp_path / "second" / FP8_INPUTS).unlink()
    stored = make_plan(load_recipe(recipe)).parts
    # fc (64 x 32) and 2 layers of q (32 x 32), k and v (32 x 16)
    assert stored[2].weight_bytes == found.parts[2].weight_bytes + 64 * 32 - 8 + 2 * (32 * 32 + 2 * 32 * 16 - 3 * 8)
    assert stored[:2] == found.parts[:2]
    assert [part.parameters for part in found.parts] == [part.parameters for part in before.parts]
    # 3 layers of q and o (32 x 32), k and v (32 x 16) and three of the MLP (32 x 64) are a byte less each; these seven
    # have two scales of four bytes, K and V one each
    saved = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 - 7 * 8
    assert found.parts[0].weight_bytes == before.parts[0].weight_bytes - 3 * (saved - 8)
    # fc (64 x 32), and 2 layers of the same
    assert found.parts[1].weight_bytes == before.parts[1].weight_bytes - (64 * 32 - 8) - 2 * saved
    assert [part.kv_token_bytes for part in before.parts] == [2 * 3 * 16 * 2, 2 * 2 * 16 * 2, 2 * 2 * 16 * 2]
    assert [part.kv_token_bytes for part in found.parts] == [2 * 3 * 16, 2 * 2 * 16 * 2, 2 * 2 * 16 * 2]


def figures(plan: Plan) -> list[tuple[int, int, int, int]]:
    return [(part.parameters, part.weight_bytes, part.kv_token_bytes, plan.kv_bytes(part)) for part in plan.parts]


def ones(shapes: Shapes) -> dict[str, Tensor]:
    return {name: torch.ones(shape).to(_TYPES[stored_as(name, shapes)]) for name, shape in shapes.items()}


def make_target_fp8(folder: Path) -> None:
    quantization = Quantization(("lm_head",), True, ("test", "1"))
    shapes = target_shapes(parse_target_config(HFConfig.read(folder)), quantization)
    named = {
        "model." + re.sub(r"\b([kv])_cache\.", r"\1_proj.\1_", name): tensor for name, tensor in ones(shapes).items()
    }
    save_file(named, folder / "model.safetensors")
    edit_json(folder / "config.json", KEY, described(quantization)[1])


def make_drafter_fp8(folder: Path) -> None:
    quantization = Quantization(("fc", "*.q_proj", "*.k_proj", "*.v_proj"), False, ("test", "1"))
    config = DFLASH.read_config(folder)
    shapes = DFLASH.shapes(config, quantization)
    wide = [name.removesuffix(".weight") for name in shapes if re.search(r"(fc|[qkv]_proj)\.weight$", name)]
    DFLASH.write(folder, config, ones(shapes), quantization, dict.fromkeys(wide, 1.0))


@pytest.mark.parametrize(
    ("trained", "served", "found"),
    [
        ({}, {"enable_thinking": True}, None),
        ({"enable_thinking": False}, {"enable_thinking": False, "other": 1}, None),
        ({"enable_thinking": False}, {"enable_thinking": True}, "found true, expected false"),
        ({"enable_thinking": True}, {}, "found not set, expected true"),
        ({"effort": "low"}, {"effort": "high"}, 'found "high", expected "low"'),
    ],
)
def test_a_drafter_of_other_prompts_is_told(
    tmp_path: Path, trained: dict[str, object], served: dict[str, object], found: str | None, capsys: Any
) -> None:
    """By the plan's table and by a build, which goes on."""
    project = write_project(tmp_path / "project")
    settings = [f"drafters.first.template={json.dumps(trained)}", f"target.template={json.dumps(served)}"]
    recipe = load_recipe(project, settings)
    plan = make_plan(recipe)
    told = [said for part in plan.parts for said in model_warnings(recipe, part.name, part.licence)]
    assert len(told) == (found is not None)
    if found is not None:
        assert told[0].startswith("drafter_first: other prompts than it was trained with")
        assert f"target.template.{next(iter(trained))}: {found}; set it so" in told[0]
        build(recipe, tmp_path / "out", validate=False)
        assert told[0] in capsys.readouterr().err.splitlines()
        show_plan(plan, tmp_path / "out")
        show_manifest(tmp_path / "out", load_manifest(tmp_path / "out"))
        assert capsys.readouterr().out.count(told[0]) == 2


def test_the_public_drafters_of_our_recipes_are_served_as_they_were_trained() -> None:
    stated = 0
    for file in sorted(Path("recipes").glob("*.yaml")):
        recipe = load_recipe(file)
        for source in recipe.drafters.sources.values():
            assert source.template.items() <= recipe.target.template.items(), file
            stated += bool(source.template)
    assert stated == 3
