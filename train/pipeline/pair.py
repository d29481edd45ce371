"""The last stage of a training: evaluation and confidence calibration of the drafters on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from d2sd.calibration import NAME, CalibrationFile, write_calibration
from d2sd.convert.checkpoint.drafter import fingerprint, load_drafter
from d2sd.errors import D2SDError
from d2sd.io import digest, read_json, write_json, write_text
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.policies import PolicyName
from d2sd.train.confidence.fit import Fingerprints, fit_calibration
from d2sd.train.pipeline.evaluate import Evaluator
from d2sd.train.pipeline.log import Say
from d2sd.train_recipe import TrainRecipe

#: The first drafter alone, a second pass of the first drafter, and the second drafter in that pass.
_METHODS: tuple[PolicyName, ...] = ("chain", "reanchor", "d2sd")
#: Prompts for fitting the calibration, each at two temperatures: thousands of tree nodes, minutes on a CPU.
CALIBRATION_PROMPTS = 32


def finish_pair(recipe: TrainRecipe, evaluator: Evaluator, work: Path, out: Path, say: Say) -> None:
    """Write evaluation.json and calibration.json into `out`, next to the drafters.

    Results are cached in `work` by the drafters' fingerprints; a run that was killed before caching measures again.
    """
    folders = [out / "first"] + ([out / "second"] if recipe.second else [])
    fingerprints = [fingerprint(load_drafter(folder, torch.float32)) for folder in folders]
    inputs = {"drafters": fingerprints, "evaluation": recipe.evaluation.model_dump(), "precision": recipe.precision}

    def pair() -> tuple[Drafter, Drafter | None]:
        """Load both drafters anew for each use, since engines repack weights."""
        first, *second = (load_drafter(folder, evaluator.dtype) for folder in folders)
        return first, second[0] if second else None

    methods = cached(
        work / "evaluation.json", inputs | {"prompts": evaluator.prompts}, lambda: _evaluated(evaluator, *pair())
    )
    trained = {"first": recipe.first, "second": recipe.second}
    write_json(out / "evaluation.json", {
        "methods": methods, "temperature": 0, "prompts": evaluator.prompts,
        "max_new_tokens": recipe.evaluation.max_new_tokens,
        "settings": {name: settings.model_dump() for name, settings in trained.items() if settings},
    })  # fmt: skip
    for method in (name for name in _METHODS if name in methods):
        tau = methods[method]["tau"]
        say(f"{method}: {tau:.3f} tokens a step on {len(evaluator.prompts)} held-out prompts")
    both = fingerprints[0], fingerprints[1] if fingerprints[1:] else None
    calibration = cached(
        work / NAME, inputs | {"prompts": list(evaluator.requests), "last": CALIBRATION_PROMPTS},
        lambda: _calibrated(evaluator, both, *pair()),
    )  # fmt: skip
    write_calibration(out / NAME, CalibrationFile.model_validate(calibration))


def cached(path: Path, inputs: object, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of `make`, cached in `path` by `inputs`; a damaged file is replaced."""
    fingerprint_of_inputs = digest(inputs)
    try:
        match read_json(path, error=D2SDError):
            case {"inputs": str(found), "result": dict(result)} if found == fingerprint_of_inputs:
                return result
    except D2SDError:
        pass
    result = make()
    write_text(path, json.dumps({"inputs": fingerprint_of_inputs, "result": result}) + "\n")  # keeps the keys' order
    return result


def _evaluated(evaluator: Evaluator, first: Drafter, second: Drafter | None) -> dict[str, Any]:
    methods = _METHODS if second else _METHODS[:-1]
    return {method: evaluator.evaluate(method, first, second).figures() for method in methods}


def _calibrated(
    evaluator: Evaluator, fingerprints: tuple[str, str | None], first: Drafter, second: Drafter | None
) -> dict[str, Any]:
    """Fit on the last of the held-out prompts; evaluations run the first ones, uncalibrated."""
    pair, requests = evaluator.serving(first, second), list(evaluator.requests.values())[-CALIBRATION_PROMPTS:]
    weights = Fingerprints(fingerprints, None)
    return fit_calibration(pair, weights, requests, evaluator.device).model_dump(mode="json", exclude_none=True)
