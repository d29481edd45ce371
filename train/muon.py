"""Muon for a GPU: the matrices of a shape take each step together.

`torch.optim.Muon` takes twenty launches for each matrix, more than the work of a small one. State and results are the
same, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor


class BatchedMuon(torch.optim.Muon):
    """`torch.optim.Muon` with match_rms_adamw and Nesterov momentum."""

    def __init__(self, params: Iterable[Tensor], weight_decay: float) -> None:
        super().__init__(list(params), weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step of the matrices that have gradients; `closure` is not called."""
        for group in self.param_groups:
            ready = sorted((p for p in group["params"] if p.grad is not None), key=lambda p: tuple(p.shape))
            for _, alike in groupby(ready, key=lambda p: tuple(p.shape)):
                self._together(list(alike), group)

    def _together(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        rate, momentum = group["lr"], group["momentum"]
        gradients = [p.grad for p in matrices if p.grad is not None]
        for p in matrices:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum_buffer"] for p in matrices]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        ahead = torch.stack(torch._foreach_lerp(gradients, buffers, momentum))
        update = _orthogonal(ahead, group["ns_coefficients"], group["ns_steps"], group["eps"])
        torch._foreach_mul_(matrices, 1 - rate * group["weight_decay"])
        scale = -rate * 0.2 * max(update.shape[1:]) ** 0.5
        torch._foreach_add_(matrices, list(update.to(matrices[0].dtype).unbind(0)), alpha=scale)


def _orthogonal(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Newton-Schulz iterations in bf16 of matrices [M, R, C]."""
    a, b, c = coefficients
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.transpose(1, 2) if tall else x
