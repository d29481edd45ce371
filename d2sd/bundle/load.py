"""Open a bundle: verify the hash of every file, then load its models onto the CPU in the bundle's precision."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d2sd.bundle.files import verify_files
from d2sd.calibration import NAME as CALIBRATION_NAME
from d2sd.calibration import CalibrationFile, load_calibration
from d2sd.convert.checkpoint.offline import load_tokenizer
from d2sd.convert.checkpoint.target import load_target, stop_tokens
from d2sd.convert.checkpoint.weights import DTYPES
from d2sd.convert.kinds import kind_of
from d2sd.manifest import Manifest, load_manifest
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.interface import DraftConfig, DraftModel
from d2sd.policies import DrafterRole
from d2sd.progress import Progress, silent
from d2sd.recipe import Recipe

CALIBRATION = f"calibration/{CALIBRATION_NAME}"


@dataclass(frozen=True, slots=True)
class Bundle:
    """A loaded bundle. Models are in eval mode, without gradients, on the CPU."""

    path: Path
    manifest: Manifest
    target: Decoder
    drafters: dict[DrafterRole, DraftModel]  # in the order of their roles; attached to the target
    tokenizer: Any  # a transformers tokenizer with its chat template
    stop_token_ids: tuple[int, ...]
    calibration: CalibrationFile | None

    @property
    def recipe(self) -> Recipe:
        return self.manifest.recipe

    @property
    def draft_configs(self) -> dict[DrafterRole, DraftConfig]:
        """The drafters' configs."""
        return {role: drafter.config for role, drafter in self.drafters.items()}


def load_bundle(path: Path, *, verify: bool = True, progress: Progress = silent) -> Bundle:
    """Open the bundle at `path`; raises `BundleError`. `verify=False` skips hashing files that were just verified."""
    manifest = load_manifest(path)
    if verify:
        verify_files(path, manifest, progress)
    return assemble(path, manifest)


def assemble(path: Path, manifest: Manifest) -> Bundle:
    """Load the models of a folder whose files have been verified."""
    dtype = DTYPES[manifest.recipe.precision]
    target = load_target(path / "target", dtype)
    drafters: dict[DrafterRole, DraftModel] = {}
    for role in manifest.recipe.drafters.sources:
        kind = kind_of(role)
        drafters[role] = kind.load(path / role.folder, dtype)
        kind.attach(drafters[role], target)
    return Bundle(
        path=path,
        manifest=manifest,
        target=target,
        drafters=drafters,
        tokenizer=load_tokenizer(path / "target"),
        stop_token_ids=stop_tokens(path / "target"),
        calibration=load_calibration(path / CALIBRATION) if manifest.recipe.drafters.calibration else None,
    )
