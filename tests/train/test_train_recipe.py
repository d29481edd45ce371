"""The training recipe: what is shipped loads, and every wrong value is refused by its key."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from d2sd.errors import RecipeError
from d2sd.train_recipe import TrainRecipe, load_train_recipe

ROOT = Path(__file__).parents[2]
MINIMAL: dict[str, Any] = {
    "d2sd_train": 1,
    "name": "tiny",
    "target": {"path": "target"},
    "drafter": {"layers": 2, "block_size": 4, "mask_token_id": 63, "target_layer_ids": [0, 1]},
    "data": {"prompts": [{"path": "prompts.jsonl"}]},
    "first": {"steps": 10, "objective": {"ce": 0.3, "kl": 0.7}},
}
SETTINGS: dict[str, Any] = {"steps": 4, "objective": {"ce": 1}}
DOCUMENTS: dict[str, Any] = {"name": "a", "path": "a.jsonl", "count": 3, "templates": ["{text}"]}


def load(folder: Path, **changes: object) -> TrainRecipe:
    """`changes` replace keys, dots spelled __; ... deletes one."""
    values = yaml.safe_load(yaml.safe_dump(MINIMAL))
    for key, value in changes.items():
        *parents, last = key.split("__")
        part = values
        for name in parents:
            part = part.setdefault(name, {})
        if value is ...:
            del part[last]
        else:
            part[last] = value
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(values))
    return load_train_recipe(path)


SHIPPED = sorted((ROOT / "recipes" / "train").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipes_load_and_are_named_after_their_file(path: Path) -> None:
    assert load_train_recipe(path).name == path.stem


def test_pair_and_head_of_a_gpu_are_trained_on_the_same_data() -> None:
    pair, head = (
        load_train_recipe(ROOT / "recipes" / "train" / f"smollm2-135m-{name}.yaml") for name in ("gpu", "flex-gpu")
    )
    assert pair.data == head.data
    assert (pair.target, pair.precision) == (head.target, head.precision)
    assert pair.first is not None
    assert head.flex is not None
    budgets = [(one.steps, one.batch, one.blocks) for one in (pair.first, head.flex)]
    assert budgets[0] == budgets[1]


def test_terms_and_paths(tmp_path: Path) -> None:
    recipe = load(tmp_path)
    assert recipe.first is not None
    assert recipe.first.objective.terms == {"ce": 0.3, "kl": 0.7}
    assert recipe.path("prompts.jsonl") == tmp_path / "prompts.jsonl"


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("drafters", {}, "drafters"),
        ("first__stepz", 10, "first.stepz"),
        ("data__prompts", [{"path": "a", "number": 1}], "data.prompts.0.number"),
        ("data__documents", [DOCUMENTS | {"templates": []}], "data.documents.0.templates"),
        ("data__documents", [DOCUMENTS | {"templates": ["Summarize."]}], "show no field of a document"),
        ("data__documents", [DOCUMENTS | {"templates": ["{text:>9}"]}], "{text} is not the name of a field"),
        ("data__documents", [DOCUMENTS | {"templates": ["{0}"]}], "{0} is not the name of a field"),
        ("data__documents", [DOCUMENTS | {"templates": ["a } b {text}"]}], "data.documents.0"),
        ("data__documents", [DOCUMENTS | {"templates": ["{passages}"]}], "if and only if passages is above 1"),
        ("data__documents", [DOCUMENTS | {"passages": 2}], "if and only if passages is above 1"),
        ("data__documents", [DOCUMENTS | {"passage": "{text!r}"}], "{text} is not the name of a field"),
        ("first__steps", "10", "first.steps"),
        ("first__steps", 0, "first.steps"),
        ("first__steps", ..., "first.steps"),
        ("first__hard", 0.3, "first.hard"),
        ("first__objective", ..., "first.objective"),
        ("first__objective", {}, "one of ce, kl, tv, nla, lk"),
        ("first__objective", {"focal": 1, "chain": 0.5}, "one of ce, kl, tv, nla, lk"),
        ("first__objective", {"ce": 1, "smoothing": 0.5}, "smoothing has no effect with slots: decay"),
        ("first__objective", {"ce": 1, "slots": "uniform", "decay": 4}, "decay has no effect with slots: uniform"),
        ("first__on_rejection", 0.5, "first.on_rejection"),
        ("second__layers", 65, "second.layers are the first drafter's own: at most drafter.layers"),
        ("evaluation__prompts", 49, "fix: lower evaluation.prompts, or raise data.held_out"),
        (
            "evaluation__prompts",
            49,
            "evaluation.prompts 49 is more than data.held_out 48: evaluations use held-out prompts",
        ),
        ("first__learning_rate", float("nan"), "first.learning_rate"),
        ("first__seed", True, "first.seed"),
        ("drafter__target_layer_ids", [], "drafter.target_layer_ids [] is not"),
        ("drafter__target_layer_ids", [2, 1], "drafter.target_layer_ids [2, 1] is not strictly ascending"),
        ("drafter__target_layer_ids", [1, 1], "drafter.target_layer_ids [1, 1] is not"),
        ("drafter__target_layer_ids", [-1, 1], "drafter.target_layer_ids [-1, 1] is not"),
        ("data__prompts", ..., "data.prompts"),
        ("data__self_written", [{"name": "a", "count": 3, "openings": []}], "data.self_written.0.openings"),
        ("name", "../up", "name"),
        ("target", {}, "target"),
        ("d2sd_train", 2, "d2sd_train"),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(tmp_path: Path, key: str, value: object, told: str) -> None:
    """Bounds of numbers and lists of words are in docs/reference/train-recipe.md, which is written of the schema."""
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, second__steps=1, second__objective__ce=1, **{key: value})
    assert told in str(caught.value)
    assert str(tmp_path / "train.yaml") in str(caught.value)


#: Recipes that load: an EAGLE-3 head, a FlexDraft head, and a second drafter behind a ready first one.
EAGLE: dict[str, Any] = {"drafter__kind": "eagle3", "drafter__layers": 1}
FLEX: dict[str, Any] = {"drafter": ..., "first": ..., "flex": SETTINGS | {"head": {"layers": 1, "block_size": 4}}}
FLEX |= {"precision": "fp32", "flex__precision": "fp32"}
READY: dict[str, Any] = {"first": ..., "ready_first": {"path": "ready"}, "second": SETTINGS}


@pytest.mark.parametrize(
    ("parts", "key", "value", "told"),
    [
        (EAGLE, "second", SETTINGS, "neither `second` nor `head`"),
        (EAGLE, "head", {"steps": 1}, "neither `second` nor `head`"),
        (EAGLE, "first__start", {"path": "first"}, "without start"),
        (EAGLE, "drafter__kind", "eagle4", "drafter.kind"),
        (FLEX, "first", SETTINGS, "exactly one of"),
        (FLEX, "second", SETTINGS, "second extends"),
        (FLEX, "drafter", MINIMAL["drafter"], "needs `drafter`"),
        (FLEX, "flex__head", ..., "flex.head"),
        (FLEX, "precision", "bf16", "set precision to fp32"),
        (READY, "first", SETTINGS, "exactly one of `first`, `ready_first` and `flex`"),
        (READY, "ready_first", None, "exactly one of `first`, `ready_first` and `flex`"),
        (READY, "second", None, "leaves nothing to train"),
        (READY, "ready_second", {"path": "ready"}, "ready_second needs"),
        (READY, "drafter__draft_vocab_size", 12, "draft_vocab_size"),
    ],
)
def test_parts_that_contradict_each_other(
    tmp_path: Path, parts: dict[str, Any], key: str, value: object, told: str
) -> None:
    load(tmp_path, **deepcopy(parts))
    with pytest.raises(RecipeError, match=told):
        load(tmp_path, **deepcopy(parts) | {key: value})


def test_a_bundles_recipe_is_no_training_recipe() -> None:
    with pytest.raises(RecipeError, match="d2sd_train"):
        load_train_recipe(ROOT / "recipes" / "smollm2-135m.yaml")
