"""FP8 checkpoints: their two descriptions, and that tensors match them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.checkpoint.own_files import FP8_INPUTS
from d2sd.convert.checkpoint.quantization import FILE, KEY, Quantization, described, read_quantization
from d2sd.convert.checkpoint.target import load_target, write_target
from d2sd.convert.kinds import DFLASH
from d2sd.errors import CheckpointError
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.fp8 import Fp8Linear, linear_names, round_to_fp8
from d2sd.plugins.shared.fp8 import to_pages
from tests.convert.helpers import edit_json, edit_tensors, hf_fields, hf_tensors, tree_bytes, write_target_dir
from tests.tiny import full_logits, random_tokens, tiny_decoder, tiny_drafter

TARGET = Quantization(("lm_head", "model.embed_tokens"), kv=False, producer=("modelopt", "0.47.0"))


def fp8_tensors(tensors: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    """The tensors with these layers in FP8, an input scale of 8 / 448 each."""
    out = dict(tensors)
    for name in names:
        scale = out[f"{name}.weight"].abs().max() / 448
        out[f"{name}.weight"] = to_pages(out[f"{name}.weight"], scale)
        out |= {f"{name}.weight_scale": scale, f"{name}.input_scale": torch.tensor(8 / 448)}
    return out


def write_fp8_target(folder: Path, decoder: Decoder, *, kv: bool = False) -> Path:
    """A checkpoint as ModelOpt writes it, of a tiny decoder."""
    write_target_dir(folder, decoder)
    tensors = fp8_tensors(hf_tensors(decoder), [f"model.{name}" for name in linear_names(decoder)])
    for index in range(decoder.config.body.num_layers if kv else 0):
        at = f"model.layers.{index}.self_attn"
        tensors |= {f"{at}.k_proj.k_scale": torch.tensor(0.05), f"{at}.v_proj.v_scale": torch.tensor(0.03)}
    beside, inline = described(Quantization(TARGET.exclude, kv, TARGET.producer))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_fields(decoder) | {KEY: inline}))
    (folder / FILE).write_text(json.dumps(beside))
    return folder


def read(folder: Path) -> Quantization | None:
    return read_quantization(folder, HFConfig.read(folder))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_fp8_target(tmp_path / "fp8", tiny_decoder("qwen3", tie=False))


@pytest.mark.parametrize("kv", [False, True])
@pytest.mark.parametrize("gone", [None, FILE, KEY])
def test_either_description_is_enough(tmp_path: Path, gone: str | None, kv: bool) -> None:
    folder = write_fp8_target(tmp_path / "fp8", tiny_decoder(), kv=kv)
    if gone == FILE:
        (folder / FILE).unlink()
    elif gone == KEY:
        edit_json(folder / "config.json", KEY, ...)
    assert read(folder) == Quantization(TARGET.exclude, kv, TARGET.producer)


@pytest.mark.parametrize(
    ("file", "key", "value", "named"),
    [
        (FILE, "quantization.quant_algo", "NVFP4", "differently"),
        (FILE, "quantization.quant_algo", "W4A8_AWQ", "quant_algo"),
        (FILE, "quantization.quant_algo", "MIXED_PRECISION", "quant_algo"),
        (FILE, "quantization.quant_algo", ..., "quant_algo"),
        (FILE, "quantization.kv_cache_quant_algo", "INT8", "kv_cache_quant_algo"),
        (FILE, "quantization.kv_cache_quant_algo", "FP8", "differently"),
        (FILE, "quantization.group_size", 128, "group_size"),
        (FILE, "quantization.pre_quant_scale", True, "pre_quant_scale"),
        (FILE, "quantization.exclude_modules", ["lm_head", 3], "exclude_modules"),
        (FILE, "quantization.exclude_modules", ["lm_head", "*.o_proj"], "differently"),
        (FILE, "quantization", "FP8", "quantization"),
        ("config.json", f"{KEY}.quant_method", "bitsandbytes", "quant_method"),
        ("config.json", f"{KEY}.quant_method", ["fp8"], "quant_method"),
        ("config.json", f"{KEY}.quant_algo", "W4A16_AWQ", "quant_algo"),
        ("config.json", f"{KEY}.kv_cache_scheme", {"num_bits": 4}, "kv_cache_scheme"),
        ("config.json", f"{KEY}.config_groups.group_0.weights.num_bits", 4, "config_groups"),
    ],
)
def test_any_other_quantization_is_named(source: Path, file: str, key: str, value: Any, named: str) -> None:
    edit_json(source / file, key, value)
    with pytest.raises(CheckpointError, match=named):
        read(source)


def test_a_damaged_description_is_named_and_none_is_none(source: Path, tmp_path: Path) -> None:
    (source / FILE).write_text("{")
    with pytest.raises(CheckpointError, match=rf"{FILE}(.|\n)*not JSON"):
        read(source)
    assert read(write_target_dir(tmp_path / "plain", tiny_decoder())) is None


@pytest.mark.parametrize("kv", [False, True])
def test_fp8_stays_fp8(tmp_path: Path, kv: bool) -> None:
    folder = write_fp8_target(tmp_path / "fp8", tiny_decoder("qwen2"), kv=kv)
    write_target(folder, tmp_path / "once", "bf16")
    write_target(tmp_path / "once", tmp_path / "twice", "bf16")
    assert tree_bytes(tmp_path / "once") == tree_bytes(tmp_path / "twice")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "once"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        if tensor.dtype == torch.float8_e4m3fn or name.endswith("_scale"):
            assert after[name].dtype == tensor.dtype
            assert after[name].float().equal(tensor.float()), name
        else:
            assert after[name].dtype == torch.bfloat16, name
    assert read(tmp_path / "once") == read(folder)


def test_a_target_is_what_its_numbers_say(source: Path) -> None:
    """Against the dequantized weights in plain layers: only the inputs' rounding is between the two."""
    decoder, plain = load_target(source, torch.float32), tiny_decoder("qwen3", tie=False)
    tokens = random_tokens(plain, 1, 12)
    layers = [layer for layer in decoder.modules() if isinstance(layer, Fp8Linear)]
    assert len(layers) == 7 * plain.config.body.num_layers
    original = full_logits(plain, tokens)
    tensors = plain.state_dict()
    for name in linear_names(plain):
        layer = decoder.get_submodule(name)
        assert isinstance(layer, Fp8Linear)
        tensors[f"{name}.weight"] = layer.weight.float() * layer.weight_scale
        layer.input_scale.fill_(1e-3)  # 0.4 is the most: clearly another model
    plain.load_state_dict(tensors)
    dequantized = full_logits(plain, tokens)
    assert not torch.allclose(dequantized, original, atol=1e-3)
    assert not torch.allclose(full_logits(decoder, tokens), dequantized, atol=0.1)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model__layers__0__mlp__up_proj__weight_scale": None}, "missing layers.0.mlp.up_proj.weight_scale"),
        ({"model__layers__0__mlp__up_proj__input_scale": None}, "missing layers.0.mlp.up_proj.input_scale"),
        ({"model__layers__0__mlp__up_proj__input_scale": torch.tensor(0.0)}, "not positive"),
        ({"model__layers__0__mlp__up_proj__weight_scale": torch.tensor(-1.0)}, "not positive"),
        ({"model__layers__0__mlp__up_proj__weight_scale": torch.tensor(torch.nan)}, "NaN"),
        ({"model__layers__0__mlp__up_proj__weight_scale": torch.ones(64)}, "wrong shape"),
        ({"model__layers__0__mlp__up_proj__weight_scale": torch.tensor(1)}, "type is not supported"),
        ({"model__layers__0__mlp__up_proj__weight": torch.ones(64, 32)}, "type is not supported"),
        ({"model__layers__0__mlp__up_proj__weight": torch.full((64, 32), torch.nan).to(torch.float8_e4m3fn)}, "NaN"),
        ({"model__norm__weight": torch.ones(32).to(torch.float8_e4m3fn)}, "type is not supported"),
        ({"model__layers__0__self_attn__k_proj__k_scale": torch.tensor(1.0)}, "unknown"),
    ],
)
def test_tensors_that_are_not_as_described(source: Path, changes: dict[str, Tensor | None], named: str) -> None:
    edit_tensors(source / "model.safetensors", **changes)
    with pytest.raises(CheckpointError, match=named):
        load_target(source, torch.float32)


