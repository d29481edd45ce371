"""Parts of a target: their shapes, what is refused, and that they add up to the whole."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from d2sd.convert.checkpoint.target import load_target
from d2sd.errors import D2SDError
from d2sd.modeling.config import Family
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.layers import Layer
from d2sd.modeling.nvfp4 import Nvfp4Linear
from d2sd.modeling.scaled_fp8 import BlockFp8Linear, ScaledFp8Linear
from d2sd.modeling.shard import Cut, Shard, check_divisible
from d2sd.modeling.tensor_parallel import cut, drop_biases
from tests.convert.helpers import write_target_dir
from tests.tiny import in_fp8, tiny_decoder


def decoder(**changes: Any) -> Decoder:
    return tiny_decoder("qwen3", heads=8, kv_heads=4, vocab=67, tie=False, attention_bias=True, **changes)


def expected_part(name: str, tensor: Tensor, rank: int, size: int) -> Tensor:
    """The rank's part of a tensor of `decoder`, by the numbers of its heads, columns and tokens."""

    def of(axis: int, units: int, width: int) -> Tensor:
        held = [unit for unit in range(units) if unit * size // units <= rank <= ((unit + 1) * size - 1) // units]
        held = held if units >= size else [rank * units // size]
        return tensor.index_select(axis, torch.tensor([unit * width + i for unit in held for i in range(width)]))

    part = name.split(".")[-2]
    if part == "q_proj":
        return of(0, 8, 8)
    if part in ("k_proj", "v_proj"):
        return of(0, 4, 8)
    if part == "o_proj":
        return of(1, 8, 8) if tensor.dim() == 2 else tensor
    if part in ("gate_proj", "up_proj"):
        return of(0, 64, 1)
    if part == "down_proj":
        return of(1, 64, 1)
    if name == "lm_head.weight":
        width = -(-67 // size)
        return tensor[rank * width : (rank + 1) * width]
    return tensor


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 2), (3, 4), (5, 8)])
def test_a_rank_reads_its_part_alone(rank: int, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the files that a whole target is read from; nothing else of the cut tensors is read."""
    whole = decoder()
    folder = write_target_dir(tmp_path, whole)
    read: list[int] = []
    original = Cut.read

    def counted(part: Cut, stored: Any) -> Tensor:
        tensor = original(part, stored)
        if not isinstance(stored, Tensor):
            read.append(tensor.numel())
        return tensor

    monkeypatch.setattr(Cut, "read", counted)
    part = load_target(folder, torch.float32, Shard(rank, size))
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = {name.removeprefix("model."): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    found = part.state_dict()
    assert found.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(found[name], expected_part(name, tensor, rank, size)), name
    cut_tensors = [name for name in stored if found[name].shape != stored[name].shape]
    assert sum(read) == sum(found[name].numel() for name in cut_tensors)
    assert len(cut_tensors) == 3 * (7 + 3) + 1  # weights, biases of q, k, v, and the head
    body = part.config.body
    assert (body.num_heads, body.num_kv_heads, body.intermediate_size) == (8 // size, max(4 // size, 1), 64 // size)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "gpt_oss", "gemma3_text"])
def test_every_family_is_read_in_parts(family: Family, tmp_path: Path) -> None:
    """A part is read as it would be cut from a whole target; modules of a whole layer, such as a router, are whole."""
    whole = tiny_decoder(family, tie=False)
    folder = write_target_dir(tmp_path, whole)
    for rank in range(2):
        part = deepcopy(whole)
        cut(part, Shard(rank, 2))
        read = load_target(folder, torch.float32, Shard(rank, 2))
        assert read.config == part.config
        found, expected = read.state_dict(), part.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("family", "tie"),
    [("llama", True), ("llama", False), ("qwen3_moe", False), ("gpt_oss", False), ("gemma3_text", True)],
)
def test_parts_add_up_to_the_whole(family: Family, tie: bool) -> None:
    """All branches summed in every layer, and the logits side by side: the whole target's, but for rounding.

    The biases of o and of the experts' downs are rank 0's.
    """
    whole = tiny_decoder(family, heads=4, kv_heads=2, vocab=67, tie=tie)
    tokens = torch.tensor([[3, 9, 27, 81 % 67]])
    size = 4
    parts = [deepcopy(whole) for _ in range(size)]
    for rank, part in enumerate(parts):
        cut(part, Shard(rank, size))
        if rank > 0:
            drop_biases(part)
    summed: list[list[Tensor]] = []

    def run(rank: int) -> Tensor:
        """A pass of one rank, which knows the sums of the ranks before it and of those behind it as far as they ran."""
        place = 0

        def reduce(branch: Tensor) -> Tensor:
            nonlocal place
            if len(summed) <= place:
                summed.append([torch.zeros_like(branch)] * size)
            summed[place][rank] = branch
            place += 1
            return torch.stack(summed[place - 1]).sum(0)

        for layer in cast("Iterable[Layer]", parts[rank].layers):
            layer.reduce = reduce
        return parts[rank].logits(parts[rank].full_pass(tokens).hidden)

    for _ in range(2 * len(whole.layers)):  # every round, one more branch of every rank has the right input
        logits = torch.cat([run(rank) for rank in range(size)], -1)
    torch.testing.assert_close(logits, whole.logits(whole.full_pass(tokens).hidden), atol=2e-5, rtol=0)


def test_scales_of_whole_tensors_stay() -> None:
    whole = in_fp8(decoder(), ["layers.0.self_attn.o_proj", "layers.1.mlp.up_proj"], cache=True)
    part = deepcopy(whole)
    cut(part, Shard(1, 2))
    for name in ("self_attn.o_proj", "self_attn.k_cache"):
        for key, value in whole.layers[0].get_submodule(name).state_dict().items():
            if key.endswith("scale"):
                assert torch.equal(part.layers[0].get_submodule(name).state_dict()[key], value)
    assert part.layers[0].get_submodule("self_attn.o_proj").weight.shape == (32, 32)


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({"num_kv_heads": 3, "num_heads": 12}, 2, "3 K/V heads"),
        ({"num_kv_heads": 3, "num_heads": 12}, 4, "3 K/V heads"),
        ({"num_heads": 9, "num_kv_heads": 3}, 2, "9 query heads"),
        ({"intermediate_size": 65}, 2, "65 columns of the MLP"),
    ],
)
def test_heads_that_cannot_be_divided(changes: dict[str, int], size: int, message: str) -> None:
    config = decoder().config
    config = replace(config, body=replace(config.body, **changes))  # type: ignore[arg-type]
    with pytest.raises(D2SDError, match=message) as raised:
        check_divisible(config, size)
    assert f"{size} ranks" in str(raised.value)


def test_blocks_over_the_border_are_refused() -> None:
    """A scale for every block of inputs, of which a rank would have one and a half."""
    whole = decoder()
    whole.get_submodule("layers.2.mlp.down_proj").register_buffer("block_scale", torch.ones(32, 3))
    with pytest.raises(D2SDError, match="cannot be divided") as raised:
        cut(whole, Shard(0, 2))
    assert "layers.2.mlp.down_proj.block_scale" in str(raised.value)


def test_quantized_layers_are_cut_between_blocks_and_groups() -> None:
    """By rows and by columns: a rank's scales are those of its part, and what is cut knows its size."""
    whole = decoder()
    body = whole.config.body
    rows, columns = body.intermediate_size, body.hidden_size
    layers = {
        "layers.0.mlp.up_proj": ScaledFp8Linear(columns, rows, False),
        "layers.0.mlp.down_proj": ScaledFp8Linear(rows, columns, False),
        "layers.1.mlp.up_proj": Nvfp4Linear(columns, rows, False, divisors=True),
        "layers.1.mlp.down_proj": Nvfp4Linear(rows, columns, False, divisors=False),
    }
    for name, layer in layers.items():
        parent, _, last = name.rpartition(".")
        setattr(whole.get_submodule(parent), last, layer)
    cut(whole, Shard(1, 2))

    def made(layer: int) -> tuple[Any, Any]:
        mlp = whole.layers[layer].get_submodule("mlp")
        return mlp.get_submodule("up_proj"), mlp.get_submodule("down_proj")

    up, down = made(0)
    assert (up.weight.shape, up.weight_scale.shape, up.out_features) == (
        (rows // 2, columns),
        (rows // 2, 1),
        rows // 2,
    )
    assert (down.weight.shape, down.weight_scale.shape) == ((columns, rows // 2), (columns, 1))
    assert down.in_features == rows // 2
    up, down = made(1)
    assert (up.weight_packed.shape, up.weight_scale.shape) == ((rows // 2, columns // 2), (rows // 2, columns // 16))
    assert (down.weight.shape, down.weight_scale.shape) == ((columns, rows // 4), (columns, rows // 32))
    assert (up.out_features, down.in_features) == (rows // 2, rows // 2)


@pytest.mark.parametrize("name", ["up_proj", "down_proj"])
def test_a_block_of_two_ranks_is_refused(name: str) -> None:
    """192 rows are one block and a half: the border of the ranks is in the first."""
    whole = decoder(hidden=96)  # twice as wide in the MLP
    sizes = (96, 192) if name == "up_proj" else (192, 96)
    setattr(whole.get_submodule("layers.0.mlp"), name, BlockFp8Linear(*sizes, False))
    with pytest.raises(D2SDError, match=r"quantized layer cannot be divided(.|\n)*of 128"):
        cut(whole, Shard(0, 2))
