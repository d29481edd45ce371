"""Runs passes over prompts as CUDA graphs: one launch each, in place of nine a layer for which an H200 waits 20 ms.

    host tensors of the chunks -> one pinned buffer -> one copy -> static inputs -> graph -> features, hidden states

There is a graph for each of some numbers of rows (`row_counts`), all captured before the first request: a capture takes
longer than the pass. Each has room for MOST_CHUNKS chunks, of which only the device knows where they begin, and one
more of the padding rows: that of a request without pages, whose rows go to the scratch page 0.

Passes of more rows or chunks run operator by operator: the device takes longer than their launches. So do those whose
shapes the chunks decide: of hybrids, of `exact` steps, of exported graphs and of several ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from d2sd.modeling.decoder import Decoder
from d2sd.modeling.kv_pool import Chunks, ContextRows
from d2sd.modeling.where import Where
from d2sd.plugins.cascade_attention import ChunkMask
from d2sd.runtime.batch import Prefilled, PrefillInputs
from d2sd.runtime.cuda_graphs.refusal import lacks_memory, refuse, warn_of_memory
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import Limits, power_of_two

#: Rows of a pass that still has a graph, and chunks.
MOST_ROWS, MOST_CHUNKS = 1024, 16
#: Rows of the smallest graph. From four times as many on there are four sizes to each power of two.
_LEAST_ROWS = 16


def row_counts(most: int) -> list[int]:
    """Rows of the graphs for passes of up to `most`, ascending: of 64 and more a fifth at most are padding."""
    most, found, size = min(most, MOST_ROWS), [], _LEAST_ROWS
    while size < most:
        found.append(size)
        size += max(_LEAST_ROWS, power_of_two(size + 1) // 8)
    return [*found, most]


class PrefillGraphs:
    """The passes over prompts of one model runner with its pools allocated."""

    def __init__(self, runner: ModelRunner, limits: Limits) -> None:
        self._runner = runner
        self._pages = power_of_two(limits.pages_for(limits.max_context + runner.block_size))
        self._most_rows = min(limits.prefill_chunk, self._pages * limits.page_size)  # a table covers them
        self._chunks = min(limits.max_batch, limits.prefill_chunk, MOST_CHUNKS)
        self._graphs: dict[int, _Graph] = {}  # by rows, ascending

    def run(self, inputs: PrefillInputs) -> Prefilled:
        """`ModelRunner.prefill` of these inputs; the next call may overwrite its result."""
        rows = len(inputs.tokens)
        graph = next((graph for size, graph in self._graphs.items() if size >= rows), None)
        if graph is None or len(inputs.lengths) > self._chunks:
            return self._runner.prefill(*inputs)
        return graph.run(self._runner, inputs, *self._host_inputs(inputs, graph.rows))

    def warm_ups(self) -> list[Callable[[], object]]:
        """The work that captures all graphs, the largest first; nothing where passes have none."""
        target = self._runner.target
        captures = self._runner.capture is not None and type(self._runner).prefill is ModelRunner.prefill
        if not captures or not isinstance(target, Decoder) or self._runner.layout.state_bytes:
            return []
        if target.compiled is not None and target.compiled.exact:
            return []
        return [partial(self._capture, rows) for rows in reversed(row_counts(self._most_rows))]

    @torch.inference_mode(False)
    def _capture(self, rows: int) -> None:
        """Capture the graph of so many rows; a warning if CUDA refuses, D2SDError under `D2SD_NO_FALLBACK=1`."""
        assert self._runner.capture is not None
        nothing = PrefillInputs(torch.zeros(1, dtype=torch.long), [1], self._runner.scratch(1, 1))
        like, host = self._host_inputs(nothing, rows)
        inputs = [tensor.to(self._runner.device, copy=True) for tensor in (like, *host.tensors)]
        chunks = host.with_tensors(inputs[1:])
        chunks = replace(chunks, attn_mask=ChunkMask((rows,), chunks.attn_mask.starts))

        def run() -> tuple[Tensor, Tensor]:
            return self._runner.prefill_rows(inputs[0], chunks)

        try:
            result, replay = self._runner.capture(run)
        except Exception as error:  # of PyTorch or Triton
            if lacks_memory(error):
                warn_of_memory(f"passes over {rows} rows of prompts", error)
            else:
                refuse("passes over prompts", error)
            return
        self._graphs = dict(sorted({**self._graphs, rows: _Graph(rows, inputs, chunks, result, replay)}.items()))

    def _host_inputs(self, inputs: PrefillInputs, rows: int) -> tuple[Tensor, Chunks]:
        """The values of a graph's inputs: tokens, and chunks with the shapes that all passes have."""
        count, left = len(inputs.lengths), rows - len(inputs.tokens)
        lengths = [*inputs.lengths, *[0] * (self._chunks - count), left]
        chunks = Chunks.of(lengths, self._wide(inputs.where), self._runner.target_pool.page_size)
        return torch.nn.functional.pad(inputs.tokens, (0, left)), chunks

    def _wide(self, where: Where) -> Where:
        """The places of all chunks and of the padding rows, in page tables with columns for the longest context."""
        requests = self._chunks + 1 - len(where.context_len)

        def wide(table: Tensor) -> Tensor:
            return torch.nn.functional.pad(table, (0, self._pages - table.shape[1], 0, requests))

        return replace(where.map_tables(wide), context_len=torch.nn.functional.pad(where.context_len, (0, requests)))


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured pass; `result` is in the graph's memory."""

    rows: int
    inputs: list[Tensor]  # tokens, and the tensors of `chunks`
    chunks: Chunks
    result: tuple[Tensor, Tensor]  # hidden states [rows, E], features [rows, n·E]
    replay: Callable[[], None]

    @torch.inference_mode()
    def run(self, runner: ModelRunner, inputs: PrefillInputs, tokens: Tensor, chunks: Chunks) -> Prefilled:
        count, following = len(inputs.tokens), inputs.following
        assert runner.staging is not None
        values = [tokens, *chunks.tensors]
        staged = runner.staging(values if following is None else [*values, following])
        if following is not None:
            following = staged.pop()
        torch._foreach_copy_(self.inputs, staged)
        self.replay()
        hidden, features = (part[:count] for part in self.result)
        chunks = self.chunks.with_tensors(staged[1:])
        # in copies: of `features` for the next pass, of the others because the page tables would be kept with them
        positions, *pages = (part[:count].clone() for part in (chunks.positions[0], *chunks.pages))
        runner.keep_rows(staged[0][:count], ContextRows(features.clone(), positions, tuple(pages)))
        return Prefilled(hidden, following)
