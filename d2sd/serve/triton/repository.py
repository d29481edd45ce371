"""Writes the model repository: config.pbtxt, a model.py that imports the adapter, and the warm-up request."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

from d2sd.errors import D2SDError
from d2sd.io import write_text
from d2sd.manifest import load_manifest
from d2sd.serve.triton.names import INPUTS, OUTPUTS
from d2sd.serve.triton.parameters import Parameters

#: The first line of config.pbtxt; a model folder without it is not overwritten.
_MARK = "# Written by `d2sd triton`; run it again to change a value, or edit this file."
_MODEL = """from d2sd.extras import require

require("serve", ("prometheus_client",), "The Triton model")

from d2sd.serve.triton.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
"""
#: Folder name of a model: what Triton, a URL and a shell take as they are.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
#: Tokens that the warm-up generates.
_WARM_UP = 8


def write_repository(
    folder: Path,
    bundle: Path,
    name: str | None = None,
    values: Sequence[str] = (),
    *,
    gpus: Sequence[int] = (),
    batched: bool = False,
) -> Path:
    """Write a model that serves `bundle` into the repository `folder`; returns the model's folder.

    Its name is the bundle's unless given. `values` are parameters, `key=value`. There is one instance, a process with
    an engine of its own, on each of `gpus`, or one on the CPU. With `batched` inputs have a leading dimension of 1.
    Raises D2SDError if `bundle` is not a bundle, for a wrong value or name, and if the model's folder holds another.
    """
    name = name or load_manifest(bundle).recipe.name
    parameters = Parameters.parse([f"bundle={bundle.resolve()}", *values])
    if not _NAME.fullmatch(name):
        raise D2SDError("This cannot be a model's name.", where="--name", found=name, expected="letters, digits, . _ -")
    model = folder / name
    config = model / "config.pbtxt"
    if model.exists() and not (config.is_file() and config.read_text("utf-8", errors="replace").startswith(_MARK)):
        raise D2SDError("The folder holds something else.", where=model, fix="choose another -o or --name")
    for path in (model / "1", model / "warmup"):
        path.mkdir(parents=True, exist_ok=True)
    write_text(model / "1" / "model.py", _MODEL)
    (model / "warmup" / "max_tokens").write_bytes(struct.pack("<i", _WARM_UP))
    write_text(config, config_text(name, parameters, gpus=gpus, batched=batched))
    return model


def config_text(name: str, parameters: Parameters, *, gpus: Sequence[int] = (), batched: bool = False) -> str:
    """The text of config.pbtxt, a protobuf in text format."""
    instance = f"{{ kind: KIND_GPU count: 1 gpus: {list(gpus)} }}" if gpus else "{ kind: KIND_CPU count: 1 }"
    inputs = (_tensor(name, kind.data_type, "optional: true") for name, kind in INPUTS.items())
    prompt = "value { data_type: TYPE_STRING dims: [ 1 ] zero_data: true }"
    length = 'value { data_type: TYPE_INT32 dims: [ 1 ] input_data_file: "max_tokens" }'
    warm_up = f'inputs {{ key: "text_input" {prompt} }} inputs {{ key: "max_tokens" {length} }}'
    return "\n".join(
        (
            _MARK,
            f"name: {_quoted(name)}",
            'backend: "python"',
            f"max_batch_size: {int(batched)}",
            "model_transaction_policy { decoupled: true }",
            f"instance_group [ {instance} ]",
            *(
                f"parameters {{ key: {_quoted(key)} value {{ string_value: {_quoted(value)} }} }}"
                for key, value in parameters.strings().items()
            ),
            f'model_warmup [ {{ name: "first tokens" batch_size: 1 {warm_up} }} ]',
            _list("input", inputs),
            _list("output", (_tensor(name, kind) for name, kind in OUTPUTS.items())),
            "",
        )
    )


def _tensor(name: str, data_type: str, more: str = "") -> str:
    return f"  {{ name: {_quoted(name)} data_type: TYPE_{data_type} dims: [ -1 ] {more}".rstrip() + " }"


def _list(name: str, items: Iterable[str]) -> str:
    return "\n".join((f"{name} [", ",\n".join(items), "]"))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
