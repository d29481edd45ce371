"""Host state to device tensors: the inputs of a decode step, padded to its buckets, and of a prefill."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from d2sd.modeling.where import Where, mapped
from d2sd.policies import MAX_NODES
from d2sd.runtime.grammar.step import StepGrammar
from d2sd.runtime.request import bucket, power_of_two
from d2sd.runtime.sampling.bias import Entries
from d2sd.runtime.sampling.penalties import NO_TEXT, Counts, Text
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.sequence import Sequence

# Shape letters: B requests (in a step a bucket), N tokens of all prompt chunks, M pages a request.

_GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True)
class Batch:
    """The requests of one decode step. Rows past the last request are padding and are never committed."""

    anchor: Tensor  # [B] int64
    where: Where  # `context_len` is the anchor's position
    active: Tensor  # [B] bool
    sampling: Sampling
    grammar: StepGrammar | None = None  # None: no request has one
    rows: Tensor | None = None  # [B] int64, most nodes of each request's tree; None: those of the policy

    @staticmethod
    def pack(
        sequences: SequenceOf[Sequence], vocab_size: int, device: str, rows: tuple[int, ...] | None = None
    ) -> Batch:
        """The inputs of a decode step over `sequences`, padded to the batch bucket.

        They are on the host until `to`, but for tables of biases and penalties, which are made on `device`.
        """
        size = bucket(len(sequences))
        padding = [0] * (size - len(sequences))
        params = [s.request.sampling for s in sequences] + [_GREEDY] * len(padding)
        texts = [_text(s, vocab_size, device) for s in sequences]
        rows = rows or (MAX_NODES,) * len(sequences)
        return Batch(
            anchor=torch.tensor([s.anchor for s in sequences] + padding),
            where=pack_where(sequences, size, exact=device == "cpu"),
            active=torch.arange(size) < len(sequences),
            sampling=Sampling.pack(params, vocab_size, device, texts + [NO_TEXT] * len(padding)),
            grammar=StepGrammar.of(sequences) if any(s.matcher is not None for s in sequences) else None,
            rows=torch.tensor([*rows, *[min(rows)] * len(padding)]),
        )

    @staticmethod
    def dummy(where: Where, vocab_size: int, device: str, params: SamplingParams = _GREEDY) -> Batch:
        """Requests at these places that commit nothing: to time or capture a step."""
        zeros = torch.zeros_like(where.context_len)
        sampling = Sampling.pack([params] * len(zeros), vocab_size, device)
        rows = torch.full_like(zeros, MAX_NODES)
        return Batch(anchor=zeros, where=where, active=zeros.bool(), sampling=sampling, rows=rows)

    def to(self, device: str) -> Batch:
        """The same inputs on the device."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device)

        return replace(mapped(self, move), where=mapped(self.where, move), sampling=mapped(self.sampling, move))

    @property
    def has_static_shapes(self) -> bool:
        """Whether the shapes of its step depend on the batch bucket and the policy alone, and the host reads nothing.

        Grammars walk trees on the host; tables of biases and penalties, and log-probabilities, have sizes of their own.
        """
        sampling = self.sampling
        return self.grammar is None and not sampling.changes_logits and sampling.logprobs is None


def _text(sequence: Sequence, vocab_size: int, device: str) -> Text:
    """The text of a sequence, with the entries of its biases, which are made once, and the counts of its tokens."""
    request = sequence.request
    if sequence.counts is None and request.sampling.has_penalty:
        sequence.counts = Counts()
    known = sequence.tokens, len(request.prompt), request.stop_tokens
    text = Text(*known, sequence.bias, sequence.counts, request.markers)
    if sequence.bias is None and request.sampling.has_bias:
        sequence.bias = Entries.of(request.sampling, text, vocab_size, device)
        text = text._replace(entries=sequence.bias)
    return text


class PrefillInputs(NamedTuple):
    """The arguments of `ModelRunner.prefill`, on the host."""

    tokens: Tensor  # [N] int64, chunk after chunk
    lengths: list[int]  # B tokens of each chunk
    where: Where
    following: Tensor | None = None  # [N] int64, the token behind each row, if a request reports prompt tokens


class Prefilled(NamedTuple):
    """The target's outputs at the rows of a prefill."""

    hidden: Tensor  # [N, E], ready for the head
    following: Tensor | None  # [N], the token behind each row, where it was given


def prefill_inputs(chunks: SequenceOf[tuple[Sequence, int]], *, exact: bool) -> PrefillInputs:
    """The next `count` prompt tokens of each (sequence, count), without padding: a graph adds its own.

    `exact` as in `pack_where`.
    """
    starts = [(s, s.cached, s.cached + count) for s, count in chunks]
    tokens = [token for s, start, end in starts for token in s.tokens[start:end]]
    following = None
    if any(s.needs_prompt_rows for s, _ in chunks):
        following = torch.tensor([token for s, start, end in starts for token in s.tokens[start + 1 : end + 1]])
    return PrefillInputs(
        tokens=torch.tensor(tokens),
        lengths=[count for _, count in chunks],
        where=pack_where([s for s, _ in chunks], len(chunks), exact=exact),
        following=following,
    )


def pack_where(sequences: SequenceOf[Sequence], size: int, *, exact: bool) -> Where:
    """The places of B = `size` requests, the last of them padding: page 0, no token, and state 0.

    Page tables have M columns for the longest sequence; `exact` leaves M as it is, as for a CPU, where attention copies
    every page of padding; else it is a power of two.
    """
    longest = max(1, *(len(s.pages) for s in sequences))
    columns = longest if exact else power_of_two(longest)
    windowed, states = [s.windowed_pages for s in sequences], [s.state_id for s in sequences]
    padding = [0] * (size - len(sequences))
    return Where(
        pages=_table([s.pages for s in sequences], size, columns),
        context_len=torch.tensor([s.cached for s in sequences] + padding),
        windowed=_table(windowed, size, columns) if any(windowed) else None,
        state_ids=torch.tensor(states + padding) if any(states) else None,
    )


def _table(rows: SequenceOf[array[int]], size: int, columns: int) -> Tensor:
    """[size, columns] int64, each row filled up with zeros. Rows are copied whole: no page costs the host a number."""
    width = torch.long.itemsize
    parts = [part for row in rows for part in (row, bytes(width * (columns - len(row))))]
    filled = bytearray().join([*parts, bytes(width * columns * (size - len(rows)))])
    return torch.frombuffer(filled, dtype=torch.long).view(size, columns)
