"""TensorRT Edge-LLM's exporter takes an FP8 bundle's target and its first drafter, whole and as they are.

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

from d2sd.convert.checkpoint.families import parse_target_config
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.kinds import DFLASH
from tests.consumers.helpers import needs, python_of, run, run_child

pytestmark = needs("edgellm")


@pytest.fixture(scope="module")
def exported(fp8_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the graphs llm/ and dflash_draft/."""
    folder = tmp_path_factory.mktemp("edgellm")
    export = Path(str(python_of("edgellm"))).with_name("tensorrt-edgellm-export")
    target, first = fp8_bundle / "target", fp8_bundle / "drafter_first"
    run(export, target, folder, "--dflash-base", "--dflash-draft", "--dflash-draft-dir", first)
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


def test_it_takes_the_drafters_contract_and_no_default_of_its_own(fp8_bundle: Path, exported: Path) -> None:
    drafter = DFLASH.read_config(fp8_bundle / "drafter_first")
    base, draft = config(exported / "llm"), config(exported / "dflash_draft")
    for values, role in ((base, "base"), (draft, "draft")):
        assert (values["spec_decode_type"], values["engine_role"]) == ("dflash", role)
        assert values["dflash_config"]["target_layer_ids"] == list(drafter.target_layer_ids)
        assert values["dflash_config"]["block_size"] == drafter.block_size
        assert values["dflash_config"]["mask_token_id"] == drafter.mask_token_id
        assert values["rope_theta"] == drafter.body.rope.theta
    assert draft["base_model_hidden_size"] == len(drafter.target_layer_ids) * drafter.body.hidden_size


def test_the_targets_fp8_weights_arrive_byte_for_byte(fp8_bundle: Path, exported: Path, tmp_path: Path) -> None:
    found, counts = graph(exported / "llm", tmp_path)
    given = load_file(fp8_bundle / "target" / "model.safetensors")
    layers = parse_target_config(HFConfig.read(fp8_bundle / "target")).body.num_layers
    assert sum(equal_bytes(found, name, tensor) for name, tensor in given.items()) == 7 * layers
    assert counts["AttentionPlugin"] == layers


def test_the_drafters_weights_and_the_targets_head_arrive(fp8_bundle: Path, exported: Path, tmp_path: Path) -> None:
    """Matrices under their names; fc and the vectors of norms may lose theirs, and are looked for among all."""
    found, counts = graph(exported / "dflash_draft", tmp_path)
    given = load_file(fp8_bundle / "drafter_first" / "model.safetensors")
    layers = DFLASH.read_config(fp8_bundle / "drafter_first").body.num_layers
    for name, tensor in given.items():
        if name == "fc.weight" or tensor.dim() == 1:
            assert any(torch.equal(other.half(), tensor.half()) for other in found.values()), name
        elif tensor.dim() == 2 and not equal_bytes(found, name, tensor):
            assert torch.equal(found[f"_model.{name}"], tensor.half()), name
    head = load_file(fp8_bundle / "target" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(found["_model.lm_head.weight"], head.half())
    assert counts["AttentionPlugin"] == counts["DFlashTargetKVCacheUpdate"] == layers


def equal_bytes(found: dict[str, Tensor], name: str, tensor: Tensor) -> bool:
    """Whether the tensor is FP8; then it is in the graph as it was."""
    if tensor.dtype != torch.float8_e4m3fn:
        return False
    assert torch.equal(found[f"_model.{name}"].view(torch.uint8), tensor.view(torch.uint8)), name
    return True
