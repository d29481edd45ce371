"""Drafters with a head, as each project writes them: read as one drafter, written again in the bytes of our own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from d2sd.convert.checkpoint.quantization import Quantization
from d2sd.convert.formats.convert import convert
from d2sd.convert.formats.read import read_drafter
from d2sd.convert.formats.shared_tensors import read_target_parts
from d2sd.convert.kinds import DFLASH
from d2sd.errors import CheckpointError
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.head_configs import InjectionConfig, MarkovConfig, PairConfig, SelectorConfig
from d2sd.train.data.packing import attend_packed
from tests.convert.formats.helpers import IDS, ROPE, extra, public_fields, speculators_fields, write_foreign
from tests.convert.helpers import edit_json, edit_tensors, tree_bytes, write_target_dir
from tests.tiny import in_fp8, tiny_decoder, tiny_drafter

DECODER = tiny_decoder(layers=6, rope=ROPE, tie=False)
VANILLA = MarkovConfig(rank=8, confidence=True, confidence_with_markov=True)
GATED = MarkovConfig(rank=8, gated=True, confidence=True)
SELECTOR = SelectorConfig(rank=8, candidates=16, taps=2, group=16)
INJECTION = InjectionConfig(rank=8, message=4, candidates=12)
PAIR = PairConfig(rank=8, candidates=12)
#: Names and shapes beside a DFlash body, of hidden size 32 and 64 tokens, as they are published.
MARKOV = {
    "markov_head.markov_w1.weight": (64, 8),
    "markov_head.markov_w2.weight": (64, 8),
    "confidence_head.proj.weight": (1, 40),
    "confidence_head.proj.bias": (1,),
}
OF_GATE = {"markov_head.gate_proj.weight": (8, 40), "markov_head.gate_proj.bias": (8,)}
OF_PAIR = {
    f"pair_head.{name}": (8, 32)
    for name in ("predecessor_projection", "successor_projection", "hidden_projection.weight")
}
OF_INJECTION = {
    "injection.transfer_codes": (64, 8),
    "injection.bias": (4,),
    **{f"injection.{name}.weight": (4, 8) for name in ("message", "receiver_gate", "predecessor_gate")},
    **{f"injection.readouts.{layer}.weight": (8, 32) for layer in range(2)},
    **{f"injection.writes.{layer}.weight": (32, 4) for layer in range(2)},
}
OF_SELECTOR = {
    "candidate_selector.predecessor_codebook": (64, 8),
    "candidate_selector.successor_codebook": (64, 8),
    "candidate_selector.hidden_projection.weight": (8, 32),
    **{
        f"layers.{layer}.{part}_conv.{name}": shape
        for layer in range(2)
        for part in ("attention", "mlp")
        for name, shape in (("base_kernel", (2, 2, 32)), ("kernel_projection.weight", (2 * 2 * 2, 32)))
    },
}


def drafter_of(
    head: Any, *, from_anchor: bool = False, windows: tuple[int, ...] = (), causal: tuple[bool, ...] = ()
) -> Drafter:
    drafter = tiny_drafter(DECODER.config, target_layer_ids=(0, 2, 4), head=head, sample_from_anchor=from_anchor)
    windowed = Drafter(replace(drafter.config, body=replace(drafter.config.body, windows=windows, causal=causal)))
    windowed.load_state_dict(drafter.state_dict())
    return windowed.eval().requires_grad_(False)


DSPARK, GATED_DSPARK = (drafter_of(head, from_anchor=True) for head in (VANILLA, GATED))
DFLASH2 = drafter_of(SELECTOR, windows=(16, 16))
SHIFTED = drafter_of(None, from_anchor=True)
DSPINE = drafter_of(INJECTION, causal=(True, True))
PAIRED = drafter_of(PAIR)
PAIR_KEYS = {"projector_type": "d2sd_pair", "pair_rank": 8, "pair_top_k": 12}


def markov_keys(config: MarkovConfig) -> dict[str, Any]:
    return {
        "markov_rank": 8,
        "markov_head_type": "gated" if config.gated else "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": config.confidence_with_markov,
    }


def with_keys(drafter: Drafter, inside: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    fields = public_fields(drafter) | dict(top)
    return fields | {"dflash_config": fields["dflash_config"] | dict(inside)}


def specforge(drafter: Drafter, head: MarkovConfig) -> dict[str, Any]:
    inside = {"projector_type": "dspark", "confidence_head_alpha": 1.0, "attention_mode": "gqa", **markov_keys(head)}
    top = {"architectures": ["DSparkDraftModel"], "auto_map": {"AutoModel": "dspark.DSparkDraftModel"}}
    return with_keys(drafter, inside, top)


def modelopt(drafter: Drafter) -> dict[str, Any]:
    inside = {"projector_type": "dspark", "shift_label": True, "causal": False, "use_confidence_head": True}
    return with_keys(drafter, inside | {"markov_rank": 8, "markov_head_type": "vanilla"}, {})


def liquid(drafter: Drafter) -> dict[str, Any]:
    return with_keys(drafter, {}, {"architectures": ["Lfm2DSparkDraftModel"], **markov_keys(VANILLA)})


def deepspec(drafter: Drafter, keys: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the target's config with the drafter's keys at the top."""
    fields = public_fields(drafter) | {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512}
    del fields["auto_map"]
    own: dict[str, Any] = fields.pop("dflash_config")
    return fields | own | dict(keys)


SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 16, "use_sliding_window": True}


def zlab2(drafter: Drafter) -> dict[str, Any]:
    """Everything in dflash_config, the block size too; every layer has a window, and sees its whole block."""
    inside = {"selector_rank": 8, "selector_top_k": 16, "conv_kernel_size": 2, "conv_group_size": 16, "block_size": 4}
    top = {"architectures": ["DFlash2DraftModel"], "is_causal": False, **SLIDING}
    fields = with_keys(drafter, inside, top)
    del fields["block_size"]
    return fields


def dspine(drafter: Drafter) -> dict[str, Any]:
    """The keys of training too, beside dflash_config; it does not say that layers are causal."""
    keys = {"transfer_rank": 8, "message_size": 4, "top_k": 12, "ce_weight": 0.1, "replacement_layers": 3}
    top = {"architectures": ["DSpineDraftModel"], "auto_map": {"AutoModel": "dspine.DSpineDraftModel"}}
    return with_keys(drafter, {}, top | {"dspine_config": keys})


def with_codes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The codes beside the injection, and whether they are there."""
    named = {name.replace("injection.transfer_codes", "transfer_codes"): tensor for name, tensor in tensors.items()}
    return named | {"transfer_ready": torch.tensor(True)}


def speculators(drafter: Drafter, kind: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    fields = speculators_fields(drafter, **keys) | {"speculators_model_type": kind}
    fields["speculators_config"] = fields["speculators_config"] | {"algorithm": kind, "proposal_methods": []}
    return fields


def windowed(fields: dict[str, Any]) -> dict[str, Any]:
    """Windows that are not causal, which is the default of this kind alone."""
    fields.pop("sliding_window_non_causal")
    return fields | {"transformer_layer_config": fields["transformer_layer_config"] | SLIDING}


def flat(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """ModelOpt's names."""
    short = {"markov_head.": "", "confidence_head.proj.": "confidence_proj."}
    return {
        next((ours + n.removeprefix(theirs) for theirs, ours in short.items() if n.startswith(theirs)), n): t
        for n, t in tensors.items()
    }


@dataclass(frozen=True)
class Released:
    """A checkpoint as a project writes it, of a drafter that it is read as."""

    drafter: Drafter
    fields: Callable[[], dict[str, Any]]
    shapes: Mapping[str, tuple[int, ...]]
    renamed: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict
    copies: bool = False  # of the target's embedding and head

    def write(self, folder: Path) -> Path:
        tensors = dict(self.renamed(self.drafter.state_dict()))
        tensors |= extra(DECODER, self.drafter) if self.copies else {}
        return write_foreign(folder, self.fields(), tensors)


