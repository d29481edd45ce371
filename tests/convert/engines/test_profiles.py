"""Every shape that the runtime makes of a recipe fits a profile of that recipe."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from d2sd.convert.engines.profiles import Profile, make_profiles
from d2sd.modeling.config import DecoderConfig, DraftConfig
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.policies import PolicyName
from d2sd.recipe import Builder, Recipe, Tree
from d2sd.runtime.backends.exported import GraphDecoder, GraphDrafter, OnnxSession, Session, graph_drafter
from d2sd.runtime.engine import Engine
from d2sd.runtime.memory import PoolBytes, plan_kv_memory
from d2sd.runtime.request import Limits, Request
from d2sd.runtime.speculation.policy import Policy, make_policy
from tests.convert.exported import Exported, ExportOnce
from tests.tiny import random_tokens, runner_of, tiny_decoder, tiny_flex

pytest.importorskip("onnxruntime", reason="the extra engines is not installed")
RECIPE = Recipe.model_validate(
    {
        "d2sd": 1,
        "name": "tiny",
        "target": {"path": "target"},
        "drafters": {"first": {"path": "first"}, "second": {"path": "second"}},
        "tree": {"block_size": 4, "branches": 3, "row_budget": 20},
        "sampling": {"max_new_tokens": 12},
        "limits": {"max_batch": 3, "max_context": 48, "page_size": 4, "prefill_chunk": 24},
    }
)
LIMITS = Limits.of(RECIPE.limits)


def fits(shapes: Mapping[str, tuple[int, ...]], profile: Profile) -> bool:
    return shapes.keys() == profile.keys() and all(
        all(low <= size <= high for low, size, high in zip(least, shapes[name], most, strict=True))
        for name, (least, _, most) in profile.items()
    )


BUILDERS: tuple[Builder, ...] = "tensorrt-rtx", "tensorrt"


class Watched:
    """A session that finds each run's profile, of both builders."""

    def __init__(self, session: Session, config: DecoderConfig | DraftConfig, recipe: Recipe = RECIPE) -> None:
        self._session = session
        self._profiles = {builder: make_profiles(recipe, builder, config) for builder in BUILDERS}
        self.used: dict[Builder, set[int]] = {builder: set() for builder in BUILDERS}

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
        for builder, profiles in self._profiles.items():
            fitting = [place for place, profile in enumerate(profiles) if fits(shapes, profile)]
            assert fitting, (builder, shapes)
            self.used[builder].add(fitting[0])
        return self._session.run(inputs)


def policy_of(name: PolicyName) -> Policy:
    tree = RECIPE.tree
    return make_policy(name, block_size=tree.block_size, branches=tree.branches, row_budget=tree.row_budget)


def watched_engine(pair: Exported, policy: Policy, recipe: Recipe = RECIPE) -> tuple[Engine, list[Watched]]:
    """An engine over watched sessions; both drafters run one graph, since shapes do not depend on weights."""
    target, drafters = pair.target, [pair.drafter, deepcopy(pair.drafter)]
    watched = [
        Watched(OnnxSession(pair.folder / f"{name}.onnx"), model.config, recipe)
        for name, model in (("target", target), ("drafter", drafters[0]), ("drafter", drafters[1]))
    ]
    runner = runner_of(
        GraphDecoder(target, drafters[0].config.target_layer_ids, watched[0]),
        *(GraphDrafter(drafter, session, 4, 1024) for drafter, session in zip(drafters, watched[1:], strict=True)),
        block_size=recipe.tree.depth,
    )
    return Engine(runner, policy, LIMITS), watched


@pytest.fixture(scope="module")
def pair(export_once: ExportOnce) -> Exported:
    return export_once("qwen2", torch.float32)


@pytest.mark.slow
@pytest.mark.export
@pytest.mark.parametrize("policy", ["off", "lookup", "chain", "reanchor", "d2sd", "ddtree", "hybrid"])
def test_all_that_runs_fits(pair: Exported, policy: PolicyName) -> None:
    engine, watched = watched_engine(pair, policy_of(policy))
    prompts = [random_tokens(tiny_decoder(), 1, size, seed=size)[0].tolist() for size in (1, 36, 30)]
    for sequence in engine.generate([Request(tuple(prompt), 12) for prompt in prompts]):
        assert len(sequence.answer) == 12
    assert watched[0].used == {"tensorrt-rtx": {0, 1}, "tensorrt": {0, 1, 2, 3}}, "batches of 1, 2, 3, and prefill"


