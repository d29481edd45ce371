"""Growth and acceptance as calls of the compiled library: tensors on a CPU, arguments as of the specifications."""

from __future__ import annotations

from ctypes import Structure, byref, c_long, c_void_p
from dataclasses import replace

import torch
from torch import Tensor

from d2sd.plugins.cpu.library import address, functions
from d2sd.plugins.trees.types import Accepted, Branches, Draft, Tree

#: Branches that a node's set of prefixes has bits for.
MOST_BRANCHES = 64


class Growth(Structure):
    """`struct growth`."""

    _fields_ = [
        *((name, c_long) for name in ("batch", "slots", "width", "branches", "nodes")),
        *((name, c_void_p) for name in ("anchor", "tokens", "logprob", "branch_tokens", "prefix_len")),
        *((name, c_void_p) for name in ("second_tokens", "second_logprob", "token", "parent", "depth", "branch_id")),
        *((name, c_void_p) for name in ("score", "valid", "mask")),
    ]


class Acceptance(Structure):
    """`struct acceptance`."""

    _fields_ = [
        *((name, c_long) for name in ("batch", "nodes", "longest")),
        *((name, c_void_p) for name in ("tokens", "parent", "depth", "branch_id", "chosen", "valid")),
        *((name, c_void_p) for name in ("path", "count", "out", "branch")),
    ]


def best_first_tree_cpu(
    anchor: Tensor, first: Draft, rows: int, branches: Branches | None = None, second: Draft | None = None
) -> Tree:
    """`best_first_tree` of at most `MOST_BRANCHES` branches."""
    batch, slots, width = first.tokens.shape
    count = 0 if branches is None else branches.prefix_len.shape[1]
    assert count <= MOST_BRANCHES
    inputs = [_int64(anchor), _int64(first.tokens), first.logprob.float().contiguous()]
    if branches is not None and second is not None:
        inputs += [_int64(branches.tokens), _int64(branches.prefix_len)]
        inputs += [_int64(second.tokens), second.logprob.float().contiguous()]
    tree = replace(Tree.empty(batch, rows), num_merged=torch.zeros_like(anchor))
    pointers = [address(tensor) for tensor in inputs] + [None] * (7 - len(inputs))
    columns = tree.tokens, tree.parent, tree.depth, tree.branch_id, tree.score, tree.valid, tree.attn_mask
    functions().d2sd_grow(byref(Growth(batch, slots, width, count, rows, *pointers, *map(address, columns))))
    return tree


def accept_cpu(tree: Tree, chosen: Tensor, longest: int) -> Accepted:
    """`accept`."""
    batch, nodes = chosen.shape
    columns = tree.tokens, tree.parent, tree.depth, tree.branch_id, chosen
    inputs = [*map(_int64, columns), tree.valid.contiguous()]
    path, out = torch.empty(2, batch, longest, dtype=torch.long)
    count, branch = torch.empty(2, batch, dtype=torch.long)
    pointers = (address(tensor) for tensor in (*inputs, path, count, out, branch))
    functions().d2sd_accept(byref(Acceptance(batch, nodes, longest, *pointers)))
    return Accepted(path, count, out, branch)


def _int64(tensor: Tensor) -> Tensor:
    return tensor.long().contiguous()