SELECTOR_KEYS = {"selector_rank": 8, "selector_top_k": 16, "conv_kernel_size": 2, "conv_group_size": 16}
RELEASED = {
    "DSpark, SpecForge": Released(DSPARK, lambda: specforge(DSPARK, VANILLA), MARKOV),
    "DSpark, gated": Released(
        GATED_DSPARK,
        lambda: specforge(GATED_DSPARK, GATED),
        MARKOV | OF_GATE | {"confidence_head.proj.weight": (1, 32)},
    ),
    "DSpark, ModelOpt": Released(DSPARK, lambda: modelopt(DSPARK), MARKOV, flat),
    "DSpark, DeepSpec": Released(DSPARK, lambda: deepspec(DSPARK, markov_keys(VANILLA)), MARKOV, copies=True),
    "DSpark, LiquidAI": Released(DSPARK, lambda: liquid(DSPARK), MARKOV),
    "DSpark, speculators": Released(
        DSPARK, lambda: speculators(DSPARK, "dspark", markov_keys(VANILLA) | {"sample_from_anchor": None}), MARKOV
    ),
    "DFlash, DeepSpec": Released(
        SHIFTED, lambda: deepspec(SHIFTED, {"markov_rank": 0, "enable_confidence_head": False}), {}, copies=True
    ),
    "DFlash 2, z-lab": Released(DFLASH2, lambda: zlab2(DFLASH2), OF_SELECTOR),
    "DFlash 2, speculators": Released(
        DFLASH2,
        lambda: windowed(speculators(DFLASH2, "dflash2", SELECTOR_KEYS | {"architectures": ["DFlash2DraftModel"]})),
        OF_SELECTOR,
    ),
    "DSpine, SpecForge": Released(DSPINE, lambda: dspine(DSPINE), OF_INJECTION, with_codes),
    "pair": Released(PAIRED, lambda: with_keys(PAIRED, PAIR_KEYS, {}), OF_PAIR),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target_dir(tmp_path_factory.mktemp("target") / "t", DECODER)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", RELEASED)
def test_is_read_as_published_and_written_as_our_own(tmp_path: Path, target: Path, name: str) -> None:
    one = RELEASED[name]
    plain = drafter_of(None).state_dict()
    assert {n: tuple(t.shape) for n, t in one.drafter.state_dict().items() if n not in plain} == one.shapes
    source = one.write(tmp_path / "a")
    found = read_drafter(source, read_target_parts(target))
    assert found.config == one.drafter.config
    for tensor_name, tensor in one.drafter.state_dict().items():
        assert torch.equal(found.tensors[tensor_name], tensor)
    assert any("equal to the target's, dropped" in note for note in found.notes) == one.copies

    DFLASH.write(tmp_path / "ours", one.drafter.config, one.drafter.state_dict())
    convert(source, "z-lab", tmp_path / "b", target=target)
    assert tree_bytes(tmp_path / "b") == tree_bytes(tmp_path / "ours")
    if name in ("pair", "DSpine, SpecForge"):  # the first is d2sd's own
        with pytest.raises(CheckpointError, match=rf"does not support a drafter with a {name.split(',')[0]} head"):
            convert(tmp_path / "b", "speculators", tmp_path / "c", target=target)
    else:
        convert(tmp_path / "b", "speculators", tmp_path / "c", target=target)
        convert(tmp_path / "c", "z-lab", tmp_path / "d", target=target)
        assert tree_bytes(tmp_path / "d") == tree_bytes(tmp_path / "ours")

    config = DFLASH.read_config(tmp_path / "b")  # as a recipe does
    DFLASH.check_tensors(tmp_path / "b", config)
    loaded = DFLASH.load(tmp_path / "b", torch.float32)
    assert DFLASH.fingerprint(loaded) == DFLASH.fingerprint(one.drafter)


def test_a_recipe_reads_other_writers_of_the_layout_too(tmp_path: Path) -> None:
    for name in ("DSpark, SpecForge", "DSpark, ModelOpt", "DFlash 2, z-lab", "DSpine, SpecForge"):
        folder = RELEASED[name].write(tmp_path / name)
        assert DFLASH.read_config(folder) == RELEASED[name].drafter.config
        assert DFLASH.fingerprint(DFLASH.load(folder, torch.float32)) == DFLASH.fingerprint(RELEASED[name].drafter)
    for name in ("DSpark, DeepSpec", "DSpark, speculators"):
        with pytest.raises(CheckpointError, match=rf"this is a {name[8:]} checkpoint(.|\n)*d2sd convert --to z-lab"):
            DFLASH.read_config(RELEASED[name].write(tmp_path / name))


def test_what_is_written_says_what_it_is(tmp_path: Path) -> None:
    """The names by which other engines find the head, and which rows propose."""
    for drafter, architecture, projector in (
        (DSPARK, "DSparkDraftModel", "dspark"),
        (DFLASH2, "DFlash2DraftModel", None),
        (DSPINE, "DSpineDraftModel", None),
        (PAIRED, "DFlashDraftModel", "d2sd_pair"),
    ):
        folder = tmp_path / architecture
        DFLASH.write(folder, drafter.config, drafter.state_dict())
        values = json.loads((folder / "config.json").read_text())
        assert values["architectures"] == [architecture]
        assert values["dflash_config"].get("projector_type") == projector
        assert values["dflash_config"]["sample_from_anchor"] is drafter.config.sample_from_anchor


def test_a_reduced_vocabulary_has_rows_of_the_tokens_that_are_drafted(tmp_path: Path, target: Path) -> None:
    """In speculators W2 has a row for each draft token, W1 for each of the target's: ours have all, of which others are
    zero.
    """
    config = replace(DSPARK.config, draft_vocabulary=IDS)
    drafter = Drafter(config)
    drafter.load_state_dict(DSPARK.state_dict())
    tensors = drafter.state_dict() | extra(DECODER, drafter)
    tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][torch.tensor(IDS)]
    fields = speculators(drafter, "dspark", markov_keys(VANILLA) | {"sample_from_anchor": True})
    source = write_foreign(tmp_path / "a", fields, tensors)
    found = read_drafter(source, read_target_parts(target))
    assert found.config == config
    w1, w2 = (found.tensors[f"markov_head.markov_w{n}.weight"] for n in (1, 2))
    assert torch.equal(w1, DSPARK.state_dict()["markov_head.markov_w1.weight"])
    for token in range(64):
        row = DSPARK.state_dict()["markov_head.markov_w2.weight"][token]
        assert torch.equal(w2[token], row if token in IDS else torch.zeros(8))
    convert(source, "z-lab", tmp_path / "b", target=target)
    convert(tmp_path / "b", "speculators", tmp_path / "c", target=target)
    convert(tmp_path / "c", "z-lab", tmp_path / "d", target=target)
    assert tree_bytes(tmp_path / "b") == tree_bytes(tmp_path / "d")
    assert DFLASH.read_config(tmp_path / "b").draft_vocabulary == IDS


