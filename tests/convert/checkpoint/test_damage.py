"""Damaged and hostile checkpoint files: an error that names the file, at once and in bounded memory."""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from d2sd.build.pipeline import build
from d2sd.build.plan import make_plan
from d2sd.bundle.turns import encode_turns
from d2sd.convert.checkpoint.headers import INDEX, open_tensors, read_headers
from d2sd.convert.checkpoint.offline import load_tokenizer
from d2sd.convert.checkpoint.weights import write_tensors
from d2sd.errors import CheckpointError
from d2sd.recipe import load_recipe
from tests.convert.helpers import edit_json, write_project

Damage = Callable[[Path], object]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return write_project(tmp_path / "project").parent


def header(file: str, change: Callable[[dict[str, Any]], object]) -> Damage:
    """Rewrite a safetensors header."""

    def damage(project: Path) -> None:
        path = project / file
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        values = json.loads(data[8 : 8 + length])
        values = change(values) or values
        text = values if isinstance(values, bytes) else json.dumps(values).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return damage


def entry(key: str, value: object) -> Damage:
    """Change the header's entry of one tensor of the target."""
    return header("target/model.safetensors", lambda values: values["model.norm.weight"].update({key: value}))


def sharded(weight_map: object) -> Damage:
    def damage(project: Path) -> None:
        target = project / "target"
        (target / "model.safetensors").rename(target / "a.safetensors")
        (target / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return damage


def text(file: str, content: str | bytes) -> Damage:
    return lambda project: (project / file).write_bytes(content.encode() if isinstance(content, str) else content)


def config(file: str, key: str, value: object) -> Damage:
    return lambda project: edit_json(project / file / "config.json", key, value)


def replaced(file: str, make: Callable[[Path], None]) -> Damage:
    def damage(project: Path) -> None:
        (project / file).unlink()
        make(project / file)

    return damage


DEEP = "[" * 100_000
WEIGHTS: dict[str, Damage] = {
    "no data_offsets": entry("data_offsets", []),
    "negative offsets": entry("data_offsets", [-8, 0]),
    "huge offsets": entry("data_offsets", [0, 2**63]),
    "dtype is no name": entry("dtype", 5),
    "unknown dtype": entry("dtype", "F7"),
    "shape is no list": entry("shape", "32"),
    "shape overflows": entry("shape", [2**40, 2**40]),
    "negative shape": entry("shape", [-32]),
    "entry is no object": header("target/model.safetensors", lambda values: values.update(a=1)),
    "header is a list": header("target/model.safetensors", lambda values: b"[]      "),
    "deep header": header("target/model.safetensors", lambda values: DEEP.encode()),
    "long header": text("target/model.safetensors", b"\xff" * 8 + b"{}"),
    "seven bytes": text("target/model.safetensors", b"1234567"),
    "index value is int": sharded({"model.norm.weight": 5}),
    "index value is null": sharded({"model.norm.weight": None}),
    "index is a list": sharded(["a.safetensors"]),
    "index names the folder above": sharded({"model.norm.weight": "../a.safetensors"}),
    "index names no file": sharded({"model.norm.weight": "a\0.safetensors"}),
    "index names a folder": sharded({"model.norm.weight": ".."}),
}


@pytest.mark.parametrize("damage", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_damaged_weights_are_named(project: Path, damage: Damage) -> None:
    damage(project)
    with pytest.raises(CheckpointError, match=r"safetensors|shard|index|target/\.\."):
        read_headers(project / "target")
    with pytest.raises(CheckpointError):
        make_plan(load_recipe(project / "recipe.yaml"))


TEXTS: dict[str, tuple[Damage, str]] = {
    "deep config": (text("target/config.json", DEEP), "target/config.json"),
    "config of one long integer": (text("target/config.json", '{"hidden_size": ' + "9" * 5000 + "}"), "config.json"),
    "a float beyond doubles": (config("target", "rms_norm_eps", 10**400), "config.json"),
    "config is no UTF-8": (text("target/config.json", b"\xff\xfe"), "config.json"),
    "deep drafter config": (text("first/config.json", DEEP), "first/config.json"),
    "deep draft vocabulary": (text("first/draft_vocab.json", DEEP), "draft_vocab.json"),
    "deep quantisation": (text("target/hf_quant_config.json", DEEP), "hf_quant_config.json"),
    "quantisation is a list": (text("target/hf_quant_config.json", "[]"), "hf_quant_config.json"),
    "deep index": (lambda p: [sharded({})(p), text(f"target/{INDEX}", DEEP)(p)], INDEX),
    "a billion layers": (config("target", "num_hidden_layers", 10**9), "num_hidden_layers"),
    "a billion layers of a drafter": (config("first", "num_hidden_layers", 10**9), "num_hidden_layers"),
    "a billion target layers": (config("second", "num_target_layers", 10**9), "num_target_layers"),
    "hidden size of 2^63": (config("target", "hidden_size", 2**63), "hidden_size"),
    "vocabulary of 2^63": (config("target", "vocab_size", 2**63), "vocab_size"),
    "head size of 2^62": (config("target", "head_dim", 2**62), "head_dim"),
    "heads whose product overflows": (config("first", "head_dim", 1 << 24), "head_dim"),
    "intermediate size of 2^70": (config("second", "intermediate_size", 2**70), "intermediate_size"),
    "config is a pipe": (replaced("target/config.json", os.mkfifo), "target/config.json"),
    "config never ends": (replaced("target/config.json", lambda p: p.symlink_to("/dev/zero")), "target/config.json"),
}


@pytest.mark.parametrize("first", [b"PK", b"\x80"])
def test_a_header_may_begin_like_a_pickle(tmp_path: Path, first: bytes) -> None:
    """A safetensors file begins with its header's length, whose bytes may be a pickle's or a zip's first ones."""
    length = int.from_bytes(first.ljust(2, b"\1"), "little")
    text = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode().ljust(length)
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", length) + text + bytes(4))
    assert file.read_bytes().startswith(first)
    assert read_headers(tmp_path)["a"].shape == (1,)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("damage", "named"), TEXTS.values(), ids=TEXTS.keys())
def test_damaged_configs_are_named(project: Path, damage: Damage, named: str) -> None:
    damage(project)
    with pytest.raises(CheckpointError, match=named) as caught:
        make_plan(load_recipe(project / "recipe.yaml"))
    assert len(str(caught.value)) < 1000


def test_deep_stop_tokens_are_named(project: Path, tmp_path: Path) -> None:
    text("target/generation_config.json", DEEP)(project)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        build(load_recipe(project / "recipe.yaml"), tmp_path / "out", validate=False)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_write_errors_of_safetensors_are_os_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(*args: object, **options: object) -> None:
        raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(code)} (os error {code})")

    monkeypatch.setattr("d2sd.convert.checkpoint.weights.save_file", fail)
    with pytest.raises(OSError, match=r"model\.safetensors") as caught:
        write_tensors(tmp_path / "model.safetensors", {"a": torch.ones(1)})
    assert caught.value.errno == code


