"""Published quantized checkpoints: what is read, served and dequantized, against `published.py`'s definitions."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from d2sd.convert.checkpoint.dialects import read_dialect
from d2sd.convert.checkpoint.headers import INDEX
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.checkpoint.quantization import KEY, read_inline, read_quantization
from d2sd.convert.checkpoint.target import load_target, write_target
from d2sd.convert.kinds import DFLASH
from d2sd.errors import CheckpointError
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.fp8 import Fp8Cache, linear_names
from d2sd.modeling.native import pack
from d2sd.modeling.quantized import QuantizedLinear
from tests.convert.checkpoint.published import LAYOUTS, SERVED, Published, Tensors
from tests.convert.helpers import edit_json, edit_tensors, tree_bytes
from tests.tiny import full_logits, random_tokens, tiny_decoder, tiny_drafter

#: Their definitions are those of other layouts.
ALIKE = ("nvfp4-weights", "nvfp4-modelopt", "fp8-weights")
BY_NAME = {layout.name: layout for layout in LAYOUTS}
each = pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=layout.name, marks=pytest.mark.slow if layout.name in ALIKE else ())
        for layout in LAYOUTS
    ],
)
each_served = pytest.mark.parametrize("layout", SERVED, ids=lambda layout: layout.name)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Published], Path]:
    """The checkpoint of a layout, written once."""
    made: dict[str, Path] = {}

    def folder(layout: Published) -> Path:
        if layout.name not in made:
            made[layout.name] = layout.write(tmp_path_factory.mktemp("published"))
        return made[layout.name]

    return folder


Folders = Callable[[Published], Path]


def layers_of(folder: Path) -> dict[str, Tensors]:
    """Tensors of each quantized layer, by the layer's name in our module."""
    found: dict[str, Tensors] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        layer, _, kind = name.removeprefix("model.").rpartition(".")
        if layer.endswith("_proj"):
            found.setdefault(layer, {})[kind] = tensor
    return found


@cache
def plain_model(layout: Published, folder: Path) -> tuple[Decoder, dict[str, Tensors]]:
    """The model of a checkpoint in fp64 with plain layers, dequantized by the definition."""
    decoder, stored = layout.decoder(), layers_of(folder)
    decoder.to(torch.bfloat16).double()
    for name, tensors in stored.items():
        layer = decoder.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        layer.weight.data = layout.plain(tensors, layer.out_features, layer.in_features)
    return decoder, stored


@each
def test_dequantized_weights_are_the_definition(layout: Published, folders: Folders, tmp_path: Path) -> None:
    source = folders(layout)
    expected, _ = plain_model(layout, source)
    write_target(source, tmp_path / "out", "fp32", dequantize=True)
    found = load_target(tmp_path / "out", torch.float32)
    assert KEY not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert not any(isinstance(module, QuantizedLinear | Fp8Cache) for module in found.modules())
    tensors = found.state_dict()
    assert tensors.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(tensors[name].double(), tensor, rtol=3e-7, atol=0)


@each
def test_without_a_product_both_ways_out_are_named(layout: Published, folders: Folders, tmp_path: Path) -> None:
    source = folders(layout)
    if layout.rounded is not None:
        write_target(source, tmp_path / "out", "bf16")
        return
    for attempt in (
        lambda: write_target(source, tmp_path / "out", "bf16"),
        lambda: load_target(source, torch.bfloat16),
    ):
        with pytest.raises(CheckpointError, match=r"(?s)no product.*target\.dequantize.*FP8 checkpoint"):
            attempt()
    assert not (tmp_path / "out").exists()


