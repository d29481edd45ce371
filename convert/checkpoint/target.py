"""The target's checkpoint: a Hugging Face folder of one of `families.py`, read strictly and written in one precision.

Features that change the forward pass and are not modelled (partial rotary, other activations) are refused by key.
Tensors have Hugging Face's names; the module's names are the same without the leading `model.`, except the K/V scales
and experts, which are stacked (`experts.py`).
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from d2sd.convert.checkpoint.dequantize import dequantized, plain_name
from d2sd.convert.checkpoint.experts import ExpertMap, layout_in
from d2sd.convert.checkpoint.families import FAMILIES, parse_target_config
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.checkpoint.nested import text_config, text_name
from d2sd.convert.checkpoint.own_files import DRAFT_VOCABULARY
from d2sd.convert.checkpoint.quantization import FILE, KEY, Quantization, described, read_quantization, refuse_unserved
from d2sd.convert.checkpoint.schemes import MXFP4
from d2sd.convert.checkpoint.weights import (
    DTYPES,
    INDEX,
    Rename,
    check_headers,
    expected_shapes,
    fill,
    read_headers,
    read_tensor,
    read_tensors,
    write_tensors,
)
from d2sd.errors import CheckpointError
from d2sd.io import write_json
from d2sd.modeling.config import DecoderConfig
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.fp8 import linear_names, make_fp8_cache
from d2sd.modeling.quantized import QuantizedLinear, Scheme, make_quantized
from d2sd.modeling.tensor_parallel import Shard, cut
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
#: Scales of K and V: ModelOpt's, compressed-tensors' own and those of its first versions.
_KV_SCALE = re.compile(r"\b(?:([kv])_proj\.(?:\1_scale|output_scale)|(?<=self_attn\.)([kv])_scale)$")
_MXFP4 = re.compile(r"(?<=mlp\.experts\.)(gate_up_proj|down_proj)_(blocks|scales)$")
_KV_CACHE = re.compile(r"\b([kv])_cache\.scale$")
#: Layers that draft one token behind the last, which d2sd leaves out.
_MTP = "mtp."
#: Config keys that describe the machine that wrote them, not the model.
_PROVENANCE = ("_name_or_path", "_model_name_or_path", "auto_map", "torch_dtype")


def target_shapes(
    config: DecoderConfig, quantization: Quantization | None = None, names: Iterable[str] = ()
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint's tensors, without the leading `model.`; a tied head counts once.

    `names`: those in the checkpoint, which say how experts are stored; (): as the family usually has them.
    """
    experts = _experts(config, names)
    shapes = experts.stored(expected_shapes(_empty(config, quantization)))
    for name, layer in _quantized_experts(experts, quantization).items():
        del shapes[plain_name(name, layer)]
        shapes |= {f"{name}.{tensor}": shape for tensor, shape in expected_shapes(layer).items()}
    return shapes


def check_target_tensors(directory: Path, config: DecoderConfig) -> Quantization | None:
    """Check names, shapes and types from headers alone. Return how the target is quantized."""
    headers = read_headers(directory)
    quantization = read_quantization(directory, HFConfig.read(directory))
    check_headers(directory, headers, target_shapes(config, quantization, headers), _rename(config))
    return quantization


def left_out(directory: Path, config: DecoderConfig) -> dict[str, int]:
    """Parts of a checkpoint that are not the text model, and how many tensors they have."""
    if config.body.delta is None:
        return {}
    names = [name for name in read_headers(directory) if name.startswith(_MTP) or text_name(name) is None]
    return dict(Counter(name.split(".")[0] if name.startswith(_MTP) else "images" for name in names))


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
    experts = _experts(module.config, names)
    if shard is not None:
        cuts |= experts.cuts(_experts(config, names), shard.rank)
    read = read_tensors(directory, stored, dtype, _rename(config), cuts, check)
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
) -> None:
    """Copy a checkpoint in `precision`, shard by shard under its own file names, with tokenizer and stop tokens.

    Quantized tensors stay as they are, or are read in `precision` where `dequantize`. Tokenizer and stop tokens are
    copied from the folder `text_side` if given.
    """
    raw = text_config(HFConfig.read(source))
    config, quantization = parse_target_config(raw), read_quantization(source, raw)
    _check_tied_head(source, config)
    stored_names = read_headers(source).keys()
    shapes, rename = target_shapes(config, quantization, stored_names), _rename(config)
    files = read_tensors(source, shapes, DTYPES[precision], rename)
    if not dequantize:
        refuse_unserved(quantization, shapes, source / "config.json", precision)
    elif quantization is not None:
        layers = _quantized_layers(config, quantization, stored_names)
        files, quantization = dequantized(files, layers, DTYPES[precision], source), None
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


def _experts(config: DecoderConfig, names: Iterable[str]) -> ExpertMap:
    return ExpertMap(config.body, layout_in(names, FAMILIES[config.family].experts))


def _empty(config: DecoderConfig, quantization: Quantization | None) -> Decoder:
    with torch.device("meta"):
        module = Decoder(config)
        if quantization is not None:
            make_quantized(module, quantization.schemes(linear_names(module), "model."))
            if quantization.kv:
                make_fp8_cache(module)
    return module


def _quantized_layers(
    config: DecoderConfig, quantization: Quantization, names: Iterable[str]
) -> dict[str, QuantizedLinear]:
    """The layers of a checkpoint that are quantized, on the meta device, by their names in it without `model.`."""
    modules = _empty(config, quantization).named_modules()
    layers = {name: layer for name, layer in modules if isinstance(layer, QuantizedLinear)}
    return layers | _quantized_experts(_experts(config, names), quantization)


def _quantized_experts(experts: ExpertMap, quantization: Quantization | None) -> dict[str, QuantizedLinear]:
    """Those of single experts, which our module stacks; one layer stands for all of a shape."""
    if quantization is None:
        return {}
    products = {name.removesuffix(".weight"): part.shape for name, part in experts.parts.items()}
    shapes = {name: shape for name, shape in products.items() if name.endswith("_proj")}
    schemes = quantization.schemes(shapes, "model.")
    for name, scheme in schemes.items():
        if (len(shapes[name]) == 3) != (scheme == MXFP4):
            raise CheckpointError(
                "Experts of this family are not read in this quantization.",
                where=f"model.{name}",
                found=scheme.name,
                expected=MXFP4.name if len(shapes[name]) == 3 else "a quantization of linear layers",
            )
    made: dict[tuple[Scheme, tuple[int, ...]], QuantizedLinear] = {}
    with torch.device("meta"):
        for scheme, shape in {(scheme, shapes[name]) for name, scheme in schemes.items()}:
            *count, first, last = shape  # stacked ones are stored [X, in, out], others [out, in]
            size = (first, last) if count else (last, first)
            made[scheme, shape] = scheme.empty(*size, False, *count)
    return {name: made[scheme, shapes[name]] for name, scheme in schemes.items()}


def _rename(config: DecoderConfig) -> Rename:
    def rename(name: str) -> str | None:
        if name.endswith("rotary_emb.inv_freq"):
            return None  # early Llama checkpoints store what RoPE computes
        if config.body.delta is not None:
            if name.startswith(_MTP):
                return None
            alone = text_name(name)
            if alone is None:
                return None
            name = alone
        if name == "lm_head.weight":
            return None if config.tie_word_embeddings else name  # see _check_tied_head
        ours = name[len("model.") :] if name.startswith("model.") else f"outside model.: {name}"
        ours = _MXFP4.sub(r"\1.\2", ours)
        return _KV_SCALE.sub(lambda found: f"{found[1] or found[2]}_cache.scale", ours)

    return rename


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
