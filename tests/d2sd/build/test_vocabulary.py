"""Draft vocabularies that a build cuts: which ids are kept, what the bundle says, and that nothing else changes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from d2sd.build.pipeline import build
from d2sd.build.plan import make_plan
from d2sd.build.vocabulary import Ranking, narrowed, rank
from d2sd.bundle.load import load_bundle
from d2sd.errors import D2SDError, RecipeError
from d2sd.manifest import load_manifest
from d2sd.policies import PolicyName
from d2sd.recipe import Recipe, load_recipe
from tests.convert.helpers import add_calibration, add_flex, edit_yaml, write_project
from tests.d2sd.build.helpers import answers, run
from tests.tiny import tiny_decoder, tiny_drafter, tiny_flex

POLICIES: tuple[PolicyName, ...] = ("chain", "d2sd", "ddtree", "hybrid")


class Words:
    """A tokenizer of numbers."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}


def cut_to(recipe: Path, vocabulary: Any) -> Recipe:
    edit_yaml(recipe, "drafters.vocabulary", vocabulary)
    return load_recipe(recipe)


def write_texts(recipe: Path, *texts: str) -> None:
    rows = [json.dumps({"id": str(i), "turns": [text]}) for i, text in enumerate(texts)]
    (recipe.parent / "texts.jsonl").write_text("\n".join(rows))


def test_frequent_tokens_come_first_then_early_ones(recipe: Path) -> None:
    write_texts(recipe, "9 9 7 7 7", "7 1 1 50", "9 3")
    ranking = rank(cut_to(recipe, {"size": 4, "texts": "texts.jsonl"}), Words(), 64)
    assert ranking.order == (9, 7, 3, 0, 1, 2, 4, 5, 6, 8, *range(10, 64))  # of the first and the third text
    assert ranking.seen == Counter({1: 2, 7: 1, 50: 1})
    assert ranking.coverage((7, 1)) == 0.75
    assert Ranking((), Counter()).coverage((1,)) == 0


def test_a_drafter_keeps_to_what_it_can_draft() -> None:
    """Neither the mask nor what was not in its vocabulary; of one with fewer ids all."""
    config = tiny_drafter(tiny_decoder().config).config
    order = tuple(dict.fromkeys((config.mask_token_id, 30, 2, 40, 11, *range(64))))
    assert narrowed(config, order, 3).draft_vocabulary == (2, 30, 40)
    own = replace(config, draft_vocabulary=(2, 11, 12))
    assert narrowed(own, order, 2).draft_vocabulary == (2, 11)
    assert narrowed(own, order, 40) == own
    assert narrowed(config, order, 64) == config


def test_a_bundle_says_what_is_drafted_and_is_lossless(recipe: Path, out: Path) -> None:
    plain = make_plan(load_recipe(recipe))
    write_texts(recipe, *["w40 w50"] * 4)
    wanted = cut_to(recipe, {"size": 20, "texts": "texts.jsonl"})
    plan = make_plan(wanted)
    assert [len(part.draft_config.draft_vocabulary or ()) for part in plan.drafters.values()] == [20, 20]
    assert plan.weight_bytes == plain.weight_bytes
    build(wanted, out / "tiny")
    told = load_manifest(out / "tiny").model_dump()["drafters"]
    assert [(d["draft_vocabulary"], d["coverage"]) for d in told.values()] == [(20, 1.0)] * 2
    bundle = load_bundle(out / "tiny")
    ids = {drafter.config.draft_vocabulary for drafter in bundle.drafters.values()}
    assert len(ids) == 1
    assert {40, 50} <= set(*ids)
    greedy = answers(bundle, "off")[0]
    for policy in POLICIES:
        assert answers(bundle, policy)[0] == greedy


def test_ids_of_a_bundle_follow_the_texts(recipe: Path, out: Path) -> None:
    """The stage of a drafter is not taken from an earlier build with other texts."""
    found = list[list[int]]()
    for text in ("w40", "w50"):
        write_texts(recipe, *[text] * 2)
        files = run(recipe if found else cut_and_path(recipe), out / "tiny")
        found.append(json.loads(files["drafter_first/draft_vocab.json"])["ids"])
    assert found[0] != found[1]


def cut_and_path(recipe: Path) -> Path:
    cut_to(recipe, {"size": 8, "texts": "texts.jsonl"})
    return recipe


def test_a_calibration_is_of_the_vocabulary_it_was_fitted_with(recipe: Path, out: Path) -> None:
    add_calibration(recipe)
    run(recipe, out / "whole")
    cut_to(recipe, 20)
    with pytest.raises(D2SDError, match="fitted to another first drafter"):
        run(recipe, out / "cut")


@pytest.mark.parametrize(
    ("vocabulary", "expected"), [(1, "greater than or equal to 2"), ({"texts": "t"}, "size"), ("8k", "dictionary")]
)
def test_what_is_no_size_is_refused(recipe: Path, vocabulary: Any, expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        make_plan(cut_to(recipe, vocabulary))
    assert "vocabulary" in str(caught.value.where)
    assert expected in str(caught.value)


def test_texts_are_read_when_it_is_planned(recipe: Path) -> None:
    with pytest.raises(D2SDError, match="prompt file"):
        make_plan(cut_to(recipe, {"size": 20, "texts": "missing.jsonl"}))


def test_a_trained_vocabulary_is_not_cut(tmp_path: Path) -> None:
    """A FlexDraft head with a calibration network is refused; one without is cut like the others."""
    recipe = write_project(tmp_path)
    add_flex(recipe)
    with pytest.raises(RecipeError, match="calibration network"):
        make_plan(cut_to(recipe, 20))
    config = replace(tiny_flex(tiny_decoder()).config, calibration_size=0)
    assert narrowed(config, range(64), 5).draft_vocabulary == (0, 1, 2, 3, 4)
