"""Files of d2sd's own next to a drafter's config.json, for what layouts have no keys for. Other readers ignore them.

`draft_vocab.json` has the target's token ids that the drafter may draft, ascending, each once:

    {"d2sd_draft_vocab": 1, "vocab_size": 49152, "ids": [0, 2, 17, …]}

It carries the same information as `draft_vocab_size`, `d2t` and `t2d` of a speculators checkpoint (d2t[i] = ids[i] - i,
t2d marks the ids) without changing a tensor: other readers still read the z-lab files, and draft with the full head.

`d2sd_fp8.json` has scales of the layers that only d2sd runs in FP8:

    {"d2sd_fp8": 1, "input_scales": {"fc": 0.02, "layers.0.self_attn.q_proj": 0.05, …}}

TensorRT-LLM and vLLM slice K and V out of a fused projection and apply that without scales, and Edge-LLM refuses an FP8
`fc`. So the checkpoint holds these layers in 16 bits and describes them as unquantized. d2sd rounds their weights when
it loads them, with the scale that ModelOpt would store, and their inputs by this file.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from d2sd.errors import CheckpointError
from d2sd.io import write_json
from d2sd.schema import Closed, read_model

DRAFT_VOCABULARY = "draft_vocab.json"


class _Vocabulary(Closed, strict=True):
    d2sd_draft_vocab: Literal[1]
    vocab_size: int
    ids: list[JsonValue]  # see `check_ids`


def read_draft_vocabulary(directory: Path, vocab_size: int, mask_token_id: int) -> tuple[int, ...] | None:
    """Return the ids, or None if the file does not exist; raises `CheckpointError` naming file and key.

    `vocab_size` and `mask_token_id` are those of the drafter's config.
    """
    path = directory / DRAFT_VOCABULARY
    if not path.exists():
        return None
    version = ("d2sd_draft_vocab", 1)
    vocabulary = read_model(_Vocabulary, path, error=CheckpointError, what="draft vocabulary", version=version)
    if vocabulary.vocab_size != vocab_size:
        raise CheckpointError(
            "The draft vocabulary was made for another target.",
            where=f"{path}: vocab_size",
            found=vocabulary.vocab_size,
            expected=vocab_size,
        )
    return check_ids(f"{path}: ids", vocabulary.ids, vocab_size, mask_token_id)


def write_draft_vocabulary(directory: Path, ids: tuple[int, ...] | None, vocab_size: int) -> None:
    """Write the file; without ids, delete one that an earlier drafter left."""
    path = directory / DRAFT_VOCABULARY
    if ids is None:
        path.unlink(missing_ok=True)
        return
    values = {"d2sd_draft_vocab": 1, "vocab_size": vocab_size, "ids": ids}
    path.write_text(json.dumps(values) + "\n", "utf-8")


def check_ids(where: str, ids: object, vocab_size: int, mask_token_id: int) -> tuple[int, ...]:
    """Return the ids of a draft vocabulary as a tuple; raises `CheckpointError` naming the index after `where`."""
    if not isinstance(ids, list) or len(ids) < 2:
        # The second draft may not repeat the token rejected at its boundary, so it needs another one.
        raise CheckpointError(
            "The draft vocabulary is too small.",
            where=where,
            found=json.dumps(ids)[:80],
            expected="a list of at least two ids",
        )
    before = -1
    for index, token in enumerate(ids):
        expected = None
        if type(token) is not int:
            expected = "an integer"
        elif not 0 <= token < vocab_size:
            expected = f"0 to {vocab_size - 1}"
        elif token <= before:
            expected = f"above {before}, the previous id"
        elif token == mask_token_id:
            expected = "any token but the mask, which is never part of an answer"
        if expected:
            raise CheckpointError(
                "An id cannot be in the draft vocabulary.",
                where=f"{where}[{index}]",
                found=json.dumps(token)[:80],
                expected=expected,
            )
        before = token
    return tuple(ids)


FP8_INPUTS = "d2sd_fp8.json"
#: A positive number that fp32 holds with all its digits.
Scale = Annotated[float, Field(ge=2.0**-126, lt=2.0**128)]


class _File(Closed, strict=True):
    d2sd_fp8: Literal[1]
    input_scales: dict[str, Scale]


def read_fp8_inputs(directory: Path, layers: Collection[str]) -> dict[str, float]:
    """Return the input scale of each of `layers`, the linear layers stored in 16 bits; none if there is no file.

    Raises `CheckpointError` naming file and key.
    """
    path = directory / FP8_INPUTS
    if not path.exists():
        return {}
    version = ("d2sd_fp8", 1)
    scales = read_model(_File, path, error=CheckpointError, what="file of FP8 scales", version=version).input_scales
    if scales.keys() != set(layers):
        raise CheckpointError(
            "The scales are not those of the layers in 16 bits.",
            where=f"{path}: input_scales",
            found=sorted(scales.keys() ^ set(layers)),
        )
    return {name: scales[name] for name in layers}


def write_fp8_inputs(directory: Path, scales: Mapping[str, float]) -> None:
    """Write the file; without scales, delete one that an earlier drafter left."""
    if scales:
        write_json(directory / FP8_INPUTS, {"d2sd_fp8": 1, "input_scales": dict(scales)})
    else:
        (directory / FP8_INPUTS).unlink(missing_ok=True)
