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
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from d2sd.modeling.decoder import Decoder
from d2sd.modeling.kv_pool import Chunks, ContextRows
from d2sd.plugins.cascade_attention import ChunkMask
from d2sd.runtime.batch import Prefilled, PrefillInputs
from d2sd.runtime.cuda_graphs.refusal import lacks_memory, refuse
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
        return graph.run(self._runner, inputs, self._host_tensors(inputs, graph.rows))

    def warm_ups(self) -> list[Callable[[], object]]:
        """The work that captures all graphs, the largest first; nothing where passes have none."""
        target = self._runner.target
        captures = self._runner.capture is not None and type(self._runner).prefill is ModelRunner.prefill
        if not captures or not isinstance(target, Decoder) or self._runner.slot_bytes:
            return []
        if getattr(target.compiled, "exact", False):
            return []
        return [partial(self._capture, rows) for rows in reversed(row_counts(self._most_rows))]

    @torch.inference_mode(False)
    def _capture(self, rows: int) -> None:
        """Capture the graph of so many rows; a warning if CUDA refuses, D2SDError under `D2SD_NO_FALLBACK=1`."""
        assert self._runner.capture is not None
        nothing = torch.zeros(1, dtype=torch.long)
        windowed = None if self._runner.windowed_pages is None else nothing[None]
        like = self._host_tensors(PrefillInputs(nothing, [1], nothing[None], nothing, windowed), rows)
        inputs = [tensor.to(self._runner.device, copy=True) for tensor in like]

        def run() -> tuple[Tensor, Tensor]:
            tokens, starts, *found = inputs
            return self._runner.prefill_rows(tokens, Chunks(ChunkMask((rows,), starts), *found))

        try:
            result, replay = self._runner.capture(run)
        except Exception as error:  # of PyTorch or Triton
            if not lacks_memory(f"passes over {rows} rows of prompts", error):
                refuse("passes over prompts", error)
            return
        self._graphs = dict(sorted({**self._graphs, rows: _Graph(rows, inputs, result, replay)}.items()))

    def _host_tensors(self, inputs: PrefillInputs, rows: int) -> list[Tensor]:
        """The values of a graph's inputs: tokens, and the tensors of `Chunks` with the shapes that all passes have."""
        count, left = len(inputs.lengths), rows - len(inputs.tokens)
        page_size = self._runner.target_pool.page_size
        wide = [self._wide(table) for table in (inputs.page_table, inputs.windowed_table) if table is not None]
        context_len = torch.zeros(self._chunks + 1, dtype=torch.long)
        context_len[:count] = inputs.context_len
        lengths = [*inputs.lengths, *[0] * (self._chunks - count), left]
        windowed = wide[1] if len(wide) > 1 else None
        chunks = Chunks.of(lengths, wide[0], context_len, page_size, windowed)
        return [torch.nn.functional.pad(inputs.tokens, (0, left)), *chunks.tensors]

    def _wide(self, table: Tensor) -> Tensor:
        """A page table of all chunks and of the padding rows, with the columns of the longest context."""
        wide = torch.zeros(self._chunks + 1, self._pages, dtype=torch.long)
        wide[: len(table), : table.shape[1]] = table
        return wide


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured pass; `result` is in the graph's memory."""

    rows: int
    inputs: list[Tensor]
    result: tuple[Tensor, Tensor]  # hidden states [rows, E], features [rows, n·E]
    replay: Callable[[], None]

    @torch.inference_mode()
    def run(self, runner: ModelRunner, inputs: PrefillInputs, values: list[Tensor]) -> Prefilled:
        count, following = len(inputs.tokens), inputs.following
        assert runner.staging is not None
        staged = runner.staging(values if following is None else [*values, following])
        if following is not None:
            following = staged.pop()
        torch._foreach_copy_(self.inputs, staged)
        self.replay()
        hidden, features = (part[:count] for part in self.result)
        tokens, _, (positions,), pages, _, _, *windowed = staged
        windowed_pages = windowed[1][:count].clone() if windowed else None
        # in copies: of `features` for the next pass, of the others because the page tables would be kept with them
        rows = ContextRows(features.clone(), positions[:count].clone(), pages[:count].clone(), windowed_pages)
        runner.keep_rows(tokens[:count], rows)
        return Prefilled(hidden, following)
