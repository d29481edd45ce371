"""Open a bundle: verify the hash of every file, then load its models onto the CPU in the bundle's precision."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from d2sd.bundle.devices import check_device
from d2sd.bundle.files import verify_files
from d2sd.bundle.ranks import Ranks, rank_device
from d2sd.calibration import NAME as CALIBRATION_NAME
from d2sd.calibration import CalibrationFile, load_calibration
from d2sd.convert.checkpoint.families import parse_target_config
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.checkpoint.offline import load_tokenizer
from d2sd.convert.checkpoint.target import load_target, stop_tokens
from d2sd.convert.checkpoint.weights import DTYPES
from d2sd.convert.kinds import KINDS, read_kind
from d2sd.errors import BundleError
from d2sd.manifest import Manifest, load_manifest
from d2sd.modeling.config import DraftConfig
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.modeling.prepare import prepare_for_inference
from d2sd.modeling.shard import Shard, check_divisible
from d2sd.modeling.tensor_parallel import connect
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
    tokenizer: Any  # a transformers tokenizer with its chat template; None in ranks that see token ids alone
    stop_token_ids: tuple[int, ...]
    calibration: CalibrationFile | None
    ranks: Ranks | None = None  # the processes that have the other parts of `target`; None: it is whole
    #: Models that serve are made of these, which stay whole; else these serve themselves, and no weight is held twice.
    keep: bool = True

    @property
    def recipe(self) -> Recipe:
        return self.manifest.recipe

    @property
    def draft_configs(self) -> dict[DrafterRole, DraftConfig]:
        """The drafters' configs."""
        return {role: drafter.config for role, drafter in self.drafters.items()}

    def serving(self, roles: Collection[DrafterRole], device: str = "cpu") -> Bundle:
        """The bundle with its target and drafters of `roles` prepared for inference on `device`, to which they move.

        Engines that are made of it share them.
        """
        target = self.target.to(device)
        drafters = {role: drafter.to(device) for role, drafter in self.drafters.items() if role in roles}
        target, drafters = prepare_for_inference(target, drafters, exact=self.recipe.exact, keep=self.keep)
        return replace(self, target=target, drafters=drafters)


def load_bundle(
    path: Path, *, verify: bool = True, progress: Progress = silent, tensor_parallel: int = 1, device: str = "cpu"
) -> Bundle:
    """Open the bundle at `path`; raises `BundleError`. `verify=False` skips hashing files that were just verified.

    With `tensor_parallel`, that many processes share the target; this one, with `device`, is rank 0 and starts the
    others, on the next GPUs. Raises D2SDError if the target cannot be divided so, `RankLost` if one of them ends.
    """
    manifest = load_manifest(path)
    if verify:
        verify_files(path, manifest, progress)
    if tensor_parallel == 1:
        return assemble(path, manifest)
    return _shared(path, manifest, tensor_parallel, device)


def _shared(path: Path, manifest: Manifest, size: int, device: str) -> Bundle:
    """Load rank 0's part of a target while other processes load theirs."""
    check_divisible(parse_target_config(HFConfig.read(path / "target")), size)
    check_device(rank_device(device, size - 1))
    if manifest.recipe.exact and size > 2:
        raise BundleError(
            "Sums of more than two ranks are not batch-invariant.",
            where="exact",
            found=f"{size} ranks",
            expected="at most 2",
            fix="build it without `exact`",
        )
    ranks = Ranks(path.resolve(), size, device)
    try:
        bundle = assemble(path, manifest, Shard(0, size), ranks.check)
        connect(bundle.target, ranks.join(Shard(0, size)))
    except BaseException:
        ranks.close()
        raise
    return replace(bundle, ranks=ranks)


def assemble(
    path: Path, manifest: Manifest, shard: Shard | None = None, check: Callable[[], None] = lambda: None
) -> Bundle:
    """Load the models of a folder whose files have been verified; of the target a rank's part, which is not connected.

    Drafters that are layers of the target are left out where it is not whole. `check` is called between tensors of the
    target, and may raise.
    """
    dtype = DTYPES[manifest.recipe.precision]
    target = load_target(path / "target", dtype, shard, check)
    drafters: dict[DrafterRole, DraftModel] = {}
    for role in manifest.recipe.drafters.sources:
        folder = path / role.folder
        kind = KINDS[read_kind(folder)]
        config = kind.read_config(folder)
        if shard is not None and config.borrows_mlps:
            continue
        drafters[role] = kind.load(folder, dtype, config)
        kind.attach(drafters[role], target)
    named = manifest.recipe.drafters.calibration
    return Bundle(
        path=path,
        manifest=manifest,
        target=target,
        drafters=drafters,
        tokenizer=load_tokenizer(path / "target") if shard is None or shard.rank == 0 else None,
        stop_token_ids=stop_tokens(path / "target"),
        calibration=load_calibration(path / CALIBRATION).among(drafters) if named else None,
    )
