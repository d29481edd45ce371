"""What the frozen target says about every training sequence, computed once and kept in one memory-mapped file.

A token takes (n + 1)·E bf16 numbers: the n tapped layers' outputs and the final normed hidden state, from which the
target's next-token distribution is recomputed where it is needed. Later epochs cost no target forward pass.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from d2sd.errors import D2SDError
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.rows import KVPool, Rows
from d2sd.train.answers import Answer

# Shape letters: N tokens of all sequences, S tokens of one, E hidden, n tapped layers.


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One training sequence with the target's view of it."""

    tokens: Tensor  # [S] int64, prompt and answer
    prompt_length: int
    features: Tensor  # [S, n·E] bf16
    hidden: Tensor  # [S, E] bf16, normed; row t gives the target's distribution of token t + 1


class FeatureCache:
    """Random access to `TrainingSequence`s, or to a part of them."""

    def __init__(self, answers: Sequence[Answer], storage: Tensor, taps: int, chosen: range | None = None) -> None:
        self._answers, self._storage, self._taps = answers, storage, taps
        self._chosen = range(len(answers)) if chosen is None else chosen
        lengths = (len(a.prompt_ids) + len(a.answer_ids) for a in answers)
        self._offsets = list(accumulate(lengths, initial=0))

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> TrainingSequence:
        number = self._chosen[index]  # raises IndexError past the end, so iteration works
        answer = self._answers[number]
        rows = self._storage[self._offsets[number] : self._offsets[number + 1]]
        width = rows.shape[1] * self._taps // (self._taps + 1)
        tokens = torch.tensor(answer.prompt_ids + answer.answer_ids)
        return TrainingSequence(tokens, len(answer.prompt_ids), rows[:, :width], rows[:, width:])

    def split(self, count: int) -> tuple[FeatureCache, FeatureCache]:
        """The first `count` sequences, and the others. Raises D2SDError if that leaves none."""
        if count >= len(self):
            raise D2SDError(
                "too few answers to train on",
                where="data.held_out",
                found=f"{len(self)} answers",
                expected=f"more than {count}",
            )
        parts = (self._chosen[:count], self._chosen[count:])
        first, rest = (FeatureCache(self._answers, self._storage, self._taps, part) for part in parts)
        return first, rest


@torch.no_grad()
def cache_features(
    target: Decoder, taps: tuple[int, ...], answers: Sequence[Answer], path: Path, progress: Callable[[int], None]
) -> FeatureCache:
    """Fill `path` (bf16, [N, (n+1)·E]) with one pass over every sequence; resumes after the sequences already done.

    `progress` is called with the number of newly finished sequences. The target runs in its own dtype.
    """
    lengths = [len(a.prompt_ids) + len(a.answer_ids) for a in answers]
    weight = target.embed_tokens.weight
    width = target.config.body.hidden_size * (len(taps) + 1)
    text = json.dumps([(a.prompt_ids, a.answer_ids) for a in answers])
    identity = {
        "sequences": len(answers), "tokens": sum(lengths), "taps": list(taps),
        "data": hashlib.sha256(text.encode()).hexdigest(), "precision": str(weight.dtype),
    }  # fmt: skip
    journal = path.with_suffix(".json")
    done = _done(journal, identity) if path.is_file() else 0
    size = sum(lengths) * width
    with path.open("ab") as file:
        os.posix_fallocate(file.fileno(), 0, 2 * size)  # a full disk is an error here, and would be SIGBUS later
    storage = torch.from_file(str(path), shared=True, size=size, dtype=torch.bfloat16).view(-1, width)
    progress(done)
    offset = sum(lengths[:done])
    no_pages, nothing = _no_context(weight.device)
    body = target.config.body
    pool = KVPool(body.num_layers, 1, 1, body.num_kv_heads, body.head_dim, weight.dtype, str(weight.device))
    for number, answer in enumerate(answers[done:], done + 1):
        tokens = torch.tensor([answer.prompt_ids + answer.answer_ids], device=weight.device)
        out = target(tokens, Rows.chain(tokens.shape[1], no_pages, nothing), pool, taps)
        storage[offset : offset + tokens.shape[1]] = (
            torch.cat([out.features, out.hidden], -1)[0].to(torch.bfloat16).cpu()
        )
        offset += tokens.shape[1]
        progress(1)
        if number % 50 == 0 or number == len(answers):
            partial = journal.with_suffix(".partial")
            partial.write_text(json.dumps(identity | {"done": number}))
            partial.replace(journal)
    return FeatureCache(answers, storage, len(taps))


def _done(journal: Path, identity: dict[str, object]) -> int:
    """Sequences finished by an earlier run over the same data; 0 where it was other data."""
    if not journal.is_file():
        return 0
    found = json.loads(journal.read_text())
    done: int = found.pop("done")
    return done if found.items() <= identity.items() else 0


def _no_context(device: torch.device) -> tuple[Tensor, Tensor]:
    """Page table and context length of one request without context."""
    nothing = torch.zeros(1, dtype=torch.long, device=device)
    return nothing[:, None][:, :0], nothing
