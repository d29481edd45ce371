"""ModelOpt's scales are the largest values seen, and what it exports is what it computed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from d2sd.build import fp8_scales as calibrate_fp8
from d2sd.build.fp8_scales import ModelOpt, load_modelopt, quantize_drafter, quantize_target
from d2sd.convert.checkpoint.target import load_target, write_target
from d2sd.convert.kinds import DFLASH
from d2sd.convert.kinds.flexdraft import KIND as FLEXDRAFT
from d2sd.errors import BuildError, CheckpointError
from d2sd.modeling.config import Family
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.modeling.fp8 import Fp8Cache, Fp8Linear
from tests.convert.helpers import write_target_dir
from tests.tiny import full_logits, random_tokens, tiny_decoder, tiny_drafter, tiny_flex


@pytest.fixture(scope="module")
def modelopt() -> ModelOpt:
    pytest.importorskip("modelopt", reason="the extra fp8 is not installed")
    return load_modelopt()


def test_without_modelopt_there_is_a_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(calibrate_fp8, "version", absent)
    with pytest.raises(BuildError, match=r"pip install 'nvidia-modelopt"):
        load_modelopt()


def modelopts_own(modelopt: ModelOpt, source: Path, texts: list[list[int]], kv: bool, tokens: Tensor) -> Tensor:
    """Logits [1, T, V] of the model that ModelOpt quantizes in memory, by its own emulation."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    quantization = modelopt.quantization
    config = quantization.FP8_DEFAULT_CFG
    if kv:
        config = quantization.utils.update_quant_cfg_with_kv_cache_quant(config, quantization.FP8_KV_CFG["quant_cfg"])
    with torch.no_grad():
        quantization.quantize(model, config, lambda m: [m(torch.tensor([text])) for text in texts])
        logits: Tensor = model(tokens).logits
    return logits


