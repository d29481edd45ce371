"""Converts a GGUF to a Hugging Face checkpoint in fp32, with transformers' loader, and reads its header for plans.

The header is: magic, version, tensors, entries · (key, type, value) of each entry · (name, dimensions, type, place) of
each tensor. Lists, such as tokens, are counted there.

Two faults of the loader are corrected: a GGUF tokenizer may name another end-of-text token than the model's config (the
model emits the config's), and it enables space clean-up, which changes decoded text.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

from d2sd.convert.checkpoint.headers import os_errors
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.checkpoint.offline import offline_transformers
from d2sd.errors import CheckpointError
from d2sd.io import open_regular, read_json, write_json


def read_gguf_config(gguf: Path) -> HFConfig:
    """Read the config from the file's metadata; no weights are read.

    A Llama's, SmolLM2's among them, needs no transformers, which takes seconds to import and parses every token.
    """
    values = llama_config(gguf)
    if values is None:
        values = _load(gguf, offline_transformers().AutoConfig).to_dict()
    return HFConfig(values, str(gguf))


def convert_gguf(gguf: Path, directory: Path) -> None:
    """Write `config.json`, `model.safetensors`, tokenizer and `generation_config.json` of a GGUF into `directory`."""
    transformers = offline_transformers()
    import torch
    from transformers import modeling_gguf_pytorch_utils

    # Its reader draws a progress bar that no setting disables; tqdm has been imported by torch already.
    modeling_gguf_pytorch_utils.tqdm = lambda tensors, **_: tensors
    # transformers 5.18 and later can keep a GGUF's blocks, and refuse to save such a model unless they are removed
    blocks = getattr(transformers, "GgufConfig", None)
    dense = {} if blocks is None else {"quantization_config": blocks(dequantize=True)}
    with _read_once():
        tokenizer = _load(gguf, transformers.AutoTokenizer)
        model = _load(gguf, transformers.AutoModelForCausalLM, dtype=torch.float32, **dense)
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    end = model.config.eos_token_id
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    tokenizer.clean_up_tokenization_spaces = False
    with os_errors(directory):
        model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    settings = directory / "tokenizer_config.json"
    tokenizer_config = read_json(settings, error=CheckpointError)
    # where and how this process loaded it, and ids that repeat the token names
    dropped = ("is_local", "local_files_only", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
    write_json(settings, {key: value for key, value in tokenizer_config.items() if key not in dropped})
    write_json(directory / "generation_config.json", {"eos_token_id": _stop_tokens(tokenizer, end)})


def _stop_tokens(tokenizer: Any, end: int) -> list[int]:
    """The config's end token and, if the tokenizer has it, the end-of-document token."""
    document = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    ids = [end] if document in (None, end) else [end, document]
    assert all(type(token) is int for token in ids)
    return ids


@contextmanager
def _read_once() -> Iterator[None]:
    """Keep what transformers parses of the file again for all that it loads, and the names it lists for each module."""
    import gguf

    kept = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        for name, make in kept.items():
            setattr(gguf, name, cache(make))
        yield
    finally:
        for name, make in kept.items():
            setattr(gguf, name, make)


def _load(file: Path, loader: Any, **options: Any) -> Any:
    import gguf

    if not hasattr(gguf, "__version__"):  # transformers reads it there where Python 3.10 maps no distribution to it
        gguf.__version__ = version("gguf")
    try:
        return loader.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True, **options)
    except Exception as error:  # a parser of foreign files: struct, numpy, KeyError, ValueError...
        raise CheckpointError("The GGUF cannot be read.", where=file, found=error) from None


_MAGIC, _VERSIONS = b"GGUF", (2, 3)
#: Codes of types -> their spelling in `struct`.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
#: Most bytes of a text: chat templates have tens of thousands.
_LONGEST = 1 << 24
#: Keys of a Llama behind `llama.` -> of config.json, as transformers reads them.
_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "rope.dimension_count": "head_dim",
    "rope.freq_base": "rope_theta",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}


def llama_config(gguf: Path) -> dict[str, Any] | None:
    """The config.json of a Llama; None for a file of another architecture.

    Raises `CheckpointError` if the header is damaged.
    """
    try:
        with open_regular(gguf) as stream:
            entries, tensors = _read(stream)
    except (struct.error, ValueError, OverflowError) as error:
        raise CheckpointError("The GGUF cannot be read.", where=gguf, found=error) from None
    if entries.get("general.architecture") != "llama" or entries.get("general.name") == "mistral":
        return None  # transformers knows a Mistral by its name
    values: dict[str, Any] = {"model_type": "llama", "tie_word_embeddings": "output.weight" not in tensors}
    values |= {ours: entries[f"llama.{key}"] for key, ours in _KEYS.items() if f"llama.{key}" in entries}
    values.setdefault("vocab_size", entries.get("tokenizer.ggml.tokens"))
    return values


def _read(stream: BinaryIO) -> tuple[dict[str, Any], set[str]]:
    """Entries, lists as their lengths, and names of tensors. Raises ValueError or `struct.error`."""
    magic, version, tensors, count = _numbers(stream, "4sIQQ")
    if magic != _MAGIC or version not in _VERSIONS:
        raise ValueError(f"magic {magic!r}, version {version}")
    entries: dict[str, Any] = {}
    for _ in range(count):
        key = _text(stream)
        entries[key] = _value(stream, *_numbers(stream, "I"))
    names: set[str] = set()
    for _ in range(tensors):
        names.add(_text(stream))
        (dimensions,) = _numbers(stream, "I")
        stream.seek(8 * dimensions + 12, 1)
    return entries, names


def _value(stream: BinaryIO, kind: int) -> Any:
    if kind == _TEXT:
        return _text(stream)
    if kind != _LIST:
        return _numbers(stream, _spelling(kind))[0]
    of, count = _numbers(stream, "IQ")
    if of != _TEXT:
        stream.seek(count * struct.calcsize(f"<{_spelling(of)}"), 1)
        return count
    for _ in range(count):
        (length,) = _numbers(stream, "Q")
        stream.seek(length, 1)
    return count


def _spelling(kind: int) -> str:
    if kind not in _NUMBERS:
        raise ValueError(f"type {kind}")
    return _NUMBERS[kind]


def _text(stream: BinaryIO) -> str:
    (length,) = _numbers(stream, "Q")
    if length > _LONGEST:
        raise ValueError(f"a text of {length} bytes")
    return stream.read(length).decode()


def _numbers(stream: BinaryIO, spelling: str) -> tuple[Any, ...]:
    layout = struct.Struct(f"<{spelling}")
    return layout.unpack(stream.read(layout.size))
