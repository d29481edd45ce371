"""The tree work of a decode step as calls of the compiled library: tensors on a CPU, shapes as in the specifications.

Shape letters: B requests, S slots, M candidates a slot, K branches, N nodes, G the longest path, V vocabulary.
"""

from __future__ import annotations

from ctypes import Structure, byref, c_long, c_void_p

import torch
from torch import Tensor

from d2sd.plugins.cpu import library
from d2sd.plugins.cpu.library import address, functions

#: Of a tree, in the order of `d2sd.runtime.speculation.tree.Tree`.
Columns = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
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


def supported(tensor: Tensor) -> bool:
    """Whether the library does this step's tree work."""
    return tensor.device.type == "cpu" and library.available()


def grow(
    anchor: Tensor, tokens: Tensor, logprob: Tensor, nodes: int,
    branches: tuple[Tensor, Tensor] | None = None, second: tuple[Tensor, Tensor] | None = None,
) -> Columns:  # fmt: skip
    """anchor [B], tokens and logprob [B, S, M], tokens [B, K, S] and prefix lengths [B, K] of the branches, and their
    tokens and logprob [B, K, S, M] -> token, parent, depth, valid, mask [B, N, N], branch_id and score [B, N].
    """
    batch, slots, width = tokens.shape
    count = 0 if branches is None else branches[1].shape[1]
    assert count <= MOST_BRANCHES
    inputs = [_int64(anchor), _int64(tokens), logprob.float().contiguous()]
    if branches is not None and second is not None:
        inputs += [*map(_int64, branches), _int64(second[0]), second[1].float().contiguous()]
    token, parent, depth, branch_id = torch.empty(4, batch, nodes, dtype=torch.long)
    score = torch.empty(batch, nodes)
    valid, mask = torch.empty(batch, nodes, dtype=torch.bool), torch.empty(batch, nodes, nodes, dtype=torch.bool)
    pointers = [address(tensor) for tensor in inputs] + [None] * (7 - len(inputs))
    out = (address(tensor) for tensor in (token, parent, depth, branch_id, score, valid, mask))
    functions().d2sd_grow(byref(Growth(batch, slots, width, count, nodes, *pointers, *out)))
    return token, parent, depth, valid, mask, branch_id, score


def accept(
    tokens: Tensor, parent: Tensor, depth: Tensor, valid: Tensor, branch_id: Tensor, chosen: Tensor, longest: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Trees and the target's choices [B, N] -> path [B, G], count [B], tokens [B, G], accepted branch [B]."""
    batch, nodes = chosen.shape
    inputs = [*map(_int64, (tokens, parent, depth, branch_id, chosen)), valid.contiguous()]
    path, out = torch.empty(2, batch, longest, dtype=torch.long)
    count, branch = torch.empty(2, batch, dtype=torch.long)
    pointers = (address(tensor) for tensor in (*inputs, path, count, out, branch))
    functions().d2sd_accept(byref(Acceptance(batch, nodes, longest, *pointers)))
    return path, count, out, branch


def argmax(logits: Tensor) -> Tensor:
    """logits [..., V] fp32 -> [...]: the first of the largest; NaN counts as the largest."""
    rows = logits.contiguous()
    out = torch.empty(logits.shape[:-1], dtype=torch.long)
    functions().d2sd_argmax(address(rows), out.numel(), logits.shape[-1], address(out))
    return out


def _int64(tensor: Tensor) -> Tensor:
    return tensor.long().contiguous()
