"""The target's checkpoint: a Hugging Face folder of one of `families.py`, read strictly and written in one precision.

Features that change the forward pass and are not modelled (partial rotary, other activations) are refused by key.
`target_shapes.py` has the names of its tensors.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from d2sd.convert.checkpoint.families import FAMILIES, parse_target_config
from d2sd.convert.checkpoint.headers import INDEX, read_headers
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.checkpoint.lora import Adapter, read_adapters
from d2sd.convert.checkpoint.nested import text_config, text_name
from d2sd.convert.checkpoint.own_files import DRAFT_VOCABULARY
from d2sd.convert.checkpoint.quantization import FILE, KEY, Quantization, described, read_quantization, refuse_unserved
from d2sd.convert.checkpoint.target_shapes import experts_of, our_name, quantized_experts, target_shapes
from d2sd.convert.checkpoint.weights import (
    DTYPES,
    check_values,
    expected_shapes,
    fill,
    read_tensor,
    read_tensors,
    write_tensors,
)
from d2sd.errors import CheckpointError
from d2sd.io import write_json
from d2sd.modeling.config import DecoderConfig
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.fp8 import linear_names, make_fp8_cache
from d2sd.modeling.quantized import QuantizedLinear, make_quantized
from d2sd.modeling.shard import Shard
from d2sd.modeling.tensor_parallel import cut
from d2sd.progress import Progress, silent

#: Copied next to the weights if present; code, pickles and other files are not copied.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
#: A file, and its tensors by their names in a module.
_Files = Iterator[tuple[str, dict[str, Tensor]]]
_KV_CACHE = re.compile(r"\b([kv])_cache\.scale$")
#: Config keys that describe the machine that wrote them, not the model.
_PROVENANCE = ("_name_or_path", "_model_name_or_path", "auto_map", "torch_dtype")


def load_target(
    directory: Path, dtype: torch.dtype, shard: Shard | None = None, check: Callable[[], None] = lambda: None
) -> Decoder:
    """Read a target, or a rank's part of it, onto the CPU in `dtype`, in eval mode and without gradients."""
    raw = HFConfig.read(directory)
    config = parse_target_config(raw)
    quantization = read_quantization(directory, raw)
    names = read_headers(directory).keys()
    stored, precision = target_shapes(config, quantization, names), str(dtype).removeprefix("torch.")
    refuse_unserved(quantization, stored, directory / "config.json", precision)
    module = _empty(config, quantization)
    cuts = {} if shard is None else cut(module, shard)
    experts = experts_of(module.config, names)
    if shard is not None:
        cuts |= experts.cuts(experts_of(config, names), shard.rank)
    read = read_tensors(directory, stored, dtype, our_name(config), cuts, check)
    fill(module, experts.placed((tensors for _, tensors in read), expected_shapes(module)))
    return module


def write_target(
    source: Path,
    directory: Path,
    precision: str,
    progress: Progress = silent,
    *,
    text_side: Path | None = None,
    dequantize: bool = False,
    adapters: Sequence[tuple[Path, float]] = (),
) -> None:
    """Copy a checkpoint in `precision`, shard by shard under its own file names, with tokenizer and stop tokens.

    Quantized tensors stay as they are, or are read in `precision` where `dequantize`. Tokenizer and stop tokens are
    copied from the folder `text_side` if given. `adapters` are folders of LoRAs, each with a scale, that are merged in
    this order.
    """
    raw = text_config(HFConfig.read(source))
    config, quantization = parse_target_config(raw), read_quantization(source, raw)
    _check_tied_head(source, config)
    stored_names = read_headers(source).keys()
    shapes, rename = target_shapes(config, quantization, stored_names), our_name(config)
    files = read_tensors(source, shapes, DTYPES[precision], rename)
    if not dequantize:
        refuse_unserved(quantization, shapes, source / "config.json", precision)
    elif quantization is not None:
        layers = _quantized_layers(config, quantization, stored_names)
        files, quantization = _dequantized(files, layers, DTYPES[precision], source), None
    if adapters:
        files = _merged(files, read_adapters(source, config, quantization, adapters))
    own_names = {rename(name): text_name(name) for name in stored_names}
    directory.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    with progress("writing the target", len(shapes)) as advance:
        for file, tensors in files:
            named = {own_names.get(name) or _hf_name(name): tensor for name, tensor in tensors.items()}
            if named:  # a shard may contain only a tied head
                write_tensors(directory / file, named)
            weight_map |= dict.fromkeys(named, file)
            advance(len(named))
    if "model.safetensors" not in weight_map.values():
        write_json(directory / INDEX, {"metadata": {}, "weight_map": weight_map})
    dtype = str(DTYPES[precision]).removeprefix("torch.")
    fields = {key: value for key, value in raw.values.items() if key not in (*_PROVENANCE, KEY)}
    fields |= {"architectures": [FAMILIES[config.family].architecture], "dtype": dtype}
    if quantization is not None:
        separate, fields[KEY] = described(quantization)
        if separate is not None:
            write_json(directory / FILE, separate)
    write_json(directory / "config.json", fields)
    _copy_text_side(text_side or source, directory)


def _merged(files: _Files, adapters: Sequence[Adapter]) -> _Files:
    """The tensors with all adapters added, each sum in fp32."""
    for file, tensors in files:
        for name, weight in tensors.items():
            added = [(adapter.file, *adapter.parts[name]) for adapter in adapters if name in adapter.parts]
            total = weight.float() if added else weight
            for where, a, b, factor in added:
                down, up = (read_tensor(where, part).float() for part in (a, b))
                check_values(down, "unquantized", f"{where}: {a}")
                check_values(up, "unquantized", f"{where}: {b}")
                total = total + factor * (up @ down)
            tensors[name] = total.to(weight.dtype)
            if added:
                check_values(tensors[name], "unquantized", f"{added[-1][0]}: {added[-1][1]}, merged")
        yield file, tensors


