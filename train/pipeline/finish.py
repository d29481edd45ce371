"""The last stage of a training: evaluation and confidence calibration of the drafters on disk, the target's digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from d2sd.bundle.serving import can_run
from d2sd.calibration import NAME, CalibrationFile, write_calibration
from d2sd.convert.kinds import KINDS, load_drafter
from d2sd.errors import D2SDError
from d2sd.io import digest, read_json, write_json, write_text
from d2sd.policies import DrafterRole
from d2sd.train.confidence.fit import fit_calibration
from d2sd.train.kinds import METHODS
from d2sd.train.pipeline.evaluate import Evaluator
from d2sd.train.pipeline.log import Say
from d2sd.train_recipe import TrainRecipe

#: Prompts for fitting the calibration, each at two temperatures: thousands of tree nodes, minutes on a CPU.
_CALIBRATION_PROMPTS = 32


def finish(
    recipe: TrainRecipe,
    evaluator: Evaluator,
    roles: Collection[DrafterRole],
    work: Path,
    out: Path,
    target: str,
    say: Say,
) -> None:
    """Write evaluation.json and calibration.json into `out`, next to the drafters; `target` is the digest of the
    target's weights.

    Results are cached in `work` by the drafters' fingerprints; a run that was killed before caching measures again.
    """
    written = {role: load_drafter(out / role.key, torch.float32) for role in roles}
    weights = {role.key: KINDS[drafter.config.kind].fingerprint(drafter) for role, drafter in written.items()}
    drafters = {role: load_drafter(out / role.key, evaluator.dtype) for role in roles}
    inputs = {"drafters": weights, "evaluation": recipe.evaluation.model_dump(), "precision": recipe.precision}

    def evaluated() -> dict[str, Any]:
        configs = {role: drafter.config for role, drafter in drafters.items()}
        names = [name for names in METHODS.values() for name in names if can_run(configs, name)]
        return {name: evaluator.evaluate(name, drafters).figures() for name in names}

    def calibrated() -> dict[str, Any]:
        """Fit on the last of the held-out prompts; evaluations run the first ones, uncalibrated."""
        requests = list(evaluator.requests.values())[-_CALIBRATION_PROMPTS:]
        bundle = evaluator.serving(drafters)
        return fit_calibration(bundle, weights, requests, evaluator.device).model_dump(mode="json", exclude_none=True)

    methods = _cached(work / "evaluation.json", inputs | {"prompts": evaluator.prompts}, evaluated)
    write_json(
        out / "evaluation.json",
        {
            "methods": methods,
            "temperature": 0,
            "prompts": evaluator.prompts,
            "max_new_tokens": recipe.evaluation.max_new_tokens,
            "settings": {role.key: settings.model_dump() for role, settings in recipe.trained.items()}
            | ({"head": recipe.head.model_dump()} if recipe.head else {}),
            "target": {"sha256 before and after training": target},
        },
    )
    for name, figures in methods.items():
        say(f"{name}: {figures['tau']:.3f} tokens a step on {len(evaluator.prompts)} held-out prompts")
    prompts = {"prompts": list(evaluator.requests), "last": _CALIBRATION_PROMPTS}
    calibration = _cached(work / NAME, inputs | prompts, calibrated)
    write_calibration(out / NAME, CalibrationFile.model_validate(calibration))


def _cached(path: Path, inputs: object, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of `make`, cached in `path` by `inputs`; a damaged file is replaced."""
    fingerprint_of_inputs = digest(inputs)
    try:
        match read_json(path, error=D2SDError):
            case {"inputs": str(fingerprint), "result": dict(result)} if fingerprint == fingerprint_of_inputs:
                return result
    except D2SDError:
        pass
    result = make()
    write_text(path, json.dumps({"inputs": fingerprint_of_inputs, "result": result}) + "\n")  # keeps the keys' order
    return result


def weights_digest(model: nn.Module) -> str:
    """SHA-256 of every tensor of a model, bit by bit."""
    digest_of_all = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest_of_all.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest_of_all.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest_of_all.hexdigest()
