"""Parts that a drafter shares with its target: the embedding, the head, and the number of layers.

z-lab's files omit the tensors; a speculators checkpoint may contain copies, which are dropped. If the target is given,
they are first compared with its tensors, row by row of the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from d2sd.convert.checkpoint.families import parse_target_config
from d2sd.convert.checkpoint.headers import read_headers
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.checkpoint.weights import read_tensor
from d2sd.errors import CheckpointError
from d2sd.manifest import NAME as MANIFEST
from d2sd.modeling.config import DecoderConfig

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class TargetParts:
    """The parts of a target that converters need."""

    folder: Path
    architectures: list[str]
    config: DecoderConfig
    embedding: Tensor  # [V, E]
    head: Tensor  # [V, E]; the embedding where they are tied


def read_target_parts(path: Path) -> TargetParts:
    """Read them from a Hugging Face folder or a bundle; raises `CheckpointError`."""
    folder = path / "target" if (path / MANIFEST).is_file() else path
    raw = HFConfig.read(folder)
    config = parse_target_config(raw)
    headers = read_headers(folder)
    required = {"model.embed_tokens.weight"} | (set() if config.tie_word_embeddings else {HEAD})
    for name in sorted(required):
        shape = (config.vocab_size, config.body.hidden_size)
        if name not in headers or headers[name].shape != shape:
            raise CheckpointError(
                "The target lacks a tensor that drafters share.",
                where=f"{folder}: {name}",
                found=list(headers[name].shape) if name in headers else "no such tensor",
                expected=list(shape),
            )
    embedding = read_tensor(headers["model.embed_tokens.weight"].file, "model.embed_tokens.weight")
    head = embedding if config.tie_word_embeddings else read_tensor(headers[HEAD].file, HEAD)
    architectures = raw.get("architectures", list, [])
    return TargetParts(folder, architectures, config, embedding, head)


def shared_copies(target: TargetParts, ids: tuple[int, ...] | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """Copies for a drafter of `dtype`: the embedding [V, E] and the head's rows of the draft vocabulary [Vd, E]."""
    head = target.head if ids is None else target.head[torch.tensor(ids)]
    if head is target.embedding:
        head = head.clone()  # safetensors does not save tensors that share memory
    return {EMBEDDING: target.embedding.to(dtype), HEAD: head.to(dtype)}


def check_copies(
    copies: Mapping[str, Tensor], target: TargetParts, ids: tuple[int, ...] | None, dtype: torch.dtype, where: str
) -> None:
    """Raise `CheckpointError` for copies that differ: dropping them would lose a head of the drafter's own."""
    for name, expected in shared_copies(target, ids, dtype).items():
        if name in copies and not torch.equal(copies[name], expected):
            row = int((copies[name] != expected).any(dim=1).nonzero()[0])
            raise CheckpointError(
                "A tensor that drafters share with their target differs from the target's.",
                where=f"{where}: {name}",
                found=f"row {row} differs from {target.folder}",
                expected="a copy of the target's tensor",
                fix="name the target it was trained for; a head or an embedding of the drafter's own cannot be run",
            )