def _dequantized(files: _Files, layers: Mapping[str, QuantizedLinear], dtype: torch.dtype, where: Path) -> _Files:
    """The tensors with a `weight` in `dtype` in place of those of each quantized layer, in the last one's file.

    `layers` are on the meta device; one may stand for several of the same shape. Scales of K/V are left out: K/V are
    in `dtype` too.
    """
    waiting: dict[str, dict[str, Tensor]] = {name: {} for name in layers}
    for file, tensors in files:
        out: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            layer, _, kind = name.rpartition(".")
            if layer not in layers or kind == "bias":
                if not name.endswith("_cache.scale"):
                    out[name] = tensor
                continue
            parts = waiting[layer]
            parts[kind] = tensor
            if parts.keys() == layers[layer].state_dict().keys() - {"bias"}:
                weight = _weight(layers[layer], waiting.pop(layer), f"{where}: {layer}").to(dtype)
                plain = f"{layer}.{inner}" if (inner := layers[layer].weight_name) else layer
                check_values(weight, "unquantized", f"{where}: {plain}, dequantized")
                out[plain] = weight
        yield file, out


def _weight(layer: QuantizedLinear, tensors: Mapping[str, Tensor], where: str) -> Tensor:
    layer.load_state_dict(dict(tensors), strict=False, assign=True)
    if fault := layer.fault():
        name, found, expected = fault
        raise CheckpointError("A tensor is not of this layer.", where=f"{where}.{name}", found=found, expected=expected)
    weight = layer.dequantized()
    layer.to("meta")  # its tensors go
    return weight


def source_files(directory: Path) -> list[str]:
    """Names of the files of a checkpoint folder that determine what is built from it."""
    texts = ("config.json", FILE, DRAFT_VOCABULARY, "generation_config.json", INDEX, *_TOKENIZER_FILES)
    weights = {info.file.name for info in read_headers(directory).values()}
    return sorted({name for name in texts if (directory / name).is_file()} | weights)


def stop_tokens(directory: Path) -> tuple[int, ...]:
    """Token ids that end an answer, from `generation_config.json`, or from `config.json` without it."""
    path = directory / "generation_config.json"
    path = path if path.is_file() else directory / "config.json"
    eos_token_id = text_config(HFConfig.of_file(path)).values.get("eos_token_id")
    if eos_token_id is None:
        raise CheckpointError("No stop tokens.", where=f"{path}: eos_token_id", expected="one token id, or a list")
    ids = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    if not ids or not all(type(token) is int for token in ids):
        raise CheckpointError("Stop tokens are not ids.", where=f"{path}: eos_token_id", found=eos_token_id)
    return tuple(ids)


def _copy_text_side(source: Path, directory: Path) -> None:
    """Copy the tokenizer, and the stop tokens into `generation_config.json`."""
    if not any((source / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise CheckpointError("No tokenizer found.", where=source, expected="tokenizer.json")
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
    ids = stop_tokens(source)
    if (source / "generation_config.json").is_file():
        shutil.copyfile(source / "generation_config.json", directory / "generation_config.json")
    else:
        write_json(directory / "generation_config.json", {"eos_token_id": list(ids) if len(ids) > 1 else ids[0]})


def _empty(config: DecoderConfig, quantization: Quantization | None) -> Decoder:
    with torch.device("meta"):
        module = Decoder(config)
        if quantization is not None:
            schemes = quantization.schemes(linear_names(module), "model.")
            make_quantized(module, {name: scheme.empty for name, scheme in schemes.items()})
            if quantization.kv:
                make_fp8_cache(module)
    return module


def _quantized_layers(
    config: DecoderConfig, quantization: Quantization, names: Iterable[str]
) -> dict[str, QuantizedLinear]:
    """The layers of a checkpoint that are quantized, on the meta device, by their names in it without `model.`.

    One layer stands for all experts of a shape.
    """
    modules = _empty(config, quantization).named_modules()
    layers = {name: layer for name, layer in modules if isinstance(layer, QuantizedLinear)}
    experts = quantized_experts(experts_of(config, names), quantization)
    with torch.device("meta"):
        made = {
            (scheme, size, count): scheme.empty(size.inputs, size.outputs, size.bias, *count)
            for scheme, size, count in set(experts.values())
        }
    return layers | {name: made[key] for name, key in experts.items()}


def _hf_name(ours: str) -> str:
    """Return Hugging Face's name of a tensor of our module."""
    return ours if ours.startswith("lm_head") else _KV_CACHE.sub(r"\1_proj.\1_scale", f"model.{ours}")


def _check_tied_head(source: Path, config: DecoderConfig) -> None:
    """A tied checkpoint may also store its head; one that differs from the embedding would be dropped silently."""
    stored = read_headers(source)
    if not config.tie_word_embeddings or "lm_head.weight" not in stored:
        return
    table = next(name for name in stored if text_name(name) == "model.embed_tokens.weight")
    head, embedding = (read_tensor(stored[name].file, name) for name in ("lm_head.weight", table))
    if not torch.equal(head, embedding):
        raise CheckpointError(
            "The head differs from the embedding, but the config ties them.",
            where=f"{stored['lm_head.weight'].file}: lm_head.weight",
            fix="set tie_word_embeddings to false in config.json",
        )