def test_scales_without_their_description_are_refused(source: Path, tmp_path: Path) -> None:
    (source / FILE).unlink()
    edit_json(source / "config.json", KEY, ...)
    with pytest.raises(CheckpointError, match="scales belong to FP8"):
        load_target(source, torch.float32)
    folder = write_fp8_drafter(tmp_path / "fp8", whole=True)
    drafter = tiny_drafter(tiny_decoder().config)
    DFLASH.write(tmp_path / "plain", drafter.config, drafter.state_dict())
    shutil.copy(folder / FP8_INPUTS, tmp_path / "plain")
    with pytest.raises(CheckpointError, match="layers in 16 bits"):
        DFLASH.load(tmp_path / "plain", torch.float32)


def test_an_fp8_head_is_refused(source: Path) -> None:
    edit_json(source / FILE, "quantization.exclude_modules", ["model.embed_tokens"])
    edit_json(source / "config.json", f"{KEY}.ignore", ["model.embed_tokens"])
    edit_tensors(source / "model.safetensors", lm_head__weight_scale=torch.tensor(1.0))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight_scale"):
        load_target(source, torch.float32)


def write_fp8_drafter(folder: Path, *, whole: bool = False) -> Path:
    """`whole`: with scales for the layers that the checkpoint holds in 16 bits."""
    drafter = tiny_drafter(tiny_decoder().config)
    quantization = Quantization(DFLASH.unquantized, kv=False, producer=("modelopt", "0.47.0"))
    names = linear_names(drafter)
    tensors = fp8_tensors(drafter.state_dict(), quantization.of(names))
    scales = {name: 8 / 448 for name in names if name not in quantization.of(names)} if whole else {}
    DFLASH.write(folder, drafter.config, tensors, quantization, scales)
    return folder