def test_a_pair_head_as_dflash_2_drafts_the_same(tmp_path: Path, target: Path) -> None:
    """For engines that run selectors: the same hidden states, and the same scores of every pair."""
    DFLASH.write(tmp_path / "a", PAIRED.config, PAIRED.state_dict())
    convert(tmp_path / "a", "dflash2", tmp_path / "b", target=target)
    other = DFLASH.load(tmp_path / "b", torch.float32)
    assert other.config == replace(PAIRED.config, head=SelectorConfig(8, 12, 2, 16))
    values = json.loads((tmp_path / "b" / "config.json").read_text())
    assert values["architectures"] == ["DFlash2DraftModel"]
    own = DFLASH.load(tmp_path / "a", torch.float32)
    for drafter in (own, other):
        drafter.join(DECODER)
    features = torch.randn(1, 9, 3 * 32, generator=torch.Generator().manual_seed(1))
    positions = 6 + torch.arange(8).view(1, 2, 4)
    embedded = DECODER.embed_tokens(torch.randint(64, (1, 8), generator=torch.Generator().manual_seed(2)))
    hidden = [one(embedded, positions.flatten(1), attend_packed(one, features, positions), 4) for one in (own, other)]
    torch.testing.assert_close(*hidden)
    parents, candidates = torch.arange(64).expand(1, 8, -1), torch.arange(64).expand(1, 8, -1)
    added = [one.head.added(hidden[0], parents, candidates) for one in (own, other) if one.head is not None]
    torch.testing.assert_close(*added)
    assert convert(tmp_path / "b", "dflash2", tmp_path / "c")[0] == "DFlash"
    assert tree_bytes(tmp_path / "b") == tree_bytes(tmp_path / "c")

    with pytest.raises(CheckpointError, match="projects the target's embedding"):
        convert(tmp_path / "a", "dflash2", tmp_path / "d")
    DFLASH.write(tmp_path / "plain", SHIFTED.config, SHIFTED.state_dict())
    with pytest.raises(CheckpointError, match=r"Only a drafter with a pair head(.|\n)*no head"):
        convert(tmp_path / "plain", "dflash2", tmp_path / "d", target=target)


