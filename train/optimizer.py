"""Who turns gradients into updates: Muon for the matrices and AdamW for the rest, or AdamW for all; both PyTorch's.

Muon (Jordan et al. 2024) orthogonalises a matrix's momentum before the step. With `match_rms_adamw` (arXiv 2502.16982)
its updates are as large as AdamW's, so one learning rate serves both.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from d2sd.modeling.drafter import Drafter
from d2sd.train_recipe import TrainSettings


class Optimizer:
    """Of one drafter."""

    def __init__(self, drafter: Drafter, settings: TrainSettings) -> None:
        self._drafter = drafter
        parameters = list(drafter.parameters())
        muon = [p for p in parameters if p.dim() == 2 and settings.optimizer == "muon"]
        adamw = [p for p in parameters if not any(p is other for other in muon)]
        decay = settings.weight_decay
        self._parts: list[torch.optim.Optimizer] = [torch.optim.AdamW(adamw, betas=(0.9, 0.95), weight_decay=decay)]
        if muon:
            self._parts.append(torch.optim.Muon(muon, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))

    def update(self, rate: float) -> None:
        """One step at this learning rate; the gradients are used up."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """Everything remembered from step to step, by kind and parameter name."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._drafter.named_parameters()}
        return {
            f"{kind}.{names[parameter]}": value.detach().cpu().contiguous()
            for part in self._parts
            for parameter, state in part.state.items()
            for kind, value in state.items()
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """The opposite of `tensors`."""
        where = dict(self._drafter.named_parameters())
        owners = {p: part for part in self._parts for group in part.param_groups for p in group["params"]}
        for key, value in tensors.items():
            kind, name = key.split(".", 1)
            parameter = where[name]
            # AdamW keeps its count of steps on the CPU
            owners[parameter].state[parameter][kind] = value if kind == "step" else value.to(parameter.device)
