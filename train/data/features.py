"""The frozen target's hidden states on every training sequence: cached in one memory-mapped file, kept in the memory of
the device, or computed online.

A token takes (n + 1)·E bf16 numbers: the n auxiliary layers' outputs and the final normed hidden state, from which the
target's next-token distribution is recomputed where it is needed. With the cache, later epochs run no target forward.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from d2sd.errors import D2SDError
from d2sd.io import write_json
from d2sd.modeling.config import BodyConfig
from d2sd.modeling.decoder import Decoder, DecoderOutput
from d2sd.modeling.kv_pool import KVPool, Rows
from d2sd.modeling.layers import Attend
from d2sd.modeling.where import Where
from d2sd.schema import read_model
from d2sd.train.data.responses import Response
from d2sd.train.products import multiplies_bf16

# Shape letters: N tokens of all sequences, S tokens of one, E hidden, n auxiliary layers.


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One training sequence with the target's hidden states."""

    tokens: Tensor  # [S] int64, prompt and response
    prompt_length: int
    features: Tensor  # [S, n·E]
    hidden: Tensor  # [S, E], normed; row t gives the target's distribution of token t + 1


#: features(index) -> hidden states of that response, [S, (n+1)·E]: the auxiliary layers', then the final ones.
Features = Callable[[int], Tensor]


class TrainingData:
    """Random access to `TrainingSequence`s or a part of them, with cached or online features."""

    def __init__(
        self, responses: Sequence[Response], aux_layer_ids: int, features: Features, chosen: range | None = None
    ) -> None:
        self._responses, self._aux_layer_ids, self._features = responses, aux_layer_ids, features
        self._chosen = range(len(responses)) if chosen is None else chosen
        self._tokens: dict[int, Tensor] = {}  # of the responses that were read

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> TrainingSequence:
        number = self._chosen[index]  # raises IndexError past the end, so iteration works
        response = self._responses[number]
        rows = self._features(number)
        width = rows.shape[1] * self._aux_layer_ids // (self._aux_layer_ids + 1)
        tokens = self._tokens.get(number)
        if tokens is None:
            tokens = self._tokens[number] = torch.tensor(response.prompt_ids + response.response_ids)
        return TrainingSequence(tokens, len(response.prompt_ids), rows[:, :width], rows[:, width:])

    def length(self, index: int) -> int:
        """Tokens of a sequence, whose features are not read."""
        response = self._responses[self._chosen[index]]
        return len(response.prompt_ids) + len(response.response_ids)

    def name(self, index: int) -> str:
        """Id of the response, for messages."""
        return self._responses[self._chosen[index]].id

    @property
    def digest(self) -> str:
        """SHA-256 of the tokens."""
        return _digest(self._responses[i] for i in self._chosen)

    def frequent(self, count: int, vocab_size: int) -> Tensor:
        """[V] bool: the `count` most frequent token ids of the responses; ties go to the lowest id."""
        ids = (i for number in self._chosen for i in self._responses[number].response_ids)
        times = torch.bincount(torch.tensor(list(ids)), minlength=vocab_size)
        chosen = torch.zeros(vocab_size, dtype=torch.bool)
        chosen[times.argsort(descending=True, stable=True)[:count]] = True
        return chosen

    def split(self, count: int, where: str = "data.held_out") -> tuple[TrainingData, TrainingData]:
        """The first `count` sequences, as the recipe's key `where` says, and the others. Raises D2SDError if there are
        no others.
        """
        if count >= len(self):
            raise D2SDError(
                "too few responses to train on",
                where=where,
                found=f"{len(self)} responses",
                expected=f"more than {count}",
            )
        parts = (self._chosen[:count], self._chosen[count:])
        first, rest = (TrainingData(self._responses, self._aux_layer_ids, self._features, part) for part in parts)
        return first, rest


@torch.no_grad()
def online_features(target: Decoder, aux_layer_ids: tuple[int, ...], responses: Sequence[Response]) -> TrainingData:
    """Run the target each time a sequence is read: stores nothing, for large targets and large data sets."""
    compute = _forward(target, aux_layer_ids)
    return TrainingData(responses, len(aux_layer_ids), lambda index: compute(responses[index]))


@torch.no_grad()
def cache_features(
    target: Decoder,
    aux_layer_ids: tuple[int, ...],
    responses: Sequence[Response],
    path: Path,
    progress: Callable[[int], None],
) -> TrainingData:
    """Fill `path` (bf16, [N, (n+1)·E]) with one pass over every sequence; resumes after the sequences already done.

    `progress` is called with the number of newly finished sequences. The target runs in its own dtype.
    """
    lengths = [len(r.prompt_ids) + len(r.response_ids) for r in responses]
    weight = target.embed_tokens.weight
    width = target.config.body.hidden_size * (len(aux_layer_ids) + 1)
    identity = {
        "sequences": len(responses),
        "tokens": sum(lengths),
        "aux_layer_ids": list(aux_layer_ids),
        "data": _digest(responses),
        "precision": str(weight.dtype),
    }
    progress_file = path.with_suffix(".json")
    done = _done(progress_file, identity) if path.is_file() else 0
    if not done:
        progress_file.unlink(missing_ok=True)  # it describes data that is overwritten below
    size = sum(lengths) * width
    with path.open("ab") as file:
        os.posix_fallocate(file.fileno(), 0, 2 * size)  # a full disk is an error here, and would be SIGBUS later
    storage = torch.from_file(str(path), shared=True, size=size, dtype=torch.bfloat16).view(-1, width)
    progress(done)
    offsets = list(accumulate(lengths, initial=0))
    compute = _forward(target, aux_layer_ids)
    for count, response in enumerate(responses[done:], done + 1):
        storage[offsets[count - 1] : offsets[count]] = compute(response).to(torch.bfloat16).cpu()
        progress(1)
        if count % 50 == 0 or count == len(responses):
            write_json(progress_file, identity | {"done": count})
    return TrainingData(responses, len(aux_layer_ids), lambda index: storage[offsets[index] : offsets[index + 1]])


