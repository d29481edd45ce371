"""The YAML that TensorRT-LLM is started with: what is in it, and that what it would refuse is refused here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from d2sd.convert import kinds
from d2sd.convert.trtllm.llm_args import (
    COMMIT,
    D2SD,
    DFLASH,
    FOLDER,
    MODULE,
    Arguments,
    DFlash,
    KvCache,
    check_arguments,
    check_llm_args,
    unsupported_reason,
    write_llm_args,
)
from d2sd.errors import BundleError
from d2sd.recipe import Recipe, load_recipe
from tests.convert.helpers import set_key, write_project
from tests.tiny import tiny_decoder, tiny_drafter


def bundle_of(folder: Path, **changes: Any) -> tuple[Path, Recipe]:
    """A bundle's drafters, and the recipe they are of, in bf16."""
    folder.mkdir()
    recipe = load_recipe(write_project(folder / "project", **({"precision": "bf16"} | changes)))
    config = tiny_decoder().config
    for name, role in (("drafter_first", "first"), ("drafter_second", "variable_prefix")):
        drafter = tiny_drafter(config, role=role)  # type: ignore[arg-type]
        kinds.DFLASH.write(folder / name, drafter.config, drafter.state_dict())
    return folder, recipe


def test_arguments_of_a_bundle(tmp_path: Path) -> None:
    bundle, recipe = bundle_of(tmp_path / "bundle")
    write_llm_args(bundle / FOLDER, recipe)
    assert sorted(p.name for p in (bundle / FOLDER).iterdir()) == sorted([DFLASH, D2SD, MODULE])
    assert check_llm_args(bundle) == [DFLASH, D2SD]
    values = yaml.safe_load((bundle / FOLDER / DFLASH).read_text())
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
    assert yaml.safe_load((bundle / FOLDER / D2SD).read_text()) == values
    for name in (DFLASH, D2SD):
        head = (bundle / FOLDER / name).read_text()
        assert COMMIT[:12] in head
        assert f"trtllm-serve target --config {FOLDER}/{name}" in head
    assert f"--custom_module_dirs {FOLDER}/{MODULE}" in (bundle / FOLDER / D2SD).read_text()


def test_one_drafter_has_one_file(tmp_path: Path) -> None:
    bundle, recipe = bundle_of(tmp_path / "bundle", drafters={"first": {"path": "first"}})
    write_llm_args(bundle / FOLDER, recipe)
    assert [p.name for p in (bundle / FOLDER).iterdir()] == [DFLASH]


def test_what_it_cannot_serve(tmp_path: Path) -> None:
    _, recipe = bundle_of(tmp_path / "fp32", precision="fp32")
    assert "16-bit" in str(unsupported_reason(recipe))
    _, recipe = bundle_of(tmp_path / "plain", drafters={}, tree={"policy": "off"})
    assert "no drafter" in str(unsupported_reason(recipe))
    _, recipe = bundle_of(tmp_path / "fp16", precision="fp16")
    assert unsupported_reason(recipe) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("speculative_config.second_model", "drafter_second"),  # there is no such key: hence the module
        ("speculative_config.max_draft_len", "3"),
        ("speculative_config.max_draft_len", -1),
        ("speculative_config.attention_backend", "FA4"),
        ("speculative_config.decoding_type", "D2SD"),
        ("speculative_config.target_layer_ids", ["0", "1"]),
        ("speculative_config.acceptance_rate_threshold", 1.5),
        ("kv_cache_config.enable_block_reuse", "no"),
        ("max_batchsize", 4),
        ("max_batch_size", 4.0),
        ("tensor_parallel_size", None),
    ],
)
def test_what_tensorrt_llm_refuses_is_refused(tmp_path: Path, key: str, value: object) -> None:
    bundle, recipe = bundle_of(tmp_path / "bundle")
    write_llm_args(bundle / FOLDER, recipe)
    path = bundle / FOLDER / DFLASH
    values = yaml.safe_load(path.read_text())
    set_key(values, key, value)
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(BundleError, match=key.replace(".", r"\.")):
        check_llm_args(bundle)


def test_more_drafts_than_the_drafter_was_trained_for(tmp_path: Path) -> None:
    bundle, recipe = bundle_of(tmp_path / "bundle")
    write_llm_args(bundle / FOLDER, recipe)
    path = bundle / FOLDER / DFLASH
    path.write_text(path.read_text().replace("max_draft_len: 3", "max_draft_len: 4"))
    with pytest.raises(BundleError, match="1 to 3"):
        check_llm_args(bundle)


def test_no_arguments(tmp_path: Path) -> None:
    bundle, _ = bundle_of(tmp_path / "bundle")
    with pytest.raises(BundleError, match="no TensorRT-LLM arguments"):
        check_llm_args(bundle)


def test_the_table_as_it_was_read() -> None:
    """Names and defaults that our choices rest on; a change here is a new reading of the sources."""
    assert check_arguments({}, "nothing") == Arguments()
    assert KvCache().enable_block_reuse, "our YAML would not have to turn it off"
    plain = DFlash()
    assert (plain.decoding_type, plain.attention_backend, plain.max_draft_len) == ("DFlash", "VANILLA", None)
    assert not plain.use_rejection_sampling
    assert len(DFlash.model_fields) == 16