#: A released checkpoint, and a change of its config -> pattern of the message.
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "a recurrent head": (
        "DSpark, SpecForge", {"dflash_config.markov_head_type": "rnn"}, r"markov_head_type\n(.|\n)*vanilla or gated",
    ),
    "no rank": (
        "DSpark, SpecForge", {"dflash_config.markov_rank": ...}, r"size of the DSpark head is missing(.|\n)*markov_rank"
    ),
    "another rank": ("DSpark, ModelOpt", {"dflash_config.markov_rank": 4}, r"wrong shape(.|\n)*confidence_proj"),
    "no size": ("DFlash 2, z-lab", {"dflash_config.selector_rank": ...}, r"2 head is missing(.|\n)*selector_rank"),
    "no taps": ("DFlash 2, z-lab", {"dflash_config.conv_kernel_size": ...}, r"missing(.|\n)*conv_kernel_size"),
    "other groups": ("DFlash 2, z-lab", {"dflash_config.conv_group_size": 12}, r"groups(.|\n)*group_size\n  found: 12"),
    "groups twice as large": ("DFlash 2, z-lab", {"dflash_config.conv_group_size": 32}, r"wrong shape(.|\n)*kernel_pr"),
    "two heads": ("DFlash 2, z-lab", {"markov_rank": 8}, r"two heads"),
    "two ranks": ("DSpark, SpecForge", {"markov_rank": 9}, r"markov_rank is given twice"),
    "another architecture": (
        "DSpark, SpecForge", {"architectures": ["DFlash2DraftModel"]}, r"size of the DFlash 2 head is missing",
    ),
    "another projector": ("DFlash 2, z-lab", {"dflash_config.projector_type": "dspark"}, r"DSpark head is missing"),
    "keys of no head": ("DFlash, DeepSpec", {"markov_head_type": "vanilla"}, r"a DSpark head(.|\n)*markov_head_type"),
    "a stray key": ("DSpark, SpecForge", {"selector_top_k": 16}, r"2 head(.|\n)*selector_top_k"),
    "two words for the rows": (
        "DSpark, ModelOpt", {"dflash_config.sample_from_anchor": False}, r"contradicts sample_from_anchor",
    ),
    "another kind of speculator": ("DSpark, speculators", {"speculators_model_type": "dflash2"}, r"no DSpark head"),
    "the embedding's output": ("DSpark, DeepSpec", {"target_layer_ids": [-1, 2, 4]}, r"target_layer_ids(.|\n)*0 to 5"),
    "no rank of a pair head": ("pair", {"dflash_config.pair_rank": ...}, r"size of the pair head is missing"),
    "no candidates": ("pair", {"dflash_config.pair_top_k": ...}, r"missing(.|\n)*pair_top_k"),
    "another rank of a pair head": ("pair", {"dflash_config.pair_rank": 4}, r"wrong shape(.|\n)*pair_head"),
    "another projector of a pair head": (
        "pair", {"dflash_config.projector_type": "dspark"}, r"size of the DSpark head is missing",
    ),
    "a pair head in a selector's layout": ("DFlash 2, z-lab", {"pair_top_k": 16}, r"a pair head(.|\n)*pair_top_k"),
    "a pair head of speculators": ("DSpark, speculators", {"markov_rank": ..., "pair_rank": 8}, r"pair head|DSpark"),
    "layers of DSpine that see what is behind": ("DSpine, SpecForge", {"is_causal": False}, r"is_causal\n(.|\n)*true"),
    "the same inside": ("DSpine, SpecForge", {"dflash_config.causal": False}, r"causal\n(.|\n)*true"),
    "DSpine without a size": (
        "DSpine, SpecForge", {"dspine_config.message_size": ...}, r"key is missing(.|\n)*dspine_config: message_size",
    ),
    "DSpine's size of another type": ("DSpine, SpecForge", {"dspine_config.top_k": 2.5}, r"wrong type(.|\n)*top_k"),
    "DSpine without its config": ("DSpine, SpecForge", {"dspine_config": ...}, r"DSpine head is missing(.|\n)*dspine_"),
    "a number as DSpine's config": ("DSpine, SpecForge", {"dspine_config": 8}, r"wrong type(.|\n)*dspine_config"),
    "an unknown key of DSpine": ("DSpine, SpecForge", {"dspine_config.depth": 2}, r"unknown(.|\n)*config: depth"),
    "DSpine's keys of another drafter": ("DFlash 2, z-lab", {"dspine_config": {"top_k": 3}}, r"two heads"),
    "scaled embeddings": ("DFlash 2, z-lab", {"dflash_config.input_embedding_scale": 2.0}, r"scaled embeddings"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_config_is_named(tmp_path: Path, target: Path, name: str) -> None:
    released, changes, message = WRONG[name]
    folder = RELEASED[released].write(tmp_path / "a")
    for key, value in changes.items():
        edit_json(folder / "config.json", key, value)
    with pytest.raises(CheckpointError, match=message):
        read_drafter(folder, read_target_parts(target))


def test_copies_that_differ_from_the_targets_are_refused(tmp_path: Path, target: Path) -> None:
    """DeepSpec's files have both: a head of its own would be lost."""
    folder = RELEASED["DSpark, DeepSpec"].write(tmp_path / "a")
    edit_tensors(folder / "model.safetensors", lm_head__weight=DECODER.head + 0.5)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        read_drafter(folder, read_target_parts(target))


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "multi-future drafter") for name in ("mode_embed", "mode_embed.weight", "mode_gate.weight")],
)
def test_a_drafter_is_called_by_its_name_where_only_tensors_tell(tmp_path: Path, name: str, kind: str) -> None:
    """Drafters with a config of plain DFlash."""
    drafter = drafter_of(None)
    folder = write_foreign(tmp_path / "a", public_fields(drafter), drafter.state_dict() | {name: torch.ones(8, 32)})
    for read in (lambda: read_drafter(folder), lambda: DFLASH.check_tensors(folder, DFLASH.read_config(folder))):
        with pytest.raises(CheckpointError, match=rf"{kind}(.|\n)*{name}(.|\n)*fix: choose a DFlash"):
            read()


