"""The old layout: names, shapes, stacking, the gate's name, scales; one GPU and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from d2sd.convert.quantization import Quantization, described
from d2sd.convert.trtllm.legacy import STAMP, write_legacy
from d2sd.errors import CheckpointError
from d2sd.modeling.config import Family, RopeConfig
from d2sd.modeling.decoder import Decoder
from tests.convert.helpers import edit_json, hf_tensors, write_target_dir
from tests.tiny import tiny_decoder

FP8 = torch.float8_e4m3fn


def converted(source: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    out = source.with_name("legacy")
    write_legacy(source, out)
    assert sorted(path.name for path in source.parent.iterdir()) == ["hf", "legacy"]
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "rank0.safetensors"]
    return json.loads((out / "config.json").read_text()), load_file(out / "rank0.safetensors")


def quantised(folder: Path, decoder: Decoder, *, kv: bool = False) -> Path:
    """A unified FP8 folder as ModelOpt writes it: each linear its own 0-dim scales, q, k and v one input scale."""
    write_target_dir(folder, decoder)
    tensors = {}
    for index, (name, tensor) in enumerate(hf_tensors(decoder).items()):
        stem = name.removesuffix(".weight")
        if "_proj.weight" not in name:
            tensors[name] = tensor.to(torch.bfloat16)
            continue
        scale = tensor.abs().amax() / 448
        tensors |= {name: (tensor / scale).to(FP8), f"{stem}.weight_scale": scale}
        qkv = stem.endswith(("q_proj", "k_proj", "v_proj"))
        tensors[f"{stem}.input_scale"] = torch.tensor(0.5 if qkv else 0.01 * (index + 1))
        if kv and stem[-6:] in ("k_proj", "v_proj"):
            tensors[f"{stem}.{stem[-6]}_scale"] = torch.tensor(0.25 if stem[-6] == "k" else 0.75)
    save_file(tensors, folder / "model.safetensors")
    beside, inline = described(Quantization(("lm_head",), kv, ("modelopt", "0.47.0")))
    (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    edit_json(folder / "config.json", "quantization_config", inline)
    return folder


def test_a_llama(tmp_path: Path) -> None:
    decoder = tiny_decoder(layers=2, tie=False)
    config, found = converted(write_target_dir(tmp_path / "hf", decoder))
    hf = hf_tensors(decoder)
    assert found.keys() == {
        "transformer.vocab_embedding.weight", "transformer.ln_f.weight", "lm_head.weight",
        *(
            f"transformer.layers.{i}.{name}.weight"
            for i in range(2)
            for name in (
                "input_layernorm", "post_layernorm", "attention.qkv", "attention.dense", "mlp.fc", "mlp.gate",
                "mlp.proj",
            )
        ),
    }  # fmt: skip
    old, new = "model.layers.1", "transformer.layers.1"
    parts = [hf[f"{old}.self_attn.{x}_proj.weight"] for x in "qkv"]
    assert torch.equal(found[f"{new}.attention.qkv.weight"], torch.cat(parts))
    assert found[f"{new}.attention.qkv.weight"].shape == ((4 + 2 * 2) * 8, 32)
    for theirs, ours in {
        "attention.dense": "self_attn.o_proj", "mlp.fc": "mlp.gate_proj", "mlp.gate": "mlp.up_proj",
        "mlp.proj": "mlp.down_proj", "input_layernorm": "input_layernorm", "post_layernorm": "post_attention_layernorm",
    }.items():  # fmt: skip
        assert torch.equal(found[f"{new}.{theirs}.weight"], hf[f"{old}.{ours}.weight"]), theirs
    assert torch.equal(found["transformer.vocab_embedding.weight"], hf["model.embed_tokens.weight"])
    assert torch.equal(found["transformer.ln_f.weight"], hf["model.norm.weight"])
    assert torch.equal(found["lm_head.weight"], hf["lm_head.weight"])
    assert config["mapping"] == {"world_size": 1, "tp_size": 1, "pp_size": 1}
    assert (config["architecture"], config["dtype"]) == ("LlamaForCausalLM", "float32")
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_size"]) == (4, 2, 8)
    assert config["quantization"]["quant_algo"] is None
    assert STAMP in config["d2sd_stamp"]
    assert "not yet run" in config["d2sd_stamp"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_and_a_tied_head(tmp_path: Path, dtype: torch.dtype) -> None:
    decoder = tiny_decoder(layers=1)
    folder = write_target_dir(tmp_path / "hf", decoder)
    save_file({n: t.to(dtype) for n, t in hf_tensors(decoder).items()}, folder / "model.safetensors")
    config, found = converted(folder)
    assert {tensor.dtype for tensor in found.values()} == {dtype}
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    assert torch.equal(found["lm_head.weight"], found["transformer.vocab_embedding.weight"])


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen(tmp_path: Path, family: Family) -> None:
    decoder = tiny_decoder(family, layers=1)
    config, found = converted(write_target_dir(tmp_path / "hf", decoder))
    hf, layer = hf_tensors(decoder), "transformer.layers.0.attention"
    assert config["qwen_type"] == family
    assert config["attn_bias"] == (family == "qwen2")
    assert config["qk_layernorm"] == (family == "qwen3")
    if family == "qwen2":
        biases = [hf[f"model.layers.0.self_attn.{x}_proj.bias"] for x in "qkv"]
        assert torch.equal(found[f"{layer}.qkv.bias"], torch.cat(biases))
    else:
        assert torch.equal(found[f"{layer}.q_layernorm.weight"], hf["model.layers.0.self_attn.q_norm.weight"])
        assert torch.equal(found[f"{layer}.k_layernorm.weight"], hf["model.layers.0.self_attn.k_norm.weight"])


def test_rope_scaling_goes_along(tmp_path: Path) -> None:
    rope = RopeConfig(500000.0, "llama3", 8.0, 8192)
    config, _ = converted(write_target_dir(tmp_path / "hf", tiny_decoder(layers=1, rope=rope)))
    assert config["rotary_base"] == 500000.0
    assert config["rotary_scaling"]["rope_type"] == "llama3"
    assert config["rotary_scaling"]["factor"] == 8.0


def test_fp8_fused_parts_share_one_scale(tmp_path: Path) -> None:
    decoder = tiny_decoder(layers=2)
    folder = quantised(tmp_path / "hf", decoder)
    hf = load_file(folder / "model.safetensors")
    config, found = converted(folder)
    assert config["quantization"] == {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    assert config["dtype"] == "bfloat16"
    old, new = "model.layers.1", "transformer.layers.1"
    for group, parts, sharing in (
        ("attention.qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ()),
        ("attention.dense", ("self_attn.o_proj",), ()),
        ("mlp.fc", ("mlp.gate_proj",), ("mlp.up_proj",)),
        ("mlp.gate", ("mlp.up_proj",), ("mlp.gate_proj",)),
        ("mlp.proj", ("mlp.down_proj",), ()),
    ):
        scale = found[f"{new}.{group}.weights_scaling_factor"]
        assert (scale.shape, scale.dtype) == ((1,), torch.float32)
        members = [f"{old}.{part}" for part in (*parts, *sharing)]
        assert scale.item() == max(hf[f"{name}.weight_scale"].item() for name in members)
        inputs = found[f"{new}.{group}.activation_scaling_factor"]
        assert inputs.item() == pytest.approx(max(hf[f"{name}.input_scale"].item() for name in members))
        assert found[f"{new}.{group}.weight"].dtype == FP8
        was = torch.cat([hf[f"{old}.{p}.weight"].float() * hf[f"{old}.{p}.weight_scale"] for p in parts])
        now = found[f"{new}.{group}.weight"].float() * scale
        # one more rounding to three bits of mantissa, or of the smallest steps
        assert bool(((now - was).abs() <= was.abs() / 16 + scale * 2**-9).all()), group
    assert not [name for name in found if "kv_cache" in name]


def test_fp8_keys_and_values(tmp_path: Path) -> None:
    config, found = converted(quantised(tmp_path / "hf", tiny_decoder(layers=1), kv=True))
    assert config["quantization"]["kv_cache_quant_algo"] == "FP8"
    assert found["transformer.layers.0.attention.kv_cache_scaling_factor"].tolist() == [0.75]


def lost_scale(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight_scale"]
    save_file(tensors, folder / "model.safetensors")


def a_linear_left_in_16_bits(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")


def zero_scale(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_scale"] = torch.tensor(0.0)
    save_file(tensors, folder / "model.safetensors")


def wrong_shape(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"][:-1].clone()
    save_file(tensors, folder / "model.safetensors")


def another_algorithm(folder: Path) -> None:
    edit_json(folder / "hf_quant_config.json", "quantization.quant_algo", "NVFP4")


def description_lost(folder: Path) -> None:
    (folder / "hf_quant_config.json").unlink()
    edit_json(folder / "config.json", "quantization_config", ...)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lost_scale, "up_proj.weight_scale"),
        (a_linear_left_in_16_bits, "up_proj"),
        (zero_scale, "up_proj.weight_scale"),
        (wrong_shape, "up_proj.weight"),
        (another_algorithm, "NVFP4"),
        (description_lost, "no scales"),
    ],
)
def test_a_source_that_is_not_whole_leaves_nothing_behind(tmp_path: Path, change: Any, named: str) -> None:
    folder = quantised(tmp_path / "hf", tiny_decoder(layers=1))
    change(folder)
    with pytest.raises(CheckpointError, match=named):
        write_legacy(folder, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    folder = write_target_dir(tmp_path / "hf", tiny_decoder(layers=1))
    with pytest.raises(CheckpointError, match="exists already"):
        write_legacy(folder, folder)