@pytest.mark.slow
@pytest.mark.export
def test_trees_that_are_deeper_than_blocks_fit(pair: Exported) -> None:
    deep = RECIPE.model_copy(update={"tree": RECIPE.tree.model_copy(update={"max_depth": 11})})
    engine, watched = watched_engine(pair, replace(policy_of("hybrid"), lookup=True), deep)
    for sequence in engine.generate([Request((1, 2, 3) * size, 12) for size in (1, 12, 10)]):
        assert len(sequence.answer) == 12
    assert engine.runner.block_size == 11
    _, _, most = make_profiles(deep, "tensorrt", pair.drafter.config)[0]["features"]
    assert most[1] == 11, "a captured step injects all that a step commits"
    assert watched[0].used == {"tensorrt-rtx": {0, 1}, "tensorrt": {0, 1, 2, 3}}


@pytest.mark.slow
@pytest.mark.export
def test_what_auto_measures_fits(pair: Exported) -> None:
    engine, watched = watched_engine(pair, policy_of("hybrid"))
    engine.enable_auto(
        [policy_of(name) for name in ("off", "chain", "hybrid")], {"chain": ([9.0], [9.0]), "hybrid": ([9.0], [9.0])}
    )
    assert all(used for session in watched for used in session.used.values())


def test_mask_rows_fit() -> None:
    """One block a request, in every batch bucket, over pages of the target's last layers."""
    target = tiny_decoder("qwen3", head_dim=16)
    head = tiny_flex(target, block_size=4)
    watched = Watched(Eager(head), head.config)
    runner = runner_of(target, graph_drafter(head, watched, 4))
    prompts = [random_tokens(target, 1, size, seed=size)[0].tolist() for size in (1, 36, 30)]
    for sequence in Engine(runner, policy_of("chain"), LIMITS).generate([Request(tuple(p), 12) for p in prompts]):
        assert len(sequence.answer) == 12
    assert watched.used == {"tensorrt-rtx": {0}, "tensorrt": {0, 1, 2}}


class Eager:
    """Zeros for hidden states: drafts are rejected, which shapes do not depend on."""

    def __init__(self, head: FlexHead) -> None:
        self._width = head.config.body.hidden_size

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"hidden": torch.zeros(*inputs["positions"].shape, self._width)}


def test_profiles_hold_the_pools_of_the_runtime() -> None:
    memory = plan_kv_memory(LIMITS, RECIPE.tree.block_size, PoolBytes(1))
    for profile in make_profiles(RECIPE, "tensorrt", tiny_decoder().config):
        assert profile["k_pages_0"][2][0] == memory.pool_pages
        assert profile["page_table"][2][1] == 16, "a bucket that holds 13 pages"


def test_classic_tensorrt_has_a_profile_a_power_of_two_for_every_batch_bucket() -> None:
    config = tiny_decoder().config
    batches = [profile["embedded"] for profile in make_profiles(RECIPE, "tensorrt", config)]
    assert [shapes[2][:2] for shapes in batches] == [[1, 20], [2, 20], [4, 20], [1, 32]]
    assert [least[0] for least, *_ in batches] == [1, 2, 3, 1]
    assert all(most == best for _, best, most in batches)
    batches = [profile["embedded"] for profile in make_profiles(RECIPE, "tensorrt-rtx", config)]
    assert [(least[:2], most[:2]) for least, _, most in batches] == [([1, 1], [4, 20]), ([1, 1], [1, 32])]
    wide = RECIPE.model_copy(update={"tree": Tree(block_size=4, branches=3, row_budget=33)})
    assert make_profiles(wide, "tensorrt-rtx", config)[0]["attn_mask"] == ([1, 1, 1], [4, 33, 2], [4, 33, 2])
