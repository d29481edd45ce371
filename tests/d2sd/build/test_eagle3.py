"""A recipe with an EAGLE-3 head: its bundle, what it serves, and what it is refused with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from d2sd.build.plan import make_plan
from d2sd.bundle.serving import can_run, make_engine
from d2sd.convert.kinds.eagle3 import KIND as EAGLE3
from d2sd.errors import CheckpointError, RecipeError
from d2sd.policies import DrafterRole
from d2sd.recipe import Policy, load_recipe
from tests.convert.helpers import tree_bytes, write_project
from tests.d2sd.build.helpers import answers, made
from tests.tiny import tiny_decoder, tiny_eagle

IDS = tuple(range(3, 40))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The target and the head alone."""
    path = write_project(tmp_path / "project", drafters={"first": {"path": "eagle"}})
    head = tiny_eagle(tiny_decoder().config, draft_vocabulary=IDS)
    EAGLE3.write(path.parent / "eagle", head.config, head.state_dict())
    return path


def test_a_bundle_with_a_head(recipe: Path) -> None:
    """Every check of a build, the same bytes, its size by arithmetic, and the text of plain decoding."""
    bundle = made(recipe, validate=True)
    files = {f"drafter_first/{name}": content for name, content in tree_bytes(recipe.parent / "eagle").items()}
    assert files.items() <= tree_bytes(bundle.path).items()
    part = make_plan(load_recipe(recipe)).drafters[DrafterRole.FIRST]
    assert part.parameters == sum(p.numel() for p in EAGLE3.load(recipe.parent / "eagle", torch.float32).parameters())
    assert bundle.manifest.drafters[DrafterRole.FIRST.key].model_dump() == {
        "num_layers": 1,
        "block_size": 4,
        "licence": "not stated",
        "parameters": part.parameters,
        "draft_vocabulary": len(IDS),
        "target_layer_ids": [0, 1],
    }
    greedy: Any = bundle.manifest.checks["greedy"]
    assert all(figures["equal_to_plain_decoding"] == figures["prompts"] for figures in greedy.values())
    kinds: tuple[Policy, ...] = ("off", "lookup", "chain", "auto", "reanchor", "d2sd", "ddtree", "hybrid")
    runs = [name for name in kinds if can_run(bundle.draft_configs, name)]
    assert runs == [name for name in kinds if name != "d2sd"]
    off, *others = (answers(bundle, name) for name in runs)
    assert others == [off] * len(others)


def test_pages_have_room_for_what_a_head_keeps(recipe: Path) -> None:
    """A token takes K/V of its layer, and as many numbers more as its hidden state."""
    part = make_plan(load_recipe(recipe)).drafters[DrafterRole.FIRST]
    engine = make_engine(made(recipe), policy="chain")
    page = engine.limits.page_size
    pool = engine.runner.pools[1]
    assert part.kv_token_bytes == sum(tensor.nbytes for tensor in pool.tensors) // (pool.k.shape[1] * page)
    assert part.kv_token_bytes == 2 * (2 * 8) * 4 * 2


def refused(recipe: Path, what: str, *changes: str, error: type[Exception] = RecipeError) -> None:
    with pytest.raises(error, match=what):
        make_plan(load_recipe(recipe, changes))


def test_what_a_head_is_refused_with(recipe: Path) -> None:
    second = "drafters.second={path: second}"
    refused(recipe, r"No second drafter drafts behind an EAGLE-3 head[\s\S]*drafters\.second", second)
    refused(recipe, "has no flex_parallel", "tree.policy=flex_parallel")
    refused(recipe, r"trained for its draft vocabulary", "drafters.vocabulary={size: 20}", error=CheckpointError)
    refused(recipe, "EAGLE-3 heads are not exported", "engines={compute: [portable]}")
    refused(recipe, r"No drafter was trained on blocks of that size", "tree.block_size=5")


def test_a_head_in_the_place_of_a_second(tmp_path: Path) -> None:
    path = write_project(tmp_path / "project")
    head = tiny_eagle(tiny_decoder().config)
    EAGLE3.write(path.parent / "second", head.config, head.state_dict())
    refused(path, "cannot be a second drafter", error=CheckpointError)
