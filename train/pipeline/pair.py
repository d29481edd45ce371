"""The last stage of a training: what the written pair is worth, and how far it may be believed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

from d2sd.calibration import NAME, CalibrationFile, write_calibration
from d2sd.convert.checkpoint.drafter import fingerprint, load_drafter
from d2sd.io import digest, write_json
from d2sd.io import write_text as write_whole
from d2sd.modeling.drafter import Drafter
from d2sd.policies import PolicyName
from d2sd.train.confidence.fit import fit_calibration
from d2sd.train.pipeline.evaluate import Evaluator, figures
from d2sd.train_recipe import TrainRecipe

#: What the first drafter alone is worth, what a second pass of it is, and what the second drafter makes of that pass.
_METHODS: tuple[PolicyName, ...] = ("chain", "reanchor", "d2sd")
#: Prompts that a calibration is fitted on, at two temperatures each: thousands of candidates, minutes on a CPU.
_CALIBRATION = 32


def finish_pair(recipe: TrainRecipe, evaluator: Evaluator, work: Path, out: Path) -> None:
    """Write evaluation.json and calibration.json beside the drafters in `out`.

    What was measured of these very drafters is kept in `work`; a run that was killed measures again.
    """
    folders = [out / "first"] + ([out / "second"] if recipe.second else [])
    marks = [fingerprint(load_drafter(folder, torch.float32)) for folder in folders]
    of_these = {"drafters": marks, "evaluation": recipe.evaluation.model_dump(), "precision": recipe.precision}

    def pair() -> tuple[Drafter, Drafter | None]:
        """Anew for every use: engines repack."""
        first, *second = (load_drafter(folder, evaluator.dtype) for folder in folders)
        return first, second[0] if second else None

    asked = of_these | {"prompts": evaluator.prompts}
    found = kept(work / "evaluation.json", asked, lambda: _judged(evaluator, *pair()))
    trained = {"first": recipe.first, "second": recipe.second}
    write_json(out / "evaluation.json", {
        "methods": found, "temperature": 0, "prompts": evaluator.prompts,
        "max_new_tokens": recipe.evaluation.max_new_tokens,
        "settings": {name: settings.model_dump() for name, settings in trained.items() if settings},
    })  # fmt: skip
    for method in (name for name in _METHODS if name in found):
        tau = found[method]["tau"]
        click.echo(f"{method}: {tau:.3f} tokens a step on {len(evaluator.prompts)} held-out prompts")
    calibration = kept(
        work / NAME, of_these | {"prompts": list(evaluator.requests), "last": _CALIBRATION},
        lambda: _calibration(evaluator, (marks[0], marks[1] if marks[1:] else None), *pair()),
    )  # fmt: skip
    write_calibration(out / NAME, CalibrationFile.model_validate(calibration))


def kept(path: Path, inputs: object, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` gave for the same inputs in an earlier run, or gives now."""
    mark = digest(inputs)
    try:
        saved = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        saved = {}
    if saved.get("inputs") != mark:
        saved = {"inputs": mark, "result": make()}
        write_whole(path, json.dumps(saved) + "\n")  # in its order
    result: dict[str, Any] = saved["result"]
    return result


def _judged(evaluator: Evaluator, first: Drafter, second: Drafter | None) -> dict[str, Any]:
    methods = _METHODS if second else _METHODS[:-1]
    return {method: figures(evaluator.cell(method, first, second)) for method in methods}


def _calibration(
    evaluator: Evaluator, marks: tuple[str, str | None], first: Drafter, second: Drafter | None
) -> dict[str, Any]:
    """On the last of the held-out prompts: evaluations ask the first of them, without any calibration."""
    pair, requests = evaluator.serving(first, second), list(evaluator.requests.values())[-_CALIBRATION:]
    return fit_calibration(pair, marks, requests, evaluator.device).model_dump(mode="json")
