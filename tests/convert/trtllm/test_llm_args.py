"""The YAML that TensorRT-LLM is started with: what is in it, and that what it would refuse is refused here."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from d2sd.build.pipeline import build
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.trtllm.fields import (
    RELEASE,
    Arguments,
    Decoding,
    DFlash,
    Eagle3,
    KvCache,
    MoeBackend,
    check_arguments,
)
from d2sd.convert.trtllm.llm_args import (
    DFLASH,
    FOLDER,
    MODULE,
    TREE,
    TRITON,
    check_llm_args,
    tree_arguments,
    tree_policy,
    unsupported_reason,
)
from d2sd.errors import BundleError, RecipeError
from d2sd.recipe import Recipe, load_recipe
from tests.convert.helpers import edit_yaml, write_project

#: Keys of the tree that 1.3.0rc27, where the window begins, has as well.
IN_RC27 = set(Eagle3.model_fields) - {"moe_backend", "spec_dec_variant"}


def recipe_of(folder: Path, **changes: Any) -> Recipe:
    """A project's, in bf16."""
    return load_recipe(write_project(folder / "project", **({"precision": "bf16"} | changes)))


def written(folder: Path, **changes: Any) -> Path:
    """A bundle, with arguments."""
    build(recipe_of(folder, **changes), folder / "bundle", validate=False)
    return folder / "bundle"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of both drafters, which no test changes."""
    return written(tmp_path_factory.mktemp("trtllm"))


def read(bundle: Path, name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((bundle / FOLDER / name).read_text())
    return values


def test_arguments_of_a_bundle(bundle: Path) -> None:
    assert sorted(p.name for p in (bundle / FOLDER).iterdir()) == sorted([DFLASH, TREE, MODULE, TRITON])
    assert check_llm_args(bundle) == [DFLASH, TREE]
    values = read(bundle, DFLASH)
    assert values["speculative_config"] == {
        "decoding_type": "DFlash",
        "speculative_model": "drafter_first",
        "max_draft_len": 3,
        "mask_token_id": 63,
        "target_layer_ids": [0, 1],
        "attention_backend": "VANILLA",
    }
    assert (bundle / values["speculative_config"]["speculative_model"] / "config.json").is_file()
    assert (values["max_batch_size"], values["max_seq_len"]) == (2, 64)
    assert values["kv_cache_config"] == {"enable_block_reuse": False}
    for name in (DFLASH, TREE):
        head = (bundle / FOLDER / name).read_text()
        assert RELEASE in head
        assert f"trtllm-serve target --config {FOLDER}/{name}" in head
    assert f"--custom_module_dirs {FOLDER}/{MODULE}" in (bundle / FOLDER / TREE).read_text()


def test_arguments_of_a_tree(bundle: Path) -> None:
    values = read(bundle, TREE)
    assert values["speculative_config"] == {
        "decoding_type": "Eagle3",
        "speculative_model": "drafter_first",
        "use_dynamic_tree": True,
        "max_draft_len": 3,
        "max_total_draft_tokens": 15,
        "dynamic_tree_max_topK": 5,
        "eagle3_layers_to_capture": [0, 1],
        "eagle3_model_arch": "llama3",
        "use_rejection_sampling": True,
    }
    assert values["speculative_config"].keys() <= IN_RC27
    assert values["max_num_tokens"] == 8192
    assert values["kv_cache_config"] == {"enable_block_reuse": False}
    parsed = check_arguments(values, TREE).speculative_config
    assert isinstance(parsed, Eagle3)
    assert parsed.eagle3_layers_to_capture == {0, 1}


@pytest.mark.parametrize(("max_batch", "nodes"), [(1, 64), (8, 64), (16, 32), (64, 8), (512, 4), (1, 128)])
def test_a_larger_batch_has_smaller_trees(bundle: Path, tmp_path: Path, max_batch: int, nodes: int) -> None:
    """A wide one is not sampled by rejection."""
    tree, limits = {"block_size": 4, "branches": 3, "row_budget": max(64, nodes)}, {"max_batch": max_batch}
    recipe = recipe_of(tmp_path, tree=tree, limits=limits | {"max_context": 64})
    values, _ = tree_arguments(HFConfig.read(bundle / "drafter_first"), recipe)
    assert values["speculative_config"]["max_total_draft_tokens"] + 1 == nodes
    assert values["max_num_tokens"] >= max_batch * nodes
    if nodes == 128:
        assert values["speculative_config"]["dynamic_tree_max_topK"] == 43
        assert not values["speculative_config"]["use_rejection_sampling"]


def test_tritons_model_has_the_same_arguments(bundle: Path) -> None:
    values = yaml.safe_load((bundle / FOLDER / TRITON / "model.yaml").read_text())
    assert values.pop("triton_config") == {"max_batch_size": 0, "decoupled": True}
    assert values.pop("model") == "target"
    assert values == read(bundle, TREE)
    assert "register(" in (bundle / FOLDER / TRITON / "model.py").read_text()


@pytest.mark.parametrize(
    ("drafters", "policy", "asked", "found"),
    [
        (2, "auto", None, "hybrid"),
        (1, "auto", None, "ddtree"),
        (2, "d2sd", None, "d2sd"),
        (2, "off", None, "hybrid"),
        (2, "auto", "reanchor", "reanchor"),
        (2, "chain", "auto", "hybrid"),
        (1, "hybrid", None, "hybrid"),
        (1, "auto", "hybrid", "hybrid"),
    ],
)
def test_policies_of_trees(tmp_path: Path, drafters: int, policy: str, asked: str | None, found: str) -> None:
    named = {"first": {"path": "first"}} | ({"second": {"path": "second"}} if drafters == 2 else {})
    tree = {"policy": policy, "block_size": 4, "branches": 3}
    recipe = recipe_of(tmp_path, drafters=named, tree=tree)
    assert tree_policy(recipe, asked) == found
    with pytest.raises(RecipeError, match=r"reanchor, (d2sd, )?ddtree, hybrid"):
        tree_policy(recipe, "flex_parallel")


def test_one_drafter_has_a_tree_as_well(tmp_path: Path) -> None:
    bundle = written(tmp_path, drafters={"first": {"path": "first"}})
    assert check_llm_args(bundle) == [DFLASH, TREE]
    assert "ddtree+lookup of 16 rows" in (bundle / FOLDER / TREE).read_text()


def test_what_it_cannot_serve(tmp_path: Path) -> None:
    assert "16-bit" in str(unsupported_reason(recipe_of(tmp_path, precision="fp32")))
    assert "no drafter" in str(unsupported_reason(recipe_of(tmp_path, drafters={}, tree={"policy": "off"})))
    assert unsupported_reason(recipe_of(tmp_path, precision="fp16")) is None


#: Of either mode, and of one.
REFUSED: list[tuple[str, object]] = [
    ("speculative_config.second_model", "drafter_second"),  # there is no such key: hence the module
    ("speculative_config.max_draft_len", "3"),
    ("speculative_config.max_draft_len", -1),
    ("speculative_config.moe_backend", "FASTEST"),
    ("speculative_config.spec_dec_variant", 0),
    ("speculative_config.acceptance_rate_threshold", 1.5),
    ("speculative_config.decoding_type", "D2SD"),
    ("kv_cache_config.enable_block_reuse", "no"),
    ("max_batchsize", 4),
    ("max_batch_size", 4.0),
    ("max_num_tokens", "8192"),
    ("tensor_parallel_size", None),
]
OF_ONE: list[tuple[str, str, object]] = [
    (DFLASH, "speculative_config.attention_backend", "FA3"),
    (DFLASH, "speculative_config.target_layer_ids", ["0", "1"]),
    (DFLASH, "speculative_config.use_dynamic_tree", True),
    (TREE, "speculative_config.target_layer_ids", [0, 1]),
    (TREE, "speculative_config.eagle_choices", [[0]]),  # gone since #18210
    (TREE, "speculative_config.eagle3_one_model", True),
    (TREE, "speculative_config.eagle3_model_arch", "qwen"),
    (TREE, "speculative_config.use_dynamic_tree", "yes"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "key", "value"), [*OF_ONE, *((name, *row) for name in (DFLASH, TREE) for row in REFUSED)]
)
def test_what_tensorrt_llm_refuses_is_refused(bundle: Path, tmp_path: Path, name: str, key: str, value: object) -> None:
    refuses(bundle, tmp_path, name, key, value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"max_total_draft_tokens": 2}, "max_total_draft_tokens must be"),
        ({"max_total_draft_tokens": 1000}, "max_total_draft_tokens must be"),
        ({"dynamic_tree_max_topK": None}, "needs dynamic_tree_max_topK"),
        ({"dynamic_tree_max_topK": 33}, "at most 32"),
        ({"speculative_model": None}, "needs speculative_model"),
    ],
)
def test_what_its_validators_ask_of_a_tree(bundle: Path, changes: dict[str, Any], told: str) -> None:
    values = read(bundle, TREE)
    values["speculative_config"] |= changes
    with pytest.raises(BundleError, match=told):
        check_arguments(values, TREE)


def refuses(bundle: Path, folder: Path, name: str, key: str, value: object, told: str | None = None) -> None:
    copy = Path(shutil.copytree(bundle, folder / "bundle"))
    edit_yaml(copy / FOLDER / name, key, value)
    with pytest.raises(BundleError, match=told or key.rpartition(".")[2]):
        check_llm_args(copy)


@pytest.mark.parametrize("name", [DFLASH, TREE])
def test_other_drafts_than_the_drafter_was_trained_for(bundle: Path, tmp_path: Path, name: str) -> None:
    refuses(bundle, tmp_path, name, "speculative_config.max_draft_len", 4, "1 to 3")


def test_a_smaller_block_drafts_less(tmp_path: Path) -> None:
    """The drafter was trained on blocks of four; the recipe sets three."""
    bundle = written(tmp_path, tree={"block_size": 3, "branches": 2, "row_budget": 16})
    for name in (DFLASH, TREE):
        values = read(bundle, name)
        assert values["speculative_config"]["max_draft_len"] == 2
    assert check_llm_args(bundle) == [DFLASH, TREE]


def test_the_table_as_it_was_read() -> None:
    """Names and defaults that our choices rest on; a change here is a new reading of the reference."""
    assert check_arguments({}, "nothing") == Arguments()
    assert KvCache().enable_block_reuse, "our YAML would not have to turn it off"
    plain = DFlash()
    assert (plain.decoding_type, plain.attention_backend, plain.max_draft_len) == ("DFlash", "VANILLA", None)
    assert not plain.use_rejection_sampling
    assert (len(Decoding.model_fields), len(DFlash.model_fields), len(Eagle3.model_fields)) == (14, 20, 22)
    assert len(get_args(MoeBackend)) == 12
    tree = Eagle3(max_draft_len=3, speculative_model="here")
    assert (tree.use_dynamic_tree, tree.eagle3_model_arch, tree.eagle3_layers_to_capture) == (False, "llama3", None)
