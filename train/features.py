"""What the frozen target says about every training sequence, computed once and kept in one memory-mapped file.

A token takes (n + 1)·E bf16 numbers: the n tapped layers' outputs and the final normed hidden state, from which the target's
next-token distribution is recomputed where it is needed. Later epochs cost no target forward pass.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from d2sd.modeling.decoder import Decoder
from d2sd.modeling.rows import KVPool, Rows
from d2sd.train.answers import Answer

# Shape letters: N tokens of all sequences, S tokens of one, E hidden, n tapped layers.


@dataclass(frozen=True, slots=True)
class Sequence_:
    """One training sequence with the target's view of it."""

    tokens: Tensor  # [S] int64, prompt and answer
    prompt_length: int
    features: Tensor  # [S, n·E] bf16
    hidden: Tensor  # [S, E] bf16, normed; row t gives the target's distribution of token t + 1


class FeatureCache:
    """Random access to `Sequence_`s."""

    def __init__(self, answers: Sequence[Answer], storage: Tensor, taps: int) -> None:
        self._answers, self._storage, self._taps = answers, storage, taps
        lengths = [len(a.prompt_ids) + len(a.answer_ids) for a in answers]
        self._offsets = [0]
        for length in lengths:
            self._offsets.append(self._offsets[-1] + length)

    def __len__(self) -> int:
        return len(self._answers)

    def __getitem__(self, index: int) -> Sequence_:
        answer = self._answers[index]
        rows = self._storage[self._offsets[index] : self._offsets[index + 1]]
        width = rows.shape[1] * self._taps // (self._taps + 1)
        tokens = torch.tensor(answer.prompt_ids + answer.answer_ids)
        return Sequence_(tokens, len(answer.prompt_ids), rows[:, :width], rows[:, width:])


@torch.no_grad()
def cache_features(
    target: Decoder, taps: tuple[int, ...], answers: Sequence[Answer], path: Path, progress: Callable[[int], None]
) -> FeatureCache:
    """Fill `path` (bf16, [N, (n+1)·E]) with one pass over every sequence; resumes after the sequences already done.

    `progress` is called with the number of finished sequences. The target runs in its own dtype.
    """
    lengths = [len(a.prompt_ids) + len(a.answer_ids) for a in answers]
    width = target.config.body.hidden_size * (len(taps) + 1)
    total = sum(lengths)
    storage = torch.from_file(str(path), shared=True, size=total * width, dtype=torch.bfloat16).view(total, width)
    journal = path.with_suffix(".json")
    state = {"sequences": len(answers), "tokens": total, "taps": list(taps), "done": 0}
    if journal.is_file():
        previous = json.loads(journal.read_text())
        if {k: previous.get(k) for k in ("sequences", "tokens", "taps")} == {k: state[k] for k in ("sequences", "tokens", "taps")}:
            state = previous
    dtype = target.embed_tokens.weight.dtype
    body = target.config.body
    empty = KVPool(body.num_layers, 1, 1, body.num_kv_heads, body.head_dim, dtype, "cpu")
    device = target.embed_tokens.weight.device
    no_pages = torch.zeros(1, 0, dtype=torch.long, device=device)
    nothing = torch.zeros(1, dtype=torch.long, device=device)
    offset = sum(lengths[: state["done"]])
    for index in range(state["done"], len(answers)):
        answer = answers[index]
        tokens = torch.tensor([answer.prompt_ids + answer.answer_ids], device=device)
        out = target(tokens, Rows.chain(tokens.shape[1], no_pages, nothing), empty, taps)
        storage[offset : offset + tokens.shape[1]] = torch.cat([out.features, out.hidden], -1)[0].to(torch.bfloat16).cpu()
        offset += tokens.shape[1]
        if (index + 1) % 50 == 0 or index + 1 == len(answers):
            state["done"] = index + 1
            journal.write_text(json.dumps(state))
            progress(index + 1)
    return FeatureCache(answers, storage, len(taps))
