"""Batch-invariant products and attention compute a row alike alone, among others, in a tree and in a chunk.

The checks raise AssertionError. They run over the kernels' launchers, under Triton's interpreter and as PTX.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import mul

import torch
from torch import Tensor

from d2sd.plugins.cascade_attention import PagedContext
from d2sd.plugins.cascade_attention.arguments import move_broken
from d2sd.plugins.cascade_attention.triton import exact
from tests.plugins.test_cascade_attention import Call, Shape, ancestors, behind, causal, make, spoiled, steps

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def looped_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The definition, in Python's floats."""
    biases = [0.0] * len(weight) if bias is None else bias.tolist()
    columns = list(zip(weight.tolist(), biases, strict=True))
    sums = [[sum(map(mul, row, column)) + extra for column, extra in columns] for row in x.tolist()]
    return torch.tensor(sums)


def check_rows_alone(linear: Linear, x: Tensor, weight: Tensor, bias: Tensor | None, sizes: tuple[int, ...]) -> None:
    """Rows of x among so many others, at the beginning, in the middle and at the end of all."""
    whole = linear(x, weight, bias)
    for size in sizes:
        for start in (0, (len(x) - size) // 2, len(x) - size):
            some = slice(start, start + size)
            assert torch.equal(linear(x[some].clone(), weight, bias), whole[some]), (size, start)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    assert torch.equal(linear(x[order], weight, bias), whole[order])


@dataclass(frozen=True)
class Text:
    """A request's rows behind its context, as a tree or as a prompt's chunk."""

    call: Call

    @staticmethod
    def of(shape: Shape, dtype: torch.dtype, *, tree: bool, window: int | None = None, sinks: bool = False) -> Text:
        call = make(shape, mask := ancestors if tree else causal).to(dtype)
        return Text(behind(call, window, steps(mask, call), sinks=sinks))

    def committed(self, request: int, path: list[int], spare: int) -> Call:
        """The last row of `path` alone: the rows before it are in the pages, which are others than before."""
        call, size = self.call, self.call.context.k_pages.shape[1]
        context = call.context
        length = int(context.context_len[request])
        pages = 2 + (length + len(path)) // size + spare
        table = torch.arange(pages - 1, 0, -1)[None]
        stored = []
        for old, new in ((context.k_pages, call.k), (context.v_pages, call.v)):
            made = torch.full((pages, *old.shape[1:]), torch.nan, dtype=old.dtype)
            for position in range(length + len(path) - 1):
                at = int(context.page_table[request, position // size]) if position < length else 0
                row = old[at, position % size] if position < length else new[request, path[position - length]]
                made[table[0, position // size], position % size] = row
            stored.append(made)
        done = torch.tensor([length + len(path) - 1])
        own = (slice(request, request + 1), slice(path[-1], path[-1] + 1))
        return Call(
            call.q[own],
            call.k[own],
            call.v[own],
            PagedContext(stored[0], stored[1], table, done),
            torch.ones(1, 1, 1, dtype=torch.bool),
            call.window,
            torch.zeros(1, 1, dtype=torch.long),
            call.sinks,
        )

    def check(self, rows: list[int], spare: int) -> None:
        """Compares these rows of every request with each of them as the only row of a step."""
        whole = attended(self.call)
        for request in range(len(whole)):
            for row in rows:
                path = self.call.attn_mask[request, row].nonzero().flatten().tolist()
                alone = attended(self.committed(request, path, spare))
                assert torch.equal(alone[0, 0], whole[request, row]), (request, row)


def attended(call: Call, *, causal_chunk: bool = False, **limit: int) -> Tensor:
    mask = call.mask
    order = None if causal_chunk else exact.key_order(mask.allowed)
    return exact.attend(call.q, call.k, call.v, call.context, order, mask.first, call.sinks, **limit)


def check_broken_rows(run: Callable[[Call], Tensor], dtype: torch.dtype) -> None:
    """Rows that see a broken key are NaN, whatever split has it, and no bit of the others is another."""
    shape = Shape(contexts=(70, 5), rows=7, kv_heads=1, group=3, size=16, page_size=16)
    healthy = make(shape, ancestors).to(dtype)
    expected, reached = run(healthy), torch.zeros(2, 7, dtype=torch.bool)
    for row in (0, 2):
        call = spoiled(healthy, 0, row, torch.nan, keys=False)
        move_broken(call.k, call.v)
        found = run(call)
        reached[0] = call.attn_mask[0, :, row]
        assert torch.equal(found[~reached], expected[~reached])
        assert found[reached].isnan().all()
    k_pages = healthy.context.k_pages.clone()
    k_pages[healthy.context.page_table[0, 0], 3] = torch.nan
    found = run(healthy.over(k_pages=k_pages))
    assert found[0].isnan().all()
    assert torch.equal(found[1], expected[1])