def test_a_drafter_round_trips(tmp_path: Path) -> None:
    folder = write_fp8_drafter(tmp_path / "once")
    drafter = DFLASH.load(folder, torch.float32)
    fp8 = {name for name, layer in drafter.named_modules() if isinstance(layer, Fp8Linear)}
    kinds = ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert fp8 == {f"layers.{index}.{kind}" for index in range(2) for kind in kinds}
    DFLASH.write(tmp_path / "twice", drafter.config, drafter.state_dict(), read(folder))
    assert tree_bytes(folder) == tree_bytes(tmp_path / "twice")


def test_a_drafter_whose_other_layers_d2sd_rounds(tmp_path: Path) -> None:
    """The checkpoint is the same; the model is the one with all its layers in FP8."""
    stored, whole = write_fp8_drafter(tmp_path / "stored"), write_fp8_drafter(tmp_path / "whole", whole=True)
    assert tree_bytes(whole).keys() - tree_bytes(stored).keys() == {FP8_INPUTS}
    assert tree_bytes(stored).items() <= tree_bytes(whole).items()
    expected, found = DFLASH.load(stored, torch.float32), DFLASH.load(whole, torch.float32)
    others = [name for name in linear_names(expected) if not isinstance(expected.get_submodule(name), Fp8Linear)]
    round_to_fp8(expected, dict.fromkeys(others, 8 / 448))
    assert all(isinstance(found.get_submodule(name), Fp8Linear) for name in linear_names(found))
    tensors = found.state_dict()
    assert tensors.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert tensors[name].dtype == tensor.dtype
        assert tensors[name].float().equal(tensor.float()), name
    DFLASH.copy(whole, tmp_path / "copy", torch.float32)
    assert tree_bytes(tmp_path / "copy") == tree_bytes(whole)
    DFLASH.copy(stored, tmp_path / "copy", torch.float32)
    assert tree_bytes(tmp_path / "copy") == tree_bytes(stored), "no scales are left of an earlier drafter"


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("d2sd_fp8", 2, "schema"),
        ("more", 1, "json: more"),
        ("input_scales", [1.0], r"json: input_scales(.|\n)*dictionary"),
        ("input_scales.fc", ..., r"layers in 16 bits(.|\n)*fc"),
        ("input_scales.lm_head", 1.0, r"layers in 16 bits(.|\n)*lm_head"),
        ("input_scales.fc", 0.0, r"input_scales\.fc"),
        ("input_scales.fc", "1", r"input_scales\.fc"),
        ("input_scales.fc", 1e-60, r"input_scales\.fc"),  # zero in fp32
        ("input_scales.fc", 1e60, r"input_scales\.fc"),  # infinite in fp32
    ],
)
def test_scales_that_are_not_of_these_layers_are_named(tmp_path: Path, key: str, value: Any, named: str) -> None:
    write_fp8_drafter(tmp_path, whole=True)
    edit_json(tmp_path / FP8_INPUTS, key, value)
    with pytest.raises(CheckpointError, match=named):
        DFLASH.load(tmp_path, torch.float32)


@pytest.mark.parametrize(("narrow", "but"), [("*fc", []), ("*.q_proj", []), ("*.v_proj", ["layers.0.*"])])
def test_a_drafter_that_engines_would_misread_is_named(tmp_path: Path, narrow: str, but: list[str]) -> None:
    folder = write_fp8_drafter(tmp_path)
    wide = [pattern for pattern in DFLASH.unquantized if pattern != narrow] + but
    edit_json(folder / FILE, "quantization.exclude_modules", wide)
    edit_json(folder / "config.json", f"{KEY}.ignore", wide)
    with pytest.raises(CheckpointError, match="Engines do not support FP8"):
        DFLASH.read_config(folder)


def test_a_drafter_with_fp8_pages_is_named(tmp_path: Path) -> None:
    folder = write_fp8_drafter(tmp_path)
    edit_json(folder / FILE, "quantization.kv_cache_quant_algo", "FP8")
    edit_json(folder / "config.json", KEY, ...)
    with pytest.raises(CheckpointError, match="K/V"):
        DFLASH.read_config(folder)


def test_a_copy_without_hf_quant_config_is_still_fp8(tmp_path: Path, source: Path) -> None:
    shutil.copytree(source, tmp_path / "copy")
    (tmp_path / "copy" / FILE).unlink()
    write_target(tmp_path / "copy", tmp_path / "out", "bf16")
    assert (tmp_path / "out" / FILE).is_file(), "readers differ in which of the two they look at"