def test_codes_may_be_wider_than_the_rest(tmp_path: Path, target: Path) -> None:
    """SpecForge trains in bf16, and keeps the fixed codes in fp32; other tensors have one type."""
    tensors = {name: tensor.bfloat16() for name, tensor in DSPINE.state_dict().items()}
    named = with_codes(tensors)
    named["transfer_codes"] = DSPINE.state_dict()["injection.transfer_codes"]
    folder = write_foreign(tmp_path / "a", dspine(DSPINE), named)
    found = read_drafter(folder, read_target_parts(target))
    assert found.dtype == torch.bfloat16
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in tensors.items())
    convert(folder, "z-lab", tmp_path / "b", target=target)
    one, other = (DFLASH.load(tmp_path / name, torch.bfloat16) for name in "ab")
    assert DFLASH.fingerprint(one) == DFLASH.fingerprint(other)
    named["injection.bias"] = named["injection.bias"].float()
    with pytest.raises(CheckpointError, match="different types"):
        read_drafter(write_foreign(tmp_path / "c", dspine(DSPINE), named), read_target_parts(target))
    del named["transfer_codes"]
    with pytest.raises(CheckpointError, match=r"missing (.|\n)*transfer_codes"):
        read_drafter(write_foreign(tmp_path / "d", dspine(DSPINE), named), read_target_parts(target))


@pytest.mark.parametrize("drafter", [DSPARK, GATED_DSPARK, DFLASH2, DSPINE])
def test_no_layer_of_a_head_is_fp8(tmp_path: Path, drafter: Drafter) -> None:
    """Nor a convolution; the patterns of a checkpoint in FP8 say so, and it is read again."""
    layers = DFLASH.fp8_layers(drafter.config)
    assert layers == DFLASH.fp8_layers(drafter_of(None).config)
    described = Quantization(DFLASH.unquantized, kv=False, producer=("modelopt", "0.47.0"))
    linears = [name for name, part in drafter.named_modules() if isinstance(part, torch.nn.Linear)]
    narrow = described.of(linears)
    assert set(narrow) < set(layers)
    assert narrow
    quantized = in_fp8(drafter, narrow)
    DFLASH.write(tmp_path / "a", drafter.config, quantized.state_dict(), described)
    config = DFLASH.read_config(tmp_path / "a")
    assert config == drafter.config
    assert DFLASH.check_tensors(tmp_path / "a", config) is not None
    assert DFLASH.fingerprint(DFLASH.load(tmp_path / "a", torch.float32)) == DFLASH.fingerprint(quantized)
