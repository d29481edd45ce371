"""The tools that publish quantized targets read and write the same numbers as we do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from d2sd.convert.checkpoint.target import load_target, write_target
from d2sd.modeling.nvfp4 import Nvfp4Linear
from tests.consumers.helpers import needs, run_child
from tests.convert.checkpoint.published import LAYOUTS, Published
from tests.convert.helpers import write_target_dir
from tests.tiny import full_logits, random_tokens, tiny_decoder

#: It rounds the weights of NVFP4 to bf16.
_BF16 = 2.0**-8
_COMPRESSED = [layout for layout in LAYOUTS if layout.config["quant_method"] == "compressed-tensors"]


@needs("compressed")
@pytest.mark.parametrize("layout", [one for one in _COMPRESSED if not one.kv], ids=lambda layout: layout.name)
def test_compressed_tensors_says_the_same(layout: Published, tmp_path: Path) -> None:
    hidden, size = (128, 64) if "blocks" in layout.name else (32, 8)  # it has no partial blocks
    decoder = tiny_decoder("qwen3", layers=1, tie=False, hidden=hidden, head_dim=size)
    source = layout.write(tmp_path / "source", decoder)
    tokens = random_tokens(decoder, 1, 9)
    save_file({"tokens": tokens}, tmp_path / "in.safetensors")
    run_child("compressed", "compressed_child.py", source, tmp_path / "in.safetensors", tmp_path / "out.safetensors")
    theirs = load_file(tmp_path / "out.safetensors")
    write_target(source, tmp_path / "plain", "fp32", dequantize=True)
    plain = load_target(tmp_path / "plain", torch.float32)
    for name, tensor in plain.state_dict().items():
        found = theirs[name if name.startswith("lm_head") else f"model.{name}"]
        torch.testing.assert_close(found, tensor, rtol=_BF16 if "nvfp4" in layout.name else 0, atol=0)
    if layout.rounded is not None and "nvfp4" not in layout.name:
        ours = full_logits(load_target(source, torch.float32), tokens)
        torch.testing.assert_close(theirs["logits"], ours, rtol=0, atol=2e-5)
        assert (theirs["logits"] - full_logits(plain, tokens)).abs().max() > 0.1


@pytest.mark.slow
def test_transformers_dequantizes_blocks_to_the_same_weights(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    layout = next(layout for layout in LAYOUTS if layout.name == "fp8-blocks")
    source = layout.write(tmp_path / "source", tiny_decoder("qwen3", layers=1, hidden=128, head_dim=64, tie=False))
    config = FineGrainedFP8Config(dequantize=True, modules_to_not_convert=["lm_head"])
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, quantization_config=config)
    write_target(source, tmp_path / "plain", "fp32", dequantize=True)
    ours, theirs = load_target(tmp_path / "plain", torch.float32).state_dict(), model.state_dict()
    for name, tensor in ours.items():
        assert theirs[name if name.startswith("lm_head") else f"model.{name}"].float().equal(tensor), name


@pytest.mark.slow
def test_modelopt_writes_what_is_read(tmp_path: Path) -> None:
    """NVFP4 by ModelOpt: its own numbers of every weight, and a model that is served."""
    pytest.importorskip("modelopt", reason="the extra fp8 is not installed")
    import modelopt.torch.quantization as quantization
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import NVFP4QTensor
    from transformers import AutoModelForCausalLM

    decoder = tiny_decoder("qwen3", layers=1, hidden=64, head_dim=16, tie=False)
    source, exported = write_target_dir(tmp_path / "source", decoder), tmp_path / "exported"
    tokens = random_tokens(decoder, 2, 12)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    quantization.quantize(model, quantization.NVFP4_DEFAULT_CFG, lambda model: model(tokens))
    export_hf_checkpoint(model, export_dir=exported)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / file, exported / file)
    write_target(exported, tmp_path / "plain", "fp32", dequantize=True)
    plain, stored = load_file(tmp_path / "plain" / "model.safetensors"), load_file(exported / "model.safetensors")
    layers = [name.removesuffix(".weight_scale_2") for name in stored if name.endswith("weight_scale_2")]
    assert len(layers) == 7
    for layer in layers:
        packed, scale, whole = (stored[f"{layer}.{part}"] for part in ("weight", "weight_scale", "weight_scale_2"))
        theirs = NVFP4QTensor(plain[f"{layer}.weight"].shape, torch.float32, packed).dequantize(
            dtype=torch.float32, fast=False, scale=scale, double_scale=whole, block_sizes={-1: 16}
        )
        torch.testing.assert_close(plain[f"{layer}.weight"], theirs, rtol=3e-7, atol=0)
    served = load_target(exported, torch.float32)
    assert sum(isinstance(module, Nvfp4Linear) for module in served.modules()) == 7
    difference = (full_logits(served, tokens) - full_logits(decoder, tokens)).abs().mean()
    assert difference < full_logits(decoder, tokens).std() / 2
    write_target(exported, tmp_path / "kept", "bf16")
    written, read = (json.loads((path / "hf_quant_config.json").read_text()) for path in (tmp_path / "kept", exported))
    assert written == read
