"""The state of a training: the optimizer, and the checkpoint from which an interrupted run resumes.

The optimizer is Muon for matrices and AdamW for other parameters, or AdamW for all; both from PyTorch. Muon (Jordan et
al. 2024) orthogonalises a matrix's momentum before the step. With `match_rms_adamw` (arXiv 2502.16982) its updates have
the RMS of AdamW's, so both use one learning rate. The checkpoint holds weights, optimizer state, and the settings that
a resumed run must share.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import BaseModel, JsonValue, NonNegativeInt
from safetensors.torch import save_file
from torch import Tensor, nn

from d2sd.convert.checkpoint.headers import open_tensors
from d2sd.errors import CheckpointError, D2SDError
from d2sd.io import atomic_write, remove_partial
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.train.kinds import trained_kind
from d2sd.train.muon import BatchedMuon
from d2sd.train_recipe import LoopSettings


class Optimizer:
    """Optimizer of one drafter, or of a head of it."""

    def __init__(self, drafter: nn.Module, settings: LoopSettings) -> None:
        self._drafter = drafter
        parameters = list(drafter.parameters())
        # AdamW, as is usual for heads
        heads = trained_kind(drafter.config.kind).token_rows if isinstance(drafter, DraftModel) else ()
        matrices = [p for name, p in drafter.named_parameters() if p.dim() == 2 and name not in heads]
        muon = matrices if settings.optimizer == "muon" else []
        adamw = [p for p in parameters if not any(p is other for other in muon)]
        decay = settings.weight_decay
        self._parts: list[torch.optim.Optimizer] = [torch.optim.AdamW(adamw, betas=(0.9, 0.95), weight_decay=decay)]
        if muon:
            self._parts.append(
                BatchedMuon(muon, decay)
                if muon[0].is_cuda
                else torch.optim.Muon(muon, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
            )

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


def reached(settings: LoopSettings, step: int, begun: float) -> float:
    """How far a training is, in steps: those taken or, if it is more, the share of its seconds since `begun`."""
    if settings.seconds is None:
        return step
    return min(settings.steps, max(step, settings.steps * (time.monotonic() - begun) / settings.seconds))


def rate_factor(settings: LoopSettings, step: float) -> float:
    """Factor of the learning rate in a step: linear warm-up, then cosine decay to 5 %."""
    warm = max(1, round(settings.warmup * settings.steps))
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, settings.steps - warm)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))


def digest_of(*modules: nn.Module) -> str:
    """SHA-256 of weights, as fp32: what is trained behind a drafter depends on them."""
    digest = hashlib.sha256()
    for module in modules:
        for parameter in module.parameters():
            digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


#: Everything that determines the result, by name.
Identity = Mapping[str, Mapping[str, object]]
_NAME = "state.safetensors"
#: A single metadata key, so that equal trainings give equal bytes: safetensors does not fix the order of several.
_KEY = "d2sd"


class _Saved(BaseModel):
    """The metadata of a checkpoint."""

    step: NonNegativeInt
    identity: dict[str, dict[str, JsonValue]]


def save_state(folder: Path, step: int, drafter: nn.Module, optimizer: Optimizer, identity: Identity) -> None:
    """Write the folder's checkpoint, atomically; the work folder is locked."""
    folder.mkdir(parents=True, exist_ok=True)
    remove_partial(folder / _NAME)
    tensors = {f"drafter.{k}": v.detach().cpu().contiguous() for k, v in drafter.named_parameters()}
    tensors |= {f"optimizer.{k}": v for k, v in optimizer.tensors().items()}
    with atomic_write(folder / _NAME) as partial:
        save_file(tensors, partial, {_KEY: json.dumps({"step": step, "identity": identity})})


def load_state(folder: Path, drafter: nn.Module, optimizer: Optimizer, identity: Identity) -> int:
    """Load drafter and optimizer; returns the step, 0 if nothing was saved. Raises D2SDError if anything that
    determines the result changed, or for a damaged file.
    """
    path = folder / _NAME
    if not path.is_file():
        return 0
    try:
        with open_tensors(path) as handle:
            saved = _Saved.model_validate_json(handle.metadata()[_KEY])
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118, not a mapping
        step, saved_identity = saved.step, saved.identity
    except (CheckpointError, KeyError, TypeError) as error:  # the last two: of another program
        raise D2SDError(
            "the training checkpoint cannot be read",
            where=path,
            found=getattr(error, "found", None) or error,
            fix="correct that, or delete the file to begin again",
        ) from None
    for what, mine in identity.items():
        now, then = json.loads(json.dumps(mine)), saved_identity.get(what, {})
        if changed := [key for key in then | now if then.get(key) != now.get(key)]:
            raise D2SDError(
                f"the {what} changed since this training began",
                where=path,
                found={key: now.get(key) for key in changed},
                expected={key: then.get(key) for key in changed},
                fix="restore the recipe, or train in another folder of --work, or under another `name`",
            )
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.copy_(tensors[f"drafter.{name}"])
    prefix = "optimizer."
    optimizer.restore({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
    return step
