"""Growth and acceptance as calls of the compiled library: tensors on a CPU, arguments as of the specifications."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from ctypes import Structure, addressof, byref, c_long, c_void_p
from dataclasses import replace

import torch
from torch import Tensor

from d2sd.plugins.cpu.library import address, functions
from d2sd.plugins.trees.types import Accepted, Tree, lanes

#: Rows that a node's set of prefixes has bits for.
MOST_ROWS = 64


class SourcePointers(Structure):
    """`struct source`."""

    _fields_ = [
        *((name, c_long) for name in ("rows", "width", "lane", "parents", "follows")),
        *((name, c_void_p) for name in ("tokens", "table", "kept", "prefix_len")),
    ]


class Growth(Structure):
    """`struct growth`."""

    _fields_ = [
        *((name, c_long) for name in ("batch", "slots", "sources", "nodes")),
        *((name, c_void_p) for name in ("source", "anchor", "token", "parent", "depth", "branch_id", "score")),
        *((name, c_void_p) for name in ("valid", "mask")),
    ]


class Acceptance(Structure):
    """`struct acceptance`."""

    _fields_ = [
        *((name, c_long) for name in ("batch", "nodes", "longest")),
        *((name, c_void_p) for name in ("tokens", "parent", "depth", "branch_id", "chosen", "valid", "rows")),
        *((name, c_void_p) for name in ("path", "count", "out", "branch")),
    ]


def best_first_tree(anchor, sources, rows):
    """`best_first_tree` of at most `MOST_ROWS` rows."""
    *_, slots, _ = sources[0].draft.tokens.shape
    assert sum(source.rows for source in sources) <= MOST_ROWS
    inputs, pointers = [anchor := _int64(anchor)], (SourcePointers * len(sources))()
    for number, (source, lane) in enumerate(zip(sources, lanes(sources), strict=True)):
        given = [_int64(source.draft.tokens), source.draft.table.float().contiguous()]
        if source.branches is not None:
            given += [_int64(source.branches.tokens), _int64(source.branches.prefix_len)]
        sizes = source.rows, given[0].shape[-1], lane, given[1].shape[-2], source.follows
        pointers[number] = SourcePointers(*sizes, *map(address, given))
        inputs += given  # alive until the call
    tree = replace(Tree.empty(len(anchor), rows), num_merged=torch.zeros_like(anchor))
    columns = anchor, tree.tokens, tree.parent, tree.depth, tree.branch_id, tree.score, tree.valid, tree.attn_mask
    growth = Growth(len(anchor), slots, len(sources), rows, addressof(pointers), *map(address, columns))
    functions().d2sd_grow(byref(growth))
    return tree


def accept(tree, chosen, longest):
    batch, nodes = chosen.shape
    columns = tree.tokens, tree.parent, tree.depth, tree.branch_id, chosen
    inputs = [*map(_int64, columns), tree.valid.contiguous(), tree.rows]
    path, out = torch.empty(2, batch, longest, dtype=torch.long)
    count, branch = torch.empty(2, batch, dtype=torch.long)
    pointers = (address(tensor) for tensor in (*inputs, path, count, out, branch))
    functions().d2sd_accept(byref(Acceptance(batch, nodes, longest, *pointers)))
    return Accepted(path, count, out, branch)


def _int64(tensor: Tensor) -> Tensor:
    return tensor.long().contiguous()
