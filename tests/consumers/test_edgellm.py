"""TensorRT Edge-LLM's exporter takes a bundle's target in FP8 and its first drafter, whole and as they are.

Its graphs hold plugins that need its library and a GPU, so what is compared is what went into them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from tests.consumers.conftest import Built
from tests.consumers.helpers import needs, python_of, run, run_child

pytestmark = [needs("edgellm"), needs("modelopt")]  # ModelOpt makes the target FP8


@pytest.fixture(scope="module")
def exported(built: Built, fp8_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the graphs llm/ and dflash_draft/."""
    folder = tmp_path_factory.mktemp("edgellm")
    export = Path(str(python_of("edgellm"))).with_name("tensorrt-edgellm-export")
    run(export, fp8_target, folder, "--dflash-base", "--dflash-draft", "--dflash-draft-dir", built.first)
    return folder


def config(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return values


def graph(folder: Path, work: Path) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Floating-point initializers and counts of operators."""
    out = work / f"{folder.name}.safetensors"
    run_child("edgellm", "edgellm_child.py", folder / "model.onnx", out)
    with safe_open(out, framework="pt") as handle:
        counts = handle.metadata()
    return load_file(out), {kind: int(count) for kind, count in counts.items()}


def test_it_takes_the_drafters_contract_and_no_default_of_its_own(built: Built, exported: Path) -> None:
    drafter = built.drafter.config
    base, draft = config(exported / "llm"), config(exported / "dflash_draft")
    for values, role in ((base, "base"), (draft, "draft")):
        assert (values["spec_decode_type"], values["engine_role"]) == ("dflash", role)
        assert values["dflash_config"]["target_layer_ids"] == list(drafter.target_layer_ids)
        assert values["dflash_config"]["block_size"] == drafter.block_size
        assert values["dflash_config"]["mask_token_id"] == drafter.mask_token_id
        assert values["rope_theta"] == drafter.body.rope.theta
    assert draft["base_model_hidden_size"] == len(drafter.target_layer_ids) * drafter.body.hidden_size


def test_the_targets_fp8_weights_arrive_byte_for_byte(
    built: Built, exported: Path, fp8_target: Path, tmp_path: Path
) -> None:
    found, counts = graph(exported / "llm", tmp_path)
    given = {name: t for name, t in load_file(fp8_target / "model.safetensors").items() if t.dtype.itemsize == 1}
    assert len(given) == 7 * built.decoder.config.body.num_layers
    for name, tensor in given.items():
        assert torch.equal(found[f"_model.{name}"].view(torch.uint8), tensor.view(torch.uint8)), name
    assert counts["AttentionPlugin"] == built.decoder.config.body.num_layers


def test_the_drafters_weights_and_the_targets_head_arrive(built: Built, exported: Path, tmp_path: Path) -> None:
    """Matrices under their names; the vectors of its norms lose theirs, and are looked for among all."""
    found, counts = graph(exported / "dflash_draft", tmp_path)
    given = {name: tensor.half() for name, tensor in built.drafter.state_dict().items()}
    vectors = [tensor.half() for tensor in found.values() if tensor.dim() == 1]
    for name, tensor in given.items():
        if tensor.dim() == 2:
            assert torch.equal(found[f"_model.{name}"], tensor), name
        else:
            assert any(torch.equal(vector, tensor) for vector in vectors), name
    assert torch.equal(found["_model.lm_head.weight"], built.decoder.head.half())
    assert counts["AttentionPlugin"] == counts["DFlashTargetKVCacheUpdate"] == built.drafter.config.body.num_layers
