"""The layout of an EAGLE-3 head: a `config.json` of one Llama layer with a `draft_vocab_size`, and tensors.

    eagle_config.eagle_aux_hidden_state_layer_ids    target layers whose outputs it reads, id i the output of layer i
    eagle_config.ttt_steps                           tokens that it drafts at most; d2sd's key, by default 7 as trained

    midlayer.* or layers.0.* · fc [E, n·E] · norm · lm_head [Vd, E] · d2t [Vd], the ids less 0 .. Vd - 1 · t2d [V]

SpecForge, the EAGLE authors and NVIDIA (ModelOpt, TensorRT-LLM) write it, with differences in names alone. The authors'
code reads layers 1, L/2 - 1 and L - 4 of a target of L, and writes no ids; so did SpecForge first. A copy of the
target's embedding, which no trainer changes, is left out. Positions are the head's own: trainers gave it other RoPE
than the target's. Written: SpecForge's names.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from d2sd.convert.checkpoint.families import parse_target_config
from d2sd.convert.checkpoint.headers import has_weights, open_tensors, read_headers
from d2sd.convert.checkpoint.hf_config import MAX_SIZE, HFConfig, rope_fields
from d2sd.convert.checkpoint.layout import INERT, READ, fault, geometry_fields, misfit
from d2sd.convert.checkpoint.own_files import check_ids
from d2sd.convert.checkpoint.quantization import KEY as QUANTIZATION
from d2sd.convert.drafter_kind import Code, DrafterKind
from d2sd.convert.kinds.dflash import refuse_unknown
from d2sd.errors import CheckpointError
from d2sd.modeling.config import DecoderConfig, Role
from d2sd.modeling.drafters.eagle3_config import Eagle3Config, eagle_parts
from d2sd.modeling.shapes import linear_parts
from d2sd.policies import DrafterRole

if TYPE_CHECKING:
    from d2sd.modeling.drafters.eagle3 import Eagle3

KEY, IDS, STEPS, SIZE = "eagle_config", "eagle_aux_hidden_state_layer_ids", "ttt_steps", "draft_vocab_size"
_PLAIN, *_OTHERS = "LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "EAGLE3LlamaForCausalLM"
_MARKED = [[name] for name in _OTHERS]
_OFF = ("qkv_bias", "bias", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "use_mtp_layernorm")
_ON = ("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm", "has_lm_head")
#: Keys with the values that they may have.
_VALUES: dict[str, tuple[object, ...]] = {
    **dict.fromkeys((*_OFF, "eh_proj_before_attn", "return_hidden_post_norm"), (None, False)),
    **dict.fromkeys(_ON, (None, True)),
    **{"pretraining_tp": (None, 1), "parallel_draft_step": (None, 0, 1), "num_hidden_layers": (1,)},
}
#: Keys of `eagle_config`, and of the whole config: what would be read at one level alone is not ignored at the other.
_INSIDE = _VALUES.keys() | {IDS, STEPS, "next_layer_regular", "parallel_draft_heads_num_layers"}
_TOP = READ | INERT | _VALUES.keys() | {"architectures", SIZE, "target_hidden_size", KEY, QUANTIZATION}
_TOP |= {"mlp_bias", "sliding_window", "use_sliding_window", "next_layer_regular", "parallel_draft_heads_num_layers"}
#: Beginnings of our names of tensors, and theirs.
_NAMES = {"layers.0.": "midlayer.", "draft_head.": "lm_head."}


def is_marked(config: HFConfig) -> bool:
    """Whether a config is of an EAGLE-3 head; the authors' is a Llama's with a draft vocabulary."""
    names, values = config.values.get("architectures"), config.values
    return names in _MARKED or values.get(KEY) is not None or (names == [_PLAIN] and values.get(SIZE) is not None)


def read_eagle_config(directory: Path, _declared: Role | None = None) -> Eagle3Config:
    """Read config.json and the ids of d2t; raises `CheckpointError` naming file and key. A head has no role."""
    config = HFConfig.read(directory)
    part = config.part(KEY) if config.values.get(KEY) is not None else HFConfig({}, f"{config.where}: {KEY}")
    for one, known in ((config, _TOP), (part, _INSIDE)):
        refuse_unknown(one, known)
        for key, values in _VALUES.items():
            one.only(key, *values)
    config.only("architectures", *_MARKED, [_PLAIN], None)
    config.only("target_hidden_size", None, config.values.get("hidden_size"))
    config.only("model_type", "llama")
    left = {key: value for key, value in config.values.items() if key not in ("architectures", QUANTIZATION)}
    target = parse_target_config(HFConfig(left, config.where))
    if part.values.get(IDS) is None:
        raise CheckpointError(
            "The config does not list the target layers that the head reads.",
            where=f"{config.where}: {KEY}.{IDS}",
            expected="a list of layer ids",
            fix=f'write "{KEY}": {{"{IDS}": [1, L/2 - 1, L - 4]}} into it, for a target of L layers, as EAGLE reads',
        )
    ids, size = part.integers(IDS), target.vocab_size
    if (expected := fault(ids, MAX_SIZE)) or list(ids) != sorted(ids):
        raise part.refuse("The target layer ids are wrong.", IDS, expected or "ids in ascending order")
    vocabulary, drafts = _drafted_ids(directory, config.size(SIZE, size, size), size), part.size(STEPS, 7, MAX_SIZE)
    return Eagle3Config(target.body, size, 1 + drafts, ids, vocabulary)


def _drafted_ids(directory: Path, rows: int, vocab_size: int) -> tuple[int, ...] | None:
    """The target's ids of the rows of the head, by d2t; None: all."""
    if rows == vocab_size:
        return None
    if not has_weights(directory):  # a plan needs their number
        return check_ids(f"{directory / 'config.json'}: {SIZE}", list(range(rows)), vocab_size, -1)
    info = read_headers(directory).get("d2t")
    if info is None or info.shape != (rows,) or info.dtype not in ("I64", "I32"):
        there = None if info is None else f"{info.dtype} {list(info.shape)}"
        expected = f"integers [{rows}]"
        raise CheckpointError(
            "The head's ids are not known.", where=f"{directory}: d2t", found=there, expected=expected
        )
    with open_tensors(info.file, "np") as handle:
        ids = (handle.get_tensor("d2t") + range(rows)).tolist()
    return check_ids(f"{directory}: d2t", ids, vocab_size, -1)


