"""The checkpoint of a training: weights, optimizer state, and the settings that a resumed run must share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import BaseModel, JsonValue, NonNegativeInt
from safetensors.torch import save_file

from d2sd.convert.checkpoint.weights import open_tensors
from d2sd.errors import CheckpointError, D2SDError
from d2sd.io import atomic_write
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.train.optimizer import Optimizer

#: Everything that determines the result, by name.
Identity = Mapping[str, Mapping[str, object]]
_NAME = "state.safetensors"
#: A single metadata key, so that equal trainings give equal bytes: safetensors does not fix the order of several.
_KEY = "d2sd"


class _Saved(BaseModel):
    """The metadata of a checkpoint."""

    step: NonNegativeInt
    identity: dict[str, dict[str, JsonValue]]


def save_state(folder: Path, step: int, drafter: DraftModel, optimizer: Optimizer, identity: Identity) -> None:
    """Write the folder's checkpoint, atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"drafter.{k}": v.detach().cpu().contiguous() for k, v in drafter.named_parameters()}
    tensors |= {f"optimizer.{k}": v for k, v in optimizer.tensors().items()}
    with atomic_write(folder / _NAME) as partial:
        save_file(tensors, partial, {_KEY: json.dumps({"step": step, "identity": identity})})


def load_state(folder: Path, drafter: DraftModel, optimizer: Optimizer, identity: Identity) -> int:
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
        step, found = saved.step, saved.identity
    except (CheckpointError, KeyError, TypeError) as error:  # the last two: of another program
        raise D2SDError(
            "the training checkpoint cannot be read", where=path, found=getattr(error, "found", None) or error,
            fix="correct that, or delete the file to begin again",
        ) from None  # fmt: skip
    for what, mine in identity.items():
        now, then = json.loads(json.dumps(mine)), found.get(what, {})
        if changed := [key for key in then | now if then.get(key) != now.get(key)]:
            raise D2SDError(
                f"the {what} changed since this training began", where=path,
                found={key: now.get(key) for key in changed}, expected={key: then.get(key) for key in changed},
                fix="restore the recipe, or train into another folder",
            )  # fmt: skip
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.copy_(tensors[f"drafter.{name}"])
    prefix = "optimizer."
    optimizer.restore({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
    return step
