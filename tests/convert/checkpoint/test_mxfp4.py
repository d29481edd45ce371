"""gpt-oss as it is published: experts in MXFP4, refused or dequantized on request."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from d2sd.build.plan import make_plan
from d2sd.build.tables import show_plan
from d2sd.convert.checkpoint.target import load_target, write_target
from d2sd.errors import CheckpointError
from d2sd.modeling.mxfp4 import Mxfp4Experts
from d2sd.recipe import load_recipe
from tests.convert.checkpoint.published import E2M1
from tests.convert.helpers import edit_json, write_project, write_target_dir
from tests.tiny import FAMILY_BODIES, tiny_decoder

PUBLISHED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
EXPERTS = replace(FAMILY_BODIES["gpt_oss"]["experts"], intermediate_size=32)


def published(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Put experts in MXFP4 in place of a checkpoint's: its blocks and scales by their names without the ending."""
    draw = torch.Generator().manual_seed(5)
    file = folder / "model.safetensors"
    tensors, made = load_file(file), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj")) and ".experts." in name]:
        count, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(256, (count, outputs, inputs // 32, 16), generator=draw).to(torch.uint8)
        scales = torch.randint(120, 126, (count, outputs, inputs // 32), generator=draw).to(torch.uint8)
        made[name] = blocks, scales
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, file, metadata={"format": "pt"})
    edit_json(folder / "config.json", "quantization_config", PUBLISHED)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_target_dir(tmp_path / "target", tiny_decoder("gpt_oss", hidden=64, experts=EXPERTS, tie=False))


def by_hand(blocks: Tensor, scales: Tensor) -> list[list[float]]:
    """[O, in] of one expert in plain numbers."""
    rows = []
    for row, powers in zip(blocks.tolist(), scales.tolist(), strict=True):
        out: list[float] = []
        for block, power in zip(row, powers, strict=True):
            for byte in block:
                for code in (byte % 16, byte // 16):
                    out.append(E2M1[code] * 2.0 ** (power - 127))
        rows.append(out)
    return rows


def test_values_are_the_standards_and_transformers(folder: Path) -> None:
    for blocks, scales in published(folder).values():
        layer = Mxfp4Experts(32 * scales.shape[2], scales.shape[1], False, len(scales))
        layer.load_state_dict({"blocks": blocks, "scales": scales})
        found = layer.dequantized()
        assert found.dtype == torch.bfloat16
        assert found[1].T.tolist() == by_hand(blocks[1], scales[1])
        assert torch.equal(found, convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_is_dequantized_on_request(folder: Path, tmp_path: Path, precision: str) -> None:
    made = published(folder)
    write_target(folder, tmp_path / "out", precision, dequantize=True)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    decoder = load_target(tmp_path / "out", torch.float32)
    for name, stacked in made.items():
        kind = "gate_up" if "gate_up" in name else "down"
        ours = getattr(decoder.layers[int(name.split(".")[2])].mlp, kind)
        whole = convert_moe_packed_tensors(*stacked, dtype=torch.float32).mT
        expected = torch.cat([whole[:, ::2], whole[:, 1::2]], 1) if kind == "gate_up" else whole
        assert torch.equal(ours, expected)
    write_target(tmp_path / "out", tmp_path / "again", precision)
    assert (
        load_file(tmp_path / "again" / "model.safetensors").keys()
        == load_file(tmp_path / "out" / "model.safetensors").keys()
    )


def test_without_a_request_it_is_refused_with_both_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_project(tmp_path, tiny_decoder("gpt_oss", hidden=64, experts=EXPERTS, tie=False), precision="bf16")
    published(tmp_path / "target")
    with pytest.raises(CheckpointError, match=r"MXFP4(.|\n)*as stored(.|\n)*target\.dequantize"):
        make_plan(load_recipe(recipe))
    with pytest.raises(CheckpointError, match=r"no product(.|\n)*MXFP4"):
        load_target(tmp_path / "target", torch.bfloat16)
    plan = make_plan(load_recipe(recipe, ["target.dequantize=true"]))
    show_plan(plan, tmp_path / "out")
    assert "MXFP4" in capsys.readouterr().out
    assert plan.target is not None
    assert plan.target.weight_bytes == 2 * plan.target.parameters


def test_other_quantizations_of_these_experts_are_refused(folder: Path) -> None:
    edit_json(folder / "config.json", "quantization_config", {"quant_method": "modelopt", "quant_algo": "FP8"})
    with pytest.raises(
        CheckpointError, match=r"not read in this quantization(.|\n)*gate_up_proj(.|\n)*expected: MXFP4"
    ):
        load_target(folder, torch.bfloat16)


@pytest.mark.parametrize("damage", ["blocks", "scales", "shape"])
def test_damage_is_told(folder: Path, damage: str) -> None:
    published(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.experts.down_proj"
    if damage == "shape":
        tensors[f"{name}_scales"] = tensors[f"{name}_scales"][..., :0]
    else:
        del tensors[f"{name}_{damage}"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"down_proj.(blocks|scales)"):
        write_target(folder, folder.parent / "out", "bf16", dequantize=True)