def test_a_token_id_out_of_range_is_named(project: Path) -> None:
    """The tokenizers library would print every id below it, for hours."""
    path = project / "target" / "tokenizer.json"
    values = json.loads(path.read_text())
    values["model"]["vocab"]["w1"] = 2**31
    path.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"token id is out of range(.|\n)*tokenizer.json(.|\n)*2147483648"):
        load_tokenizer(project / "target")


@pytest.mark.parametrize("value", ["x" * 100_000, {"content": "x" * 100_000}], ids=("text", "mapping"))
def test_a_special_token_of_many_characters_is_refused_at_once(project: Path, value: object) -> None:
    """The tokenizers library would take most of a minute for it."""
    edit_json(project / "target" / "tokenizer_config.json", "eos_token", value)
    with pytest.raises(CheckpointError, match=r"too long(.|\n)*tokenizer_config.json(.|\n)*100,000 characters"):
        load_tokenizer(project / "target")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_max_length", "x"),
        ("model_max_length", []),
        ("model_max_length", None),
        ("chat_template", 3),
        ("chat_template", [{"name": "default", "template": 3}]),
        ("chat_template", True),
        ("eos_token", {"content": 3}),
        ("model_input_names", 3),
        ("model_input_names", ["x"]),
    ],
    ids=str,
)
def test_a_tokenizer_either_works_or_is_refused_when_it_is_read(project: Path, key: str, value: object) -> None:
    edit_json(project / "target" / "tokenizer_config.json", key, value)
    try:
        tokenizer = load_tokenizer(project / "target")
    except CheckpointError:
        return
    assert tokenizer("w1 w2").input_ids == [1, 2]
    if tokenizer.chat_template:
        assert encode_turns(tokenizer, [{"role": "user", "content": "w1"}], {}, "here")


def _denied(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make opening files of this name fail; the tests may run as root, for whom modes deny nothing."""
    original = os.open

    def opened(path: Any, flags: int, *mode: int, **options: Any) -> int:
        if Path(path).name == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return original(path, flags, *mode, **options)

    monkeypatch.setattr(os, "open", opened)


@pytest.mark.parametrize("folder", ["target", "first"])
def test_weights_without_permission_are_not_called_missing(
    project: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    _denied(monkeypatch, "model.safetensors")
    with pytest.raises(CheckpointError, match="A weight file cannot be read") as caught:
        read_headers(project / folder)
    assert (caught.value.found, caught.value.where) == ("Permission denied", project / folder / "model.safetensors")


@pytest.mark.parametrize("kind", ["pipe", "device", "proc", "folder"])
def test_weights_that_cannot_be_mapped_are_named(project: Path, kind: str) -> None:
    index, shard = project / "target" / INDEX, project / "target" / "a.safetensors"
    (project / "target" / "model.safetensors").unlink()
    index.write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    if kind == "pipe":
        os.mkfifo(shard)
    elif kind == "folder":
        shard.mkdir()
    else:
        shard.symlink_to("/dev/zero" if kind == "device" else "/proc/self/status")
    with pytest.raises(CheckpointError, match=r"A weight file cannot be (read|mapped)") as caught:
        read_headers(project / "target")
    assert caught.value.where == shard


def test_headers_of_a_file_larger_than_memory_are_read(tmp_path: Path) -> None:
    """A plan maps nothing: the kernel reserves no memory for pages that could be written."""
    size = 141 * 10**9
    text = json.dumps({"w": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + size)  # sparse: a few kilobytes on the disk
    assert read_headers(tmp_path)["w"].shape == (size // 2,)


def test_weights_that_memory_does_not_hold_are_named(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise RuntimeError("unable to mmap 141000000091 bytes: Cannot allocate memory (12)")

    monkeypatch.setattr("d2sd.convert.checkpoint.headers.safe_open", refuse)
    file = project / "target" / "model.safetensors"
    with pytest.raises(CheckpointError, match=r"mapped(.|\n)*Cannot allocate(.|\n)*shards"), open_tensors(file):
        pass