@pytest.mark.parametrize("kv", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_exported_target_says_what_modelopt_computed(
    modelopt: ModelOpt, tmp_path: Path, family: Family, kv: bool
) -> None:
    plain = tiny_decoder(family, tie=family == "llama")
    source = write_target_dir(tmp_path / "source", plain)
    texts = random_tokens(plain, 4, 20, seed=5).tolist()
    quantize_target(modelopt, source, tmp_path / "exported", texts, dtype=torch.float32, kv=kv)
    write_target(tmp_path / "exported", tmp_path / "target", "fp32", text_side=source)
    decoder = load_target(tmp_path / "target", torch.float32)
    assert sum(isinstance(layer, Fp8Linear) for layer in decoder.modules()) == 7 * plain.config.body.num_layers
    assert sum(isinstance(layer, Fp8Cache) for layer in decoder.modules()) == 2 * plain.config.body.num_layers * kv
    tokens = random_tokens(plain, 1, 16, seed=9)
    expected = modelopts_own(modelopt, source, texts, kv, tokens)
    off = (full_logits(decoder, tokens) - expected).abs().max() / expected.abs().max()
    plain_off = (full_logits(plain, tokens) - expected).abs().max() / expected.abs().max()
    # a number on the edge between two FP8 values may fall either way, and these models amplify it
    assert off < 0.05 < 0.1 < plain_off


def test_the_tokenizer_comes_along(modelopt: ModelOpt, tmp_path: Path) -> None:
    source = write_target_dir(tmp_path / "source", tiny_decoder())
    quantize_target(modelopt, source, tmp_path / "exported", [[1, 2, 3]], dtype=torch.bfloat16, kv=False)
    write_target(tmp_path / "exported", tmp_path / "target", "bf16", text_side=source)
    assert (tmp_path / "target" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert (tmp_path / "target" / "generation_config.json").is_file()


def test_an_unreadable_target_is_named(modelopt: ModelOpt, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="transformers cannot read"):
        quantize_target(modelopt, tmp_path, tmp_path / "out", [[1]], dtype=torch.bfloat16, kv=False)


def drafter_and_run() -> tuple[Drafter, Any]:
    """A drafter, and a run that drafts two blocks with it; the attention is a sum, which is all that a scale needs."""
    drafter = tiny_drafter(tiny_decoder().config)
    draw = torch.Generator().manual_seed(4)
    blocks = [torch.randn(1, 4, 32, generator=draw) for _ in range(2)]
    features = 5 * torch.randn(1, 3, 64, generator=draw)

    def run() -> None:
        drafter.context_keys_values(features, torch.arange(3)[None])
        for block in blocks:
            drafter(block, torch.arange(4)[None], lambda index, q, k, v, sinks: q + v.repeat_interleave(2, dim=2))

    return drafter, run


def test_a_drafters_scales_are_the_largest_values_it_read(modelopt: ModelOpt) -> None:
    drafter, run = drafter_and_run()
    weights = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    largest: dict[str, float] = {}
    hooks = []
    for name, layer in drafter.named_modules():
        if isinstance(layer, nn.Linear):

            def note(_: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
                largest[name] = max(largest.get(name, 0.0), args[0].abs().max().item())

            hooks.append(layer.register_forward_pre_hook(note))
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    with torch.inference_mode():
        tensors, quantization, scales_of_inputs = quantize_drafter(modelopt, DFLASH, drafter, run)
    assert quantization.exclude == DFLASH.unquantized
    fp8 = [
        f"layers.{i}.{n}"
        for i in range(2)
        for n in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    ]
    scales = {f"{name}.{kind}_scale" for name in fp8 for kind in ("weight", "input")}
    assert tensors.keys() == weights.keys() | scales
    for name in fp8:
        assert tensors[f"{name}.weight"].dtype == torch.float8_e4m3fn
        scale, (start, _, end) = tensors[f"{name}.weight_scale"], name.rpartition(".")
        parts = ("gate_proj", "up_proj") if end in ("gate_proj", "up_proj") else (end,)  # one product, one scale
        largest_weight = max(weights[f"{start}.{part}.weight"].abs().max().item() for part in parts)
        assert scale.item() == pytest.approx(largest_weight / 448, rel=1e-6)
        back = tensors[f"{name}.weight"].float() * scale
        assert (back - weights[f"{name}.weight"]).abs().max() <= 448 * scale / 2**4
        assert tensors[f"{name}.input_scale"].item() == pytest.approx(largest[name] / 448, rel=1e-5)
    wide = {"fc", *(f"layers.{i}.self_attn.{kind}_proj" for i in range(2) for kind in "qkv")}
    assert scales_of_inputs == {name: pytest.approx(largest[name] / 448, rel=1e-5) for name in wide}
    for name in weights.keys() - {f"{name}.weight" for name in fp8}:
        assert tensors[name].equal(weights[name]), name


def test_a_flexdraft_heads_projections_get_scales(modelopt: ModelOpt, tmp_path: Path) -> None:
    """From the unquantized head to the one that a bundle loads; its calibration network and the target's MLPs stay."""
    target = tiny_decoder("qwen2", layers=4)
    head = tiny_flex(target, layers=2)
    weights = {name: tensor.clone() for name, tensor in head.state_dict().items()}

    def draft(head: FlexHead) -> Tensor:
        blocks = head.blocks(torch.zeros(1, 32))
        hidden: Tensor = head(
            blocks, torch.arange(4)[None], lambda index, q, k, v, sinks: q + v.repeat_interleave(2, dim=2)
        )
        return hidden

    def run() -> None:
        draft(head)

    with torch.inference_mode():
        plain = draft(head)
        tensors, quantization, others = quantize_drafter(modelopt, FLEXDRAFT, head, run)
        assert not others
        FLEXDRAFT.write(tmp_path / "head", head.config, tensors, quantization)
        loaded = FLEXDRAFT.load(tmp_path / "head", torch.float32)
        loaded.join(target)
        found, emulated = draft(loaded), draft(head)
    fp8 = [name for name, layer in loaded.named_modules() if isinstance(layer, Fp8Linear)]
    assert fp8 == [f"layers.{i}.self_attn.{kind}_proj" for i in range(2) for kind in "qkvo"]
    assert all(tensors[name].equal(weights[name]) for name in weights if "_proj.weight" not in name)
    assert type(target.get_submodule("layers.2.mlp.gate_proj")) is nn.Linear
    assert (found - emulated).abs().max() < 1e-4 < 0.01 < (found - plain).abs().max()


def test_a_layer_that_never_ran_is_named(modelopt: ModelOpt) -> None:
    drafter, _ = drafter_and_run()
    with pytest.raises(BuildError, match="fc: largest input"):
        quantize_drafter(modelopt, DFLASH, drafter, lambda: None)
