"""The gated delta rule in loops: every row's state from the committed one, along its own path, in fp64.

Written from the paper's recurrence alone; nothing of the specification is used.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tests.plugins.delta_rule.draws import Drawn, path_to


def step(x: Drawn, request: int, head: int, row: int, state: np.ndarray) -> np.ndarray:
    """The state [Dk, Dv] after a row."""
    k = _unit(x.rows.k[request, row, head * x.rows.k.shape[2] // x.rows.v.shape[2]])
    v, beta = x.rows.v[request, row, head].double().numpy(), float(x.rows.beta[request, row, head])
    decayed: np.ndarray = state * np.exp(float(x.rows.g[request, row, head]))
    after: np.ndarray = decayed + np.outer(k, beta * (v - k @ decayed))
    return after


def committed(x: Drawn, request: int, head: int) -> np.ndarray:
    """The state [Dk, Dv] before the first row."""
    state: np.ndarray = x.states[x.slots[request], head].double().numpy()
    return state


def state_after(x: Drawn, request: int, head: int, path: list[int]) -> np.ndarray:
    """[Dk, Dv] after the rows of a path."""
    state = committed(x, request, head)
    for row in path:
        state = step(x, request, head, row, state)
    return state


def outputs(x: Drawn) -> Tensor:
    """[B, T, Hv, Dv] fp64: a state for every row, which nothing shares but its parent's."""
    batch, rows, heads, size = x.rows.v.shape
    out = np.zeros((batch, rows, heads, size))
    for request in range(batch):
        for head in range(heads):
            after = {-1: committed(x, request, head)}
            for row, parent in enumerate(x.parents[request]):
                after[row] = step(x, request, head, row, after[parent])
                q = _unit(x.q[request, row, head * x.q.shape[2] // heads])
                out[request, row, head] = q @ after[row] * len(q) ** -0.5
    return torch.from_numpy(out)


def convolved(
    x: Tensor, weight: Tensor, states: Tensor, slots: Tensor, parents: list[list[int]], *, silu: bool = True
) -> Tensor:
    """[B, T, C] fp64, row by row; a path continues backwards into the state's inputs."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for request, row_parents in enumerate(parents):
        past = list(states[slots[request]].double().T)
        for row in range(x.shape[1]):
            inputs = [*past, *(x[request, node].double() for node in path_to(row_parents, row))]
            total = sum(
                (a * b for a, b in zip(inputs[-weight.shape[1] :], weight.double().T, strict=True)),
                torch.zeros(x.shape[2], dtype=torch.float64),
            )
            out[request, row] = total / (1 + torch.exp(-total)) if silu else total
    return out


def _unit(x: Tensor) -> np.ndarray:
    wide: np.ndarray = x.double().numpy()
    unit: np.ndarray = wide / np.sqrt((wide * wide).sum() + 1e-6)
    return unit
