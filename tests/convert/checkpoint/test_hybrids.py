"""Checkpoints of hybrids: as they are published, with what reads images; experts joined; FP8; and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from d2sd.convert.checkpoint.families import parse_target_config
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.checkpoint.target import load_target, stop_tokens, write_target
from d2sd.convert.checkpoint.target_shapes import check_target_tensors, left_out, target_shapes
from d2sd.errors import CheckpointError
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.mixers.configs import DeltaConfig
from d2sd.modeling.scaled_fp8 import BlockFp8Linear
from tests.convert.checkpoint.published import CONFIGS
from tests.convert.helpers import edit_json, write_target_dir
from tests.tiny import full_logits, random_tokens, tiny_decoder

LARGEST = 448.0


def published(folder: Path, decoder: Decoder, tensors: dict[str, Tensor] | None = None, **keys: Any) -> Path:
    """The checkpoint of a decoder as Qwen publishes it: the text model inside one that reads images, too."""
    write_target_dir(folder, decoder)
    values = json.loads((folder / "config.json").read_text())
    inner = values | {"rope_parameters": _rope(values), "mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32"}
    for key in ("rope_theta", "rope_scaling", "partial_rotary_factor", "tie_word_embeddings", "architectures"):
        inner.pop(key)
    kind = values["model_type"].removesuffix("_text")
    name = "Qwen3_5MoeForConditionalGeneration" if "moe" in kind else "Qwen3_5ForConditionalGeneration"
    outer = {
        "architectures": [name],
        "model_type": kind,
        "text_config": inner,
        "vision_config": {"depth": 2},
        "tie_word_embeddings": values["tie_word_embeddings"],
    }
    (folder / "config.json").write_text(json.dumps(outer | keys))
    tensors = load_file(folder / "model.safetensors") if tensors is None else tensors
    nested = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    others = {"model.visual.blocks.0.attn.qkv.weight": torch.ones(6, 2), "mtp.fc.weight": torch.ones(2, 2)}
    save_file(nested | others, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _rope(values: dict[str, Any]) -> dict[str, Any]:
    return {
        "rope_type": "default",
        "rope_theta": values["rope_theta"],
        "partial_rotary_factor": values["partial_rotary_factor"],
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    }


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text"])
@pytest.mark.parametrize("tie", [True, False])
def test_a_published_checkpoint_is_read_and_its_text_model_written_alone(
    family: Any, tie: bool, tmp_path: Path
) -> None:
    decoder = tiny_decoder(family, tie=tie)
    folder = published(tmp_path / "published", decoder)
    read = load_target(folder, torch.float32)
    assert read.config == decoder.config
    for name, tensor in decoder.state_dict().items():
        assert torch.equal(tensor, read.state_dict()[name]), name
    assert stop_tokens(folder) == (2,)
    assert left_out(folder, read.config) == {"images": 1, "mtp": 1}

    write_target(folder, tmp_path / "written", "fp32")
    values = json.loads((tmp_path / "written" / "config.json").read_text())
    assert values["model_type"] == family
    assert "vision_config" not in values
    assert all(not name.startswith(("model.language_model.", "mtp.", "model.visual.")) for name in _names(tmp_path))
    again = load_target(tmp_path / "written", torch.float32)
    assert again.config == decoder.config
    for name, tensor in decoder.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    tokens = random_tokens(decoder, 2, 9)  # weights that lie elsewhere in memory may be summed in another order
    torch.testing.assert_close(full_logits(again, tokens), full_logits(decoder, tokens), rtol=1e-5, atol=1e-5)
    assert left_out(tmp_path / "written", again.config) == {}


def _names(folder: Path) -> list[str]:
    return list(load_file(folder / "written" / "model.safetensors"))


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "qwen3_next", "qwen3_moe"])
def test_joined_experts_are_those_of_single_ones(family: Any, tmp_path: Path) -> None:
    decoder = tiny_decoder(family, tie=False)
    write_target_dir(tmp_path / "single", decoder)
    tensors = load_file(tmp_path / "single" / "model.safetensors")
    write_target_dir(tmp_path / "joined", decoder)
    experts = decoder.config.body.experts
    assert experts is not None
    joined = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    for layer in sorted(set(range(decoder.config.body.num_layers)) - set(experts.dense_layers)):
        at = f"model.layers.{layer}.mlp.experts"
        parts = {
            kind: torch.stack([tensors[f"{at}.{expert}.{kind}_proj.weight"] for expert in range(experts.count)])
            for kind in ("gate", "up", "down")
        }
        joined |= {
            f"{at}.gate_up_proj": torch.cat([parts["gate"], parts["up"]], 1),
            f"{at}.down_proj": parts["down"].contiguous(),
        }
    save_file(joined, tmp_path / "joined" / "model.safetensors", metadata={"format": "pt"})
    check_target_tensors(tmp_path / "joined", decoder.config)
    for name, tensor in load_target(tmp_path / "joined", torch.float32).state_dict().items():
        assert torch.equal(tensor, decoder.state_dict()[name]), name
    write_target(tmp_path / "joined", tmp_path / "written", "fp32")
    assert load_file(tmp_path / "written" / "model.safetensors").keys() == joined.keys()


def test_fp8_in_blocks_leaves_out_what_its_names_say(tmp_path: Path) -> None:
    """Names of the description are those of the whole model, in the checkpoint and not in what is written."""
    decoder = tiny_decoder("qwen3_5_text", tie=False)
    write_target_dir(tmp_path / "plain", decoder)
    tensors, left = {}, ["linear_attn.conv1d", "linear_attn.in_proj_a", "linear_attn.in_proj_b", "mlp.up_proj"]
    for name, tensor in load_file(tmp_path / "plain" / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if tensor.dim() != 2 or layer in ("model.embed_tokens", "lm_head") or any(part in name for part in left):
            tensors[name] = tensor
            continue
        blocks = [-(-size // 128) for size in tensor.shape]
        scale = tensor.abs().max() / LARGEST
        tensors[name] = (tensor / scale).to(torch.float8_e4m3fn)
        tensors[f"{layer}.weight_scale_inv"] = scale.expand(blocks).contiguous()
    layers = range(decoder.config.body.num_layers)
    excluded = [f"model.language_model.layers.{index}.{part}" for index in layers for part in left]
    quantization = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.visual.blocks.0.attn.qkv", *excluded],
    }
    folder = published(tmp_path / "fp8", decoder, tensors, quantization_config=quantization)
    write_target(folder, tmp_path / "written", "fp32")
    written = json.loads((tmp_path / "written" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.linear_attn.in_proj_a" in written["modules_to_not_convert"]
    tokens = random_tokens(decoder, 1, 9)
    for where in (folder, tmp_path / "written"):
        read = load_target(where, torch.float32)
        kinds = {name for name, part in read.named_modules() if isinstance(part, BlockFp8Linear)}
        assert {
            "layers.0.linear_attn.in_proj_qkv",
            "layers.0.linear_attn.out_proj",
            "layers.2.self_attn.q_proj",
        } < kinds
        assert not any(part in name for name in kinds for part in left)
        error = full_logits(read, tokens) - full_logits(decoder, tokens)
        assert 0 < error.abs().mean() < 0.5 * full_logits(decoder, tokens).std()


QWEN35_9B = CONFIGS["qwen3.5-9b"]


def parsed(values: dict[str, Any]) -> Any:
    return parse_target_config(HFConfig(values, "config.json"))


def test_what_the_keys_mean() -> None:
    """Qwen3.5-9B: 8.95 billion parameters of text, as converters of it count."""
    config = parsed(QWEN35_9B)
    layers = tuple(layer for layer in range(32) if layer % 4 != 3)
    assert config.body.recurrent == DeltaConfig(layers, 16, 32, 128, 128)
    assert (config.body.rotary_dim, config.body.output_gate, config.body.norm_offset) == (64, True, True)
    assert config.body.attention_layers == tuple(range(3, 32, 4))
    found = sum(math.prod(shape) for shape in target_shapes(config).values())
    assert found == pytest.approx(8.95e9, rel=1e-3)
    assert config.body.recurrent.state_bytes(2) == 24 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)
    without_types = {key: value for key, value in QWEN35_9B["text_config"].items() if key != "layer_types"}
    assert parsed(QWEN35_9B | {"text_config": without_types}) == config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("linear_conv_kernel_dim", 3),
        ("output_gate_type", "sigmoid"),
        ("attn_output_gate", False),
        ("mamba_ssm_dtype", "bfloat16"),
        ("hidden_act", "gelu"),
        ("layer_types", ["linear_attention"] * 32),
        ("layer_types", [{"kind": "linear_attention"}] * 32),
        ("layer_types", ["linear_attention", "sliding_attention"] * 16),
        ("linear_num_value_heads", 24),
        ("linear_num_key_heads", ...),
        ("linear_value_head_dim", 0),
        ("head_dim", ...),
        ("partial_rotary_factor", 1.5),
        ("partial_rotary_factor", 0.001),
        ("tie_word_embeddings", True),
        ("model_type", "qwen3_5_moe_text"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e7, "unknown": 1}),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(key: str, value: Any) -> None:
    values = json.loads(json.dumps(QWEN35_9B))
    part = values["text_config"]
    if key == "partial_rotary_factor":
        part["rope_parameters"][key] = value
    elif value is ...:
        del part[key]
    else:
        part[key] = value
    named = "unknown" if key == "rope_parameters" else key
    with pytest.raises(CheckpointError, match=rf"config.json: text_config(: rope_parameters)?: {named}"):
        parsed(values)


def test_a_tensor_of_nothing_known_is_refused(tmp_path: Path) -> None:
    folder = published(tmp_path, tiny_decoder("qwen3_5_text"))
    edit_json(folder / "config.json", "text_config.num_hidden_layers", 2)
    edit_json(folder / "config.json", "text_config.layer_types", ["linear_attention", "full_attention"])
    with pytest.raises(CheckpointError, match=r"layers\.2"):
        load_target(folder, torch.float32)