@each_served
def test_logits_are_those_of_dequantized_weights_and_rounded_inputs(layout: Published, folders: Folders) -> None:
    folder = folders(layout)
    reference, stored = deepcopy(plain_model(layout, folder))
    for name, tensors in stored.items():

        def rounded(_: nn.Module, x: tuple[Tensor], tensors: Tensors = tensors) -> Tensor:
            assert layout.rounded is not None
            return layout.rounded(tensors, x[0].flatten(0, -2)).view(x[0].shape)

        reference.get_submodule(name).register_forward_pre_hook(rounded)
    if layout.kv:
        for layer in reference.layers:
            for kind, scale in zip("kv", layout.kv.values(), strict=True):
                cache = Fp8Cache()
                cache.scale = scale[0]
                setattr(layer.self_attn, f"{kind}_cache", cache)
    found = load_target(folder, torch.float32)
    layers = [layer for layer in found.modules() if isinstance(layer, QuantizedLinear)]
    assert len(layers) == 7
    tokens = random_tokens(found, 2, 7)
    expected = full_logits(reference, tokens)
    torch.testing.assert_close(full_logits(found, tokens), expected, rtol=0, atol=2e-4)
    pack(found)
    assert not any(isinstance(layer, QuantizedLinear) for layer in found.modules())
    torch.testing.assert_close(full_logits(found, tokens), expected, rtol=0, atol=2e-4)


