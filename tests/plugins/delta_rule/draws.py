"""Random trees, and rows and states of the gated delta rule over them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from d2sd.plugins.delta_rule import DeltaRows


class Drawn(NamedTuple):
    """Arguments of `tree_delta_rule`, and each row's parent."""

    q: Tensor
    rows: DeltaRows
    states: Tensor
    slots: Tensor
    mask: Tensor
    parents: list[list[int]]  # by request; -1: the root


def tree(draw: torch.Generator, nodes: int, most_depth: int, chain: float) -> list[int]:
    """Parents of nodes in a topological order; with probability `chain` a node's parent is the node before."""
    parents, depth = [-1], [1]
    for node in range(1, nodes):
        follows = bool(torch.rand((), generator=draw) < chain)
        parent = node - 1 if follows else int(torch.randint(node, (), generator=draw))
        while depth[parent] >= most_depth:
            parent = parents[parent]
        parents.append(parent)
        depth.append(depth[parent] + 1)
    return parents


def mask_of(parents: list[int]) -> Tensor:
    """[T, T] bool, ancestors and self."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def path_to(parents: list[int], node: int) -> list[int]:
    """Rows from the root to the node."""
    return [*(path_to(parents, parents[node]) if parents[node] >= 0 else []), node]


def drawn(
    seed: int,
    nodes: int,
    *,
    batch: int = 2,
    most_depth: int = 32,
    chain: float = 0.6,
    heads: tuple[int, int] = (1, 2),
    size: int = 64,
    gate: float = 20.0,
    state: float = 1.0,
    alike: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> Drawn:
    """Rows of `batch` requests with gates -gate .. 0, some of them 0, and beta 0 .. 1, some of them 1.

    `state` scales the states. `alike` brings all keys near one direction, where the triangular system is worst.
    """
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=draw)

    parents = [tree(draw, nodes, most_depth, chain) for _ in range(batch)]
    keys, values = heads
    k = (1 - alike) * normal(batch, nodes, keys, size) + alike * normal(1, 1, keys, size)
    g = -gate * uniform(batch, nodes, values) ** 3 * (uniform(batch, nodes, values) > 0.3)
    beta = torch.where(uniform(batch, nodes, values) > 0.7, 1.0, uniform(batch, nodes, values))
    rows = DeltaRows(k.to(dtype), normal(batch, nodes, values, size).to(dtype), g, beta)
    states = state * normal(batch + 2, values, size, size)
    slots = torch.randperm(batch + 1, generator=draw)[:batch] + 1
    return Drawn(
        normal(batch, nodes, keys, size).to(dtype), rows, states, slots, torch.stack([*map(mask_of, parents)]), parents
    )
