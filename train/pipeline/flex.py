"""The last stages of a FlexDraft training: evaluation and calibration of the head on disk, the target's digest."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import nn

from d2sd.calibration import NAME, CalibrationFile, write_calibration
from d2sd.convert.checkpoint.flex import flex_fingerprint, load_flex
from d2sd.io import write_json
from d2sd.train.confidence.fit import Fingerprints, fit_calibration
from d2sd.train.pipeline.evaluate import Evaluator
from d2sd.train.pipeline.log import Say
from d2sd.train.pipeline.pair import CALIBRATION_PROMPTS, cached
from d2sd.train_recipe import FlexSettings, TrainRecipe


def finish_flex(
    recipe: TrainRecipe, settings: FlexSettings, evaluator: Evaluator, work: Path, out: Path, target: str, say: Say
) -> None:
    """Write evaluation.json and calibration.json into `out`, next to the head; `target` is the digest of the target's
    weights.

    The results are cached in `work` by the head's fingerprint.
    """
    folder = out / "flex"
    found = flex_fingerprint(load_flex(folder, torch.float32))
    inputs = {
        "head": found, "evaluation": recipe.evaluation.model_dump(), "precision": recipe.precision,
        "prompts": evaluator.prompts,
    }  # fmt: skip

    def evaluated() -> dict[str, object]:
        return {"flex": evaluator.evaluate("flex", flex=load_flex(folder, evaluator.dtype)).figures()}

    methods = cached(work / "evaluation.json", inputs, evaluated)
    write_json(out / "evaluation.json", {
        "methods": methods, "temperature": 0, "prompts": evaluator.prompts,
        "max_new_tokens": recipe.evaluation.max_new_tokens, "settings": {"flex": settings.model_dump()},
        "target": {"sha256 before and after training": target},
    })  # fmt: skip

    def calibrated() -> dict[str, object]:
        bundle = evaluator.serving(flex=load_flex(folder, evaluator.dtype))
        requests = list(evaluator.requests.values())[-CALIBRATION_PROMPTS:]
        weights = Fingerprints((None, None), found)
        return fit_calibration(bundle, weights, requests, evaluator.device).model_dump(mode="json", exclude_none=True)

    calibration = cached(work / NAME, inputs, calibrated)
    write_calibration(out / NAME, CalibrationFile.model_validate(calibration))
    say(f"flex: {methods['flex']['tau']:.3f} tokens a step on {len(evaluator.prompts)} held-out prompts")


def weights_digest(model: nn.Module) -> str:
    """SHA-256 of every tensor of a model, bit by bit."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
