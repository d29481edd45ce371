"""Converts a GGUF to a Hugging Face checkpoint in fp32, with transformers' loader.

Two faults of the loader are corrected: a GGUF tokenizer may name another end-of-text token than the model's config (the
model emits the config's), and it enables space clean-up, which changes decoded text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from d2sd.convert.checkpoint.gguf_header import llama_config
from d2sd.convert.checkpoint.headers import os_errors
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.checkpoint.offline import offline_transformers
from d2sd.errors import CheckpointError
from d2sd.io import read_json, write_json


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