def check_eagle(config: Eagle3Config, target: DecoderConfig, role: DrafterRole, _block_size: int, where: Path) -> None:
    """Refuse a head in another place than the first, that was made for another target, or whose rows are cut."""
    if role is not DrafterRole.FIRST:
        what, fix = "An EAGLE-3 head cannot be a second drafter.", "name it as drafters.first, and no second one"
        raise CheckpointError(what, where=where / "config.json", fix=fix)
    for key, found, expected in (
        ("hidden_size", config.layer.hidden_size, target.body.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        (IDS, fault(config.target_layer_ids, target.body.num_layers), None),
    ):
        if found != expected:
            fix = "use a head that was trained for this target"
            raise misfit("The drafter was made for another target.", where, key, found, expected, fix)
    rows, ids = HFConfig.read(where).size(SIZE, config.vocab_size), config.draft_vocabulary
    if ids is not None and len(ids) != rows:
        what, fix = "A head is trained for its draft vocabulary.", "remove drafters.vocabulary"
        raise misfit(what, where, SIZE, rows, len(ids), fix)


def our_name(name: str) -> str | None:
    """Our module's name of a tensor; None for those that it does not have."""
    if name in ("d2t", "t2d", "embed_tokens.weight"):
        return None
    theirs = next((theirs for theirs in _NAMES.items() if name.startswith(theirs[1])), ("", ""))
    return theirs[0] + name.removeprefix(theirs[1])


def file_name(name: str) -> str:
    """SpecForge's name of a tensor of our module."""
    ours = next((ours for ours in _NAMES.items() if name.startswith(ours[0])), ("", ""))
    return ours[1] + name.removeprefix(ours[0])


def config_fields(config: Eagle3Config) -> dict[str, object]:
    """Every field of `config.json` but the tensors' type and the quantization."""
    return {
        **geometry_fields(config.layer),
        **rope_fields(config.layer.rope),
        "architectures": [_OTHERS[0]],
        SIZE: len(config.draft_vocabulary or range(config.vocab_size)),
        KEY: {IDS: list(config.target_layer_ids), STEPS: config.drafts, "use_aux_hidden_state": True},
        "model_type": "llama",
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
    }


class Eagle3Kind(DrafterKind[Eagle3Config, "Eagle3"]):
    """The kind whose checkpoints hold the ids of the head's rows."""

    def write(self, directory: Path, config: Eagle3Config, *rest: Any, **more: Any) -> None:
        import torch
        from safetensors.torch import load_file

        from d2sd.convert.checkpoint.weights import write_tensors

        DrafterKind.write(self, directory, config, *rest, **more)
        ids, file = torch.tensor(config.draft_vocabulary or range(config.vocab_size)), directory / "model.safetensors"
        marks = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        write_tensors(file, load_file(file) | {"d2t": ids - torch.arange(len(ids)), "t2d": marks})


def _code() -> Code[Eagle3]:
    from d2sd.modeling.drafters.eagle3 import Eagle3

    return Code(Eagle3, _no_graph, lambda _head, _target: None)


def _no_graph(head: Eagle3) -> NoReturn:
    raise AssertionError(head.config.graph_refusal)


KIND: DrafterKind[Eagle3Config, Eagle3] = Eagle3Kind(
    code=_code,
    parts=eagle_parts,
    is_marked=is_marked,
    read_config=read_eagle_config,
    check=check_eagle,
    config_fields=config_fields,
    unquantized=("lm_head",),
    mark=lambda config: f"draft_vocabulary {config.draft_vocabulary} {config.layer.rope}",
    geometry=lambda config: {"num_layers": 1, "target_layer_ids": list(config.target_layer_ids)},
    fp8_layers=lambda config: [name for name in linear_parts(eagle_parts(config)) if name != "draft_head"],
    our_name=our_name,
    file_name=file_name,
)
