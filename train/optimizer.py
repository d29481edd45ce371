"""The optimizer: Muon for matrices and AdamW for other parameters, or AdamW for all; both from PyTorch.

Muon (Jordan et al. 2024) orthogonalises a matrix's momentum before the step. With `match_rms_adamw` (arXiv 2502.16982)
its updates have the RMS of AdamW's, so both use one learning rate.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from d2sd.modeling.drafters.interface import DraftModel
from d2sd.train.kinds import trained_kind
from d2sd.train_recipe import TrainSettings


class Optimizer:
    """Optimizer of one drafter."""

    def __init__(self, drafter: DraftModel, settings: TrainSettings) -> None:
        self._drafter = drafter
        parameters = list(drafter.parameters())
        heads = trained_kind(drafter).token_rows  # AdamW, as is usual for heads
        matrices = [p for name, p in drafter.named_parameters() if p.dim() == 2 and name not in heads]
        muon = matrices if settings.optimizer == "muon" else []
        adamw = [p for p in parameters if not any(p is other for other in muon)]
        decay = settings.weight_decay
        self._parts: list[torch.optim.Optimizer] = [torch.optim.AdamW(adamw, betas=(0.9, 0.95), weight_decay=decay)]
        if muon:
            self._parts.append(torch.optim.Muon(muon, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))

    def update(self, rate: float) -> None:
        """One step at this learning rate; clears the gradients."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """The optimizer state, by kind and parameter name."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._drafter.named_parameters()}
        return {
            f"{kind}.{names[parameter]}": value.detach().cpu().contiguous()
            for part in self._parts
            for parameter, state in part.state.items()
            for kind, value in state.items()
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a state returned by `tensors`."""
        parameters = dict(self._drafter.named_parameters())
        owners = {p: part for part in self._parts for group in part.param_groups for p in group["params"]}
        for key, value in tensors.items():
            kind, name = key.split(".", 1)
            parameter = parameters[name]
            # AdamW keeps its step count on the CPU
            owners[parameter].state[parameter][kind] = value if kind == "step" else value.to(parameter.device)