#: Tokens of one pass of `device_features`, padding included.
_TOGETHER = 1 << 15


@torch.no_grad()
def device_features(
    target: Decoder, aux_layer_ids: tuple[int, ...], responses: Sequence[Response], progress: Callable[[int], None]
) -> TrainingData:
    """Keep the features of all responses in the memory of the target's device, in its dtype: sequences of about a
    length take one pass, and no step copies any. An interrupted training computes them anew.

    `progress` is called with the number of newly finished sequences. Raises D2SDError if the device has no room.
    """
    texts = [r.prompt_ids + r.response_ids for r in responses]
    offsets = list(accumulate(map(len, texts), initial=0))
    weight, body = target.embed_tokens.weight, target.config.body
    shape = offsets[-1], body.hidden_size * (len(aux_layer_ids) + 1)
    try:
        storage = torch.empty(shape, dtype=weight.dtype, device=weight.device)
    except torch.OutOfMemoryError:
        raise D2SDError(
            "the features do not fit in the memory of the device",
            where="data.features: device",
            found=f"{shape[0]:,} tokens, {shape[0] * shape[1] * weight.element_size() / 1e9:,.1f} GB",
            fix="set data.features to online, or to cached if the disk has room",
        ) from None
    alone = _alone(body)
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]), reverse=True)
    while order:
        count = 1 if alone else max(1, _TOGETHER // len(texts[order[0]]))
        part, order = order[:count], order[count:]
        padded = pad_sequence([torch.tensor(texts[index]) for index in part], batch_first=True).to(weight.device)
        out = target.full_pass(padded, aux_layer_ids) if alone else _causal_pass(target, padded, aux_layer_ids)
        for row, index in enumerate(part):  # what pads a text comes behind it
            size = len(texts[index])
            torch.cat(
                [out.features[row, :size], out.hidden[row, :size]], -1, out=storage[offsets[index] : offsets[index + 1]]
            )
        progress(len(part))
    return TrainingData(responses, len(aux_layer_ids), lambda index: storage[offsets[index] : offsets[index + 1]])


class _NoPages:
    """In place of a pool, for rows without a context, each behind the one before: attention by PyTorch's kernels."""

    states = None

    def attend(self, _rows: Rows, *, exact: bool = False) -> Attend:
        def attend(index: int, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None) -> Tensor:
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

        return attend


def _causal_pass(target: Decoder, tokens: Tensor, aux_layer_ids: tuple[int, ...]) -> DecoderOutput:
    """`full_pass` of tokens [B, T] for layers that see everything before, many texts at a time."""
    nothing = torch.zeros(len(tokens), dtype=torch.long, device=tokens.device)
    rows = Rows.chain(tokens.shape[1], Where(nothing[:, None][:, :0], nothing))
    out: DecoderOutput = target(tokens, rows, cast("KVPool", _NoPages()), aux_layer_ids)
    return out


def _alone(body: BodyConfig) -> bool:
    """Whether a layer needs the pages of `full_pass`: it does not see everything before a token, and that alone."""
    return body.recurrent is not None or body.sinks or any(body.windows)


def _forward(target: Decoder, aux_layer_ids: tuple[int, ...]) -> Callable[[Response], Tensor]:
    """response -> [S, (n+1)·E], on the target's device and in its dtype: in fp32 on a CPU without products of bf16."""
    device, alone = target.embed_tokens.weight.device, _alone(target.config.body)
    if target.embed_tokens.weight.dtype == torch.bfloat16 and not multiplies_bf16(device):
        target = deepcopy(target).float()

    @torch.no_grad()
    def compute(response: Response) -> Tensor:
        tokens = torch.tensor([response.prompt_ids + response.response_ids], device=device)
        out = target.full_pass(tokens, aux_layer_ids) if alone else _causal_pass(target, tokens, aux_layer_ids)
        return torch.cat([out.features, out.hidden], -1)[0]

    return compute


def _digest(responses: Iterable[Response]) -> str:
    return hashlib.sha256(json.dumps([(r.prompt_ids, r.response_ids) for r in responses]).encode()).hexdigest()


class CacheProgress(BaseModel):
    """`features.json`: the number of cached sequences, and the identity of their data (all other keys)."""

    model_config = ConfigDict(extra="allow")

    done: NonNegativeInt


def read_progress(path: Path) -> CacheProgress | None:
    """None if nothing is cached yet. Raises D2SDError for a damaged file."""
    if not path.is_file():
        return None
    return read_model(
        CacheProgress,
        path,
        error=D2SDError,
        what="progress file of the feature cache",
        fix="delete it; the features are then recomputed",
    )


def _done(progress_file: Path, identity: dict[str, Any]) -> int:
    """Sequences finished by an earlier run over the same data; 0 if the data differ."""
    saved = read_progress(progress_file)
    if saved is None or saved.done > identity["sequences"] or not (saved.model_extra or {}).items() <= identity.items():
        return 0
    return saved.done
