"""The header of a GGUF: numbers and texts about the model, and names of tensors. Lists, such as tokens, are counted.

magic, version, tensors, entries · (key, type, value) of each entry · (name, dimensions, type, place) of each tensor
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

from d2sd.errors import CheckpointError
from d2sd.io import open_regular

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
