"""What the frozen target says about every training sequence: kept in one memory-mapped file, or computed when asked.

A token takes (n + 1)·E bf16 numbers: the n auxiliary layers' outputs and the final normed hidden state, from which the
target's next-token distribution is recomputed where it is needed. Kept, later epochs cost no target forward pass.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from d2sd.errors import D2SDError
from d2sd.modeling.decoder import Decoder
from d2sd.train.data.responses import Answer

# Shape letters: N tokens of all sequences, S tokens of one, E hidden, n auxiliary layers.


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One training sequence with the target's view of it."""

    tokens: Tensor  # [S] int64, prompt and answer
    prompt_length: int
    features: Tensor  # [S, n·E]
    hidden: Tensor  # [S, E], normed; row t gives the target's distribution of token t + 1


#: features(number) -> the target on that answer, [S, (n+1)·E]: its auxiliary layers, then its final hidden states.
Features = Callable[[int], Tensor]


class TrainingData:
    """Random access to `TrainingSequence`s, or to a part of them, wherever their features come from."""

    def __init__(
        self, answers: Sequence[Answer], aux_layer_ids: int, features: Features, chosen: range | None = None
    ) -> None:
        self._answers, self._aux_layer_ids, self._features = answers, aux_layer_ids, features
        self._chosen = range(len(answers)) if chosen is None else chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> TrainingSequence:
        number = self._chosen[index]  # raises IndexError past the end, so iteration works
        answer = self._answers[number]
        rows = self._features(number)
        width = rows.shape[1] * self._aux_layer_ids // (self._aux_layer_ids + 1)
        tokens = torch.tensor(answer.prompt_ids + answer.answer_ids)
        return TrainingSequence(tokens, len(answer.prompt_ids), rows[:, :width], rows[:, width:])

    def name(self, index: int) -> str:
        """Id of the answer, for messages."""
        return self._answers[self._chosen[index]].id

    @property
    def digest(self) -> str:
        """SHA-256 of the tokens."""
        return _digest(self._answers[i] for i in self._chosen)

    def frequent(self, count: int, vocab_size: int) -> Tensor:
        """[V] bool: the `count` most frequent token ids of the answers; of equally frequent ones the lowest."""
        ids = (i for number in self._chosen for i in self._answers[number].answer_ids)
        times = torch.bincount(torch.tensor(list(ids)), minlength=vocab_size)
        chosen = torch.zeros(vocab_size, dtype=torch.bool)
        chosen[times.argsort(descending=True, stable=True)[:count]] = True
        return chosen

    def split(self, count: int) -> tuple[TrainingData, TrainingData]:
        """The first `count` sequences, and the others. Raises D2SDError if that leaves none."""
        if count >= len(self):
            raise D2SDError(
                "too few answers to train on",
                where="data.held_out",
                found=f"{len(self)} answers",
                expected=f"more than {count}",
            )
        parts = (self._chosen[:count], self._chosen[count:])
        first, rest = (TrainingData(self._answers, self._aux_layer_ids, self._features, part) for part in parts)
        return first, rest


@torch.no_grad()
def online_features(target: Decoder, aux_layer_ids: tuple[int, ...], answers: Sequence[Answer]) -> TrainingData:
    """The target runs whenever a sequence is asked for: nothing to store, for large targets and much data."""
    see = _observer(target, aux_layer_ids)
    return TrainingData(answers, len(aux_layer_ids), lambda number: see(answers[number]))


@torch.no_grad()
def cache_features(
    target: Decoder,
    aux_layer_ids: tuple[int, ...],
    answers: Sequence[Answer],
    path: Path,
    progress: Callable[[int], None],
) -> TrainingData:
    """Fill `path` (bf16, [N, (n+1)·E]) with one pass over every sequence; resumes after the sequences already done.

    `progress` is called with the number of newly finished sequences. The target runs in its own dtype.
    """
    lengths = [len(a.prompt_ids) + len(a.answer_ids) for a in answers]
    weight = target.embed_tokens.weight
    width = target.config.body.hidden_size * (len(aux_layer_ids) + 1)
    identity = {
        "sequences": len(answers), "tokens": sum(lengths), "aux_layer_ids": list(aux_layer_ids),
        "data": _digest(answers), "precision": str(weight.dtype),
    }  # fmt: skip
    journal = path.with_suffix(".json")
    done = _done(journal, identity) if path.is_file() else 0
    if not done:
        journal.unlink(missing_ok=True)  # it speaks of data that is overwritten from here on
    size = sum(lengths) * width
    with path.open("ab") as file:
        os.posix_fallocate(file.fileno(), 0, 2 * size)  # a full disk is an error here, and would be SIGBUS later
    storage = torch.from_file(str(path), shared=True, size=size, dtype=torch.bfloat16).view(-1, width)
    progress(done)
    offsets = list(accumulate(lengths, initial=0))
    see = _observer(target, aux_layer_ids)
    for number, answer in enumerate(answers[done:], done + 1):
        storage[offsets[number - 1] : offsets[number]] = see(answer).to(torch.bfloat16).cpu()
        progress(1)
        if number % 50 == 0 or number == len(answers):
            partial = journal.with_suffix(".partial")
            partial.write_text(json.dumps(identity | {"done": number}))
            partial.replace(journal)
    return TrainingData(answers, len(aux_layer_ids), lambda number: storage[offsets[number] : offsets[number + 1]])


def _observer(target: Decoder, aux_layer_ids: tuple[int, ...]) -> Callable[[Answer], Tensor]:
    """answer -> [S, (n+1)·E], in the target's dtype and on its device."""
    device = target.embed_tokens.weight.device

    @torch.no_grad()
    def see(answer: Answer) -> Tensor:
        out = target.full_pass(torch.tensor([answer.prompt_ids + answer.answer_ids], device=device), aux_layer_ids)
        return torch.cat([out.features, out.hidden], -1)[0]

    return see


def _digest(answers: Iterable[Answer]) -> str:
    return hashlib.sha256(json.dumps([(a.prompt_ids, a.answer_ids) for a in answers]).encode()).hexdigest()


def _done(journal: Path, identity: dict[str, object]) -> int:
    """Sequences finished by an earlier run over the same data; 0 where it was other data."""
    if not journal.is_file():
        return 0
    found = json.loads(journal.read_text())
    done: int = found.pop("done")
    return done if found.items() <= identity.items() else 0