@each_served
def test_a_copy_keeps_the_scheme(layout: Published, folders: Folders, tmp_path: Path) -> None:
    source = folders(layout)
    write_target(source, tmp_path / "once", "bf16")
    write_target(tmp_path / "once", tmp_path / "twice", "bf16")
    assert tree_bytes(tmp_path / "once") == tree_bytes(tmp_path / "twice")
    before, after = (load_file(path / "model.safetensors") for path in (source, tmp_path / "once"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].reshape(tensor.shape).float().equal(tensor.float()), name
    configs = [json.loads((path / "config.json").read_text())[KEY] for path in (source, tmp_path / "once")]
    assert configs[0] == configs[1] or layout.name == "nvfp4-modelopt"
    assert read_quantization(source, HFConfig.read(source)) == read_quantization(
        tmp_path / "once", HFConfig.read(tmp_path / "once")
    )


@pytest.mark.parametrize(
    ("layout", "key", "value", "named"),
    [
        ("fp8-dynamic", "quant_method", "bitsandbytes", r"quant_method(.|\n)*FP8 one of this model"),
        ("fp8-dynamic", "quantization_status", "calibration", "quantization_status"),
        ("fp8-dynamic", "transform_config", {"config_groups": {"R1": {}}}, "transform_config"),
        ("fp8-dynamic", "sparsity_config", {"format": "sparse-24-bitmask"}, "sparsity_config"),
        ("fp8-dynamic", "sparsity_config", "dense", "sparsity_config"),
        ("fp8-dynamic", "kv_cache_scheme", {"num_bits": 8, "type": "int"}, "kv_cache_scheme"),
        ("fp8-dynamic", "kv_cache_scheme", "fp8", "kv_cache_scheme"),
        ("fp8-dynamic", "config_groups", {}, "config_groups"),
        ("fp8-dynamic", "config_groups.group_0", "Linear", "group_0"),
        ("fp8-dynamic", "config_groups.group_0.output_activations", {"num_bits": 8}, "output_activations"),
        ("fp8-dynamic", "config_groups.group_0.targets", [3], "targets"),
        ("fp8-dynamic", "config_groups.group_0.weights", None, "weights"),
        ("fp8-dynamic", "config_groups.group_0.weights.num_bits", 6, "weights"),
        ("fp8-dynamic", "config_groups.group_0.weights.num_bits", True, "weights"),
        ("fp8-dynamic", "config_groups.group_0.weights.type", "int", "weights"),
        ("fp8-dynamic", "config_groups.group_0.weights.symmetric", False, "symmetric"),
        ("fp8-dynamic", "config_groups.group_0.weights.dynamic", True, "dynamic"),
        ("fp8-dynamic", "config_groups.group_0.input_activations.strategy", "tensor", "input_activations"),
        ("fp8-dynamic", "config_groups.group_0.input_activations.symmetric", False, "input_activations"),
        ("fp8-dynamic", "ignore", ["re:("], r"ignore(.|\n)*regular expression|regular expression(.|\n)*ignore"),
        ("fp8-blocks", "weight_block_size", [64, 64], "weight_block_size"),
        ("fp8-blocks", "activation_scheme", "static", "activation_scheme"),
        ("fp8-blocks", "scale_fmt", "ue8m0", "scale_fmt"),
        ("fp8-blocks", "fmt", "e5m2", "fmt"),
        ("nvfp4-modelopt", "quant_algo", "NVFP4_AWQ", "quant_algo"),
        ("nvfp4-modelopt", "config_groups.group_0.weights.group_size", 32, "config_groups"),
    ],
)
def test_a_description_that_is_not_read_is_named(
    layout: str, key: str, value: Any, named: str, folders: Folders, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((folders(BY_NAME[layout]) / "config.json").read_bytes())
    edit_json(tmp_path / "config.json", f"{KEY}.{key}", value)
    with pytest.raises(CheckpointError, match=named):
        read_quantization(tmp_path, HFConfig.read(tmp_path))


_UP = "model__layers__0__mlp__up_proj__"
_NAN = torch.tensor(torch.nan)


@pytest.mark.parametrize(
    ("layout", "tensor", "value", "named"),
    [
        ("fp8-dynamic", "weight_scale", None, r"missing layers\.0\.mlp\.up_proj\.weight_scale"),
        ("fp8-dynamic", "weight_scale", torch.ones(32, 1), "wrong shape"),
        ("fp8-dynamic", "weight_scale", torch.zeros(64, 1), "not positive"),
        ("fp8-dynamic", "weight_scale", _NAN.expand(64, 1), "NaN"),
        ("fp8-dynamic", "weight", torch.ones(64, 32), "type is not supported"),
        ("fp8-dynamic", "input_scale", torch.tensor(1.0), "unknown"),
        ("fp8-static-kv", "input_scale", torch.tensor([-1.0]), "not positive"),
        ("fp8-blocks", "weight_scale_inv", None, r"missing layers\.0\.mlp\.up_proj\.weight_scale_inv"),
        ("fp8-blocks", "weight_scale_inv", torch.ones(2, 3), "wrong shape"),
        ("fp8-blocks", "weight_scale_inv", -torch.ones(3, 2), "not positive"),
        ("nvfp4-modelopt", "weight_scale_2", _NAN, "NaN"),
        ("nvfp4-modelopt", "weight_scale", torch.full((64, 2), -1.0).to(torch.float8_e4m3fn), "negative"),
        ("nvfp4-modelopt", "weight_scale", torch.ones(64, 2), "type is not supported"),
        ("nvfp4-modelopt", "weight", torch.zeros(64, 32, dtype=torch.uint8), "wrong shape"),
        ("nvfp4-compressed", "weight_global_scale", torch.tensor([0.0]), "not positive"),
        ("nvfp4-compressed", "weight_packed", torch.zeros(64, 16, dtype=torch.int32), "type is not supported"),
    ],
)
def test_tensors_that_are_not_as_described(
    layout: str, tensor: str, value: Tensor | None, named: str, folders: Folders, tmp_path: Path
) -> None:
    shutil.copytree(folders(BY_NAME[layout]), tmp_path / "source")
    changed = None if value is None else value.contiguous()
    edit_tensors(tmp_path / "source" / "model.safetensors", **{_UP + tensor: changed})
    with pytest.raises(CheckpointError, match=named):
        write_target(tmp_path / "source", tmp_path / "out", "bf16", dequantize=True)


def test_a_scale_under_two_names_is_named(folders: Folders, tmp_path: Path) -> None:
    shutil.copytree(folders(BY_NAME["fp8-static-kv"]), tmp_path / "source")
    also = {"model__layers__0__self_attn__k_proj__k_scale": torch.tensor(0.1)}
    edit_tensors(tmp_path / "source" / "model.safetensors", **also)
    with pytest.raises(CheckpointError, match=r"two names(.|\n)*k_proj\.k_scale"):
        load_target(tmp_path / "source", torch.float32)


@pytest.mark.parametrize(
    ("ignore", "left"),
    [
        (["lm_head", r"re:.*\.mlp\..*"], {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (["model.layers.0.mlp.up_proj"], {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"}),
        ([r"re:mlp"], {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_ignored_layers_are_plain(ignore: list[str], left: set[str]) -> None:
    part = HFConfig(BY_NAME["fp8-dynamic"].config | {"ignore": ignore}, "config.json")
    names = linear_names(BY_NAME["fp8-dynamic"].decoder())
    assert {name.rpartition(".")[2] for name in read_dialect(part).of(names, "model.")} == left


@pytest.mark.parametrize(
    "pattern",
    [
        "re:([a-z0-9_.]+)+!",
        "re:(?:.*a?)*!",
        "re:" + "(l|.)" * 60 + "!",
        "re:" + ".*" * 40 + "!",
        "re:(.+)+(.+)+(?<!p)",
        "re:(?=(.*)*!)(x+x+)+y",
        "re:(?:(?:(?:(?:a?){50}){50}){50}){50}x",
        "re:(?:a{9}){9}{9}",
        "re:a{99999999999999}",
        "re:" + "(" * 400 + ")" * 400,
        "re:(?R)",
        "re:(?:model){e}",
        "re:" + "a?" * 5000,
        "*".join("abcdefgh" * 200),
    ],
)
@pytest.mark.parametrize("layout", ["fp8-dynamic", "nvfp4-modelopt"])
def test_no_pattern_hangs(pattern: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's `re` takes exponential time for some, and so it may for any that is made to."""
    monkeypatch.setattr("d2sd.convert.checkpoint.schemes._SECONDS", 0.5)
    config = {**BY_NAME[layout].config, "ignore": ["lm_head", pattern]}
    begun = time.process_time()
    with suppress(CheckpointError):
        quantization = read_inline(HFConfig(config, "config.json"))
        quantization.of(linear_names(BY_NAME[layout].decoder()), "model.")
    assert time.process_time() - begun < 5


def test_more_patterns_than_any_checkpoint_has_are_refused() -> None:
    config = BY_NAME["fp8-dynamic"].config | {"ignore": [f"model.layers.{n}" for n in range(100_000)]}
    with pytest.raises(CheckpointError, match="ignore"):
        read_dialect(HFConfig(config, "config.json"))


def paths(value: object, at: str = "") -> Iterator[str]:
    """The keys of a dictionary and of those inside it."""
    for key, inside in value.items() if isinstance(value, dict) else ():
        yield f"{at}{key}"
        yield from paths(inside, f"{at}{key}.")


@pytest.mark.sampled(7)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("value", [..., None, True, 4.0, 8.0, 0, -1, "x", [], {}, [[]]], ids=repr)
def test_a_key_that_is_missing_or_odd_is_read_or_named(layout: Published, value: object, tmp_path: Path) -> None:
    names = linear_names(layout.decoder())
    for path in paths(layout.config):
        edit_json(write(tmp_path / "part.json", layout.config), path, value)
        with suppress(CheckpointError):
            quantization = read_inline(HFConfig.of_file(tmp_path / "part.json"))
            for scheme in quantization.schemes(names, "model.").values():
                scheme.empty(64, 32, False)


def write(path: Path, values: object) -> Path:
    path.write_text(json.dumps(values))
    return path


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    edit_json(write(tmp_path / "part.json", BY_NAME["fp8-blocks"].config), "activation_scheme", ...)
    with pytest.raises(CheckpointError, match="activation_scheme"):
        read_inline(HFConfig.of_file(tmp_path / "part.json"))


def test_groups_of_several_schemes() -> None:
    """A named group before the one of every layer, whatever their order."""
    config = BY_NAME["fp8-dynamic"].config
    (every,), (four,) = (BY_NAME[name].config["config_groups"].values() for name in ("fp8-dynamic", "nvfp4-compressed"))
    groups = {"group_0": every, "group_1": four | {"targets": [r"re:.*mlp\.(gate|up)_proj$"]}}
    found = read_dialect(HFConfig(config | {"config_groups": groups}, "config.json"))
    names = linear_names(BY_NAME["fp8-dynamic"].decoder())
    schemes = {name.rpartition(".")[2]: scheme.name for name, scheme in found.schemes(names, "model.").items()}
    assert {schemes[name] for name in ("gate_proj", "up_proj")} == {"NVFP4"}
    assert {schemes[name] for name in ("q_proj", "down_proj")} == {"FP8, a scale a channel and a token"}
    assert found.text == "FP8, a scale a channel and a token and NVFP4"


@pytest.mark.parametrize(
    ("names", "left"),
    [
        (["lm_head"], 7),
        (["model.layers.0.self_attn"], 3),
        (["o_proj"], 6),
        (["model.layers.1"], 7),
        (["proj"], 7),
        (None, 7),
    ],
)
def test_modules_that_are_not_converted(names: list[str] | None, left: int) -> None:
    part = HFConfig(BY_NAME["fp8-blocks"].config | {"modules_to_not_convert": names}, "config.json")
    assert len(read_dialect(part).of(linear_names(BY_NAME["fp8-blocks"].decoder()), "model.")) == left


def test_layers_split_over_shards_are_dequantized(folders: Folders, tmp_path: Path) -> None:
    """A scale in another file than its weight; a file may be left without tensors."""
    source, split = folders(BY_NAME["fp8-blocks"]), tmp_path / "split"
    shutil.copytree(source, split)
    tensors = load_file(split / "model.safetensors")
    (split / "model.safetensors").unlink()
    files = {"model-1.safetensors": "weight_scale_inv", "model-2.safetensors": "weight"}
    weight_map = {name: file for file, last in files.items() for name in tensors if name.endswith(f".{last}")}
    for file in files:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, split / file)
    (split / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for folder in (source, split):
        write_target(folder, tmp_path / "out" / folder.name, "bf16", dequantize=True)
    assert {path.name for path in (tmp_path / "out" / "split").glob("*.safetensors")} == {"model-2.safetensors"}
    found, expected = (load_target(tmp_path / "out" / f.name, torch.bfloat16).state_dict() for f in (split, source))
    assert all(found[name].equal(tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("name", ["fp8-blocks", "fp8-weights"])
def test_quantized_experts_are_dequantized_or_refused(name: str, tmp_path: Path) -> None:
    """Names and shapes are those of Qwen3-30B-A3B-FP8; the second layer is dense."""
    layout, decoder = BY_NAME[name], tiny_decoder("qwen3_moe", layers=2, tie=False)
    source = layout.write(tmp_path / "source", decoder)
    named = r"(?s)no product.*experts in .*target\.dequantize.*before it was quantized"
    with pytest.raises(CheckpointError, match=named):
        write_target(source, tmp_path / "out", "bf16")
    write_target(source, tmp_path / "out", "fp32", dequantize=True)
    found, stored = load_file(tmp_path / "out" / "model.safetensors"), load_file(source / "model.safetensors")
    layers = {layer.rpartition(".")[0] for layer in stored if "_proj." in layer}
    assert sum(".experts." in layer for layer in layers) == 6 * 3
    for layer in layers:
        own = {name.removeprefix(f"{layer}."): t for name, t in stored.items() if name.startswith(f"{layer}.")}
        weight = found[f"{layer}.weight"]
        torch.testing.assert_close(weight.double(), layout.plain(own, *weight.shape), rtol=3e-7, atol=0)
    plain = load_target(tmp_path / "out", torch.float32)
    assert not any(isinstance(module, QuantizedLinear) for module in plain.modules())


@pytest.mark.parametrize("name", ["fp8-dynamic", "nvfp4-modelopt", "fp8-weights"])
def test_a_drafter_in_another_scheme_is_refused(name: str, tmp_path: Path) -> None:
    drafter = tiny_drafter(tiny_decoder().config)
    DFLASH.write(tmp_path, drafter.config, drafter.state_dict())
    edit_json(tmp_path / "config.json", KEY, BY_NAME[name].config)
    with pytest.raises(CheckpointError, match=r"Drafters in this(.|\n)*before it was quantized"):
        DFLASH.load(tmp_path, torch.float32)
