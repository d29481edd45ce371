"""Builds a bundle from a recipe, in the stages fetch, target, drafter_... for each drafter, calibration, trtllm,
onnx, engines/..., check, manifest.

`StageCache` makes a killed build resumable. A bundle's bytes depend only on its recipe, its sources and the tools'
versions, with two exceptions: FP8 scales also depend on the processor, which determines the order of sums, and TensorRT
engines are not reproducible byte for byte.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import JsonValue

from d2sd.build.engines import EngineBuild
from d2sd.build.fp8 import Fp8Build
from d2sd.build.fp8_scales import PACKAGE, load_modelopt
from d2sd.build.geometry import read_drafter
from d2sd.build.plan import Part, Plan, make_plan
from d2sd.build.sources import adapters_of, located, obtained
from d2sd.build.stage_cache import Run, StageCache
from d2sd.build.validate.checks import check_bundle
from d2sd.build.vocabulary import Ranking, narrowed, rank
from d2sd.bundle.load import CALIBRATION, Bundle, assemble
from d2sd.calibration import NAME as CALIBRATION_NAME
from d2sd.calibration import CalibrationFile, write_calibration
from d2sd.convert.checkpoint.gguf import convert_gguf
from d2sd.convert.checkpoint.lora import CONFIG, WEIGHTS
from d2sd.convert.checkpoint.offline import load_tokenizer
from d2sd.convert.checkpoint.target import source_files, write_target
from d2sd.convert.checkpoint.weights import DTYPES
from d2sd.convert.trtllm.llm_args import FOLDER as TRTLLM
from d2sd.convert.trtllm.llm_args import unsupported_reason, write_llm_args
from d2sd.errors import BuildError
from d2sd.io import digest, hash_files, write_json
from d2sd.manifest import NAME, DrafterGeometry, Manifest, TargetGeometry
from d2sd.model_warnings import model_warnings
from d2sd.modeling.config import DecoderConfig
from d2sd.policies import DrafterRole
from d2sd.progress import Progress, silent
from d2sd.recipe import Recipe, Source

_TOOLS = ("d2sd", "torch", "transformers", "tokenizers", "safetensors", "gguf")
#: Bytes reserved for the tokenizer and JSON files next to the weights.
_SMALL_FILES = 32 << 20


@dataclass(frozen=True, slots=True)
class Fit:
    """Makes the calibration of a bundle whose models are built; the building of bundles itself fits nothing."""

    run: Callable[[Bundle], CalibrationFile]
    inputs: object  # all that its result depends on, in addition to the models


def build(
    recipe: Recipe,
    output: Path,
    *,
    validate: bool = True,
    fit: Fit | None = None,
    progress: Progress = silent,
    finished: Callable[[str], None] = lambda stage: None,
) -> Manifest:
    """Build the bundle of `recipe` at `output` and validate it, resuming from the stages an earlier run finished.

    `finished` is called with the name of each stage. `validate=False` loads the bundle but runs no checks: it is for
    bundles that only feed another step, such as the target that training reads. With `fit` the bundle is calibrated
    before it is validated, and its recipe, which must name no calibration, names that one. Raises `D2SDError`; what
    configs and tensor headers show to be wrong is reported before anything is written.
    """
    work = StageCache.for_output(output, progress, finished)
    plan = make_plan(recipe)
    for source in plan.missing:
        obtained(recipe, source, progress)
    if plan.missing:
        plan = make_plan(recipe)
    finished("fetch")
    for part in plan.parts:
        for said in model_warnings(recipe, part.name, part.licence):
            print(said, file=sys.stderr)
    with work.locked():
        manifest = _stages(plan, work, validate, fit)
        write_json(work.bundle / NAME, manifest.model_dump(mode="json"))
        work.publish()
    finished("manifest")
    return manifest


def _stages(plan: Plan, work: StageCache, validate: bool, fit: Fit | None) -> Manifest:
    assert plan.target is not None, "the fetch stage has run"
    first = plan.drafters.get(DrafterRole.FIRST)
    target = cast("DecoderConfig", plan.target.config)
    served = unsupported_reason(plan.recipe, first.draft_config if first else None, target) is None
    engines = EngineBuild.of(plan, work)
    optional = {"calibration": bool(plan.calibration or fit), TRTLLM: served}
    stages = {part.name for part in plan.parts} | {name for name, enabled in optional.items() if enabled}
    work.prune(stages | set(engines.stages if engines else ()))
    unproven = Manifest(
        recipe=plan.recipe,
        target=_target_geometry(plan.target),
        drafters={},  # known with their draft vocabularies
        files={},
        versions={tool: version(tool) for tool in _TOOLS},
        checks={},
    )
    fp8 = _fp8(plan, work, unproven) if plan.recipe.fp8 is not None else None
    if fp8 is not None:
        unproven = unproven.model_copy(update={"versions": unproven.versions | {PACKAGE: fp8.modelopt.version}})
    common: dict[str, object] = {"versions": unproven.versions, "precision": plan.recipe.precision}
    files: dict[str, str] = {}
    for place in plan.places:
        part = plan.places[place]
        stage = _target if part is plan.target else _drafter
        source, need, write = stage(plan, part, work)
        inputs = common | {"source": source}
        if fp8 is not None and fp8.makes(part):
            inputs |= fp8.inputs() | {"preceding": list(files.items())}
            write = partial(fp8.write, part)
        files |= work.stage(part.name, inputs, need, write).files
        if part is plan.target:
            plan, coverage = _with_vocabulary(plan, work.bundle / part.name)
            fp8 = fp8 and replace(fp8, plan=plan)
            geometries = {role.key: _drafter_geometry(part, coverage) for role, part in plan.drafters.items()}
            unproven = unproven.model_copy(update={"drafters": geometries})
    if plan.calibration is not None:
        inputs = common | {"source": plan.calibration.model_dump(mode="json"), "drafters": list(files.items())}
        write = partial(_write_calibration, plan, plan.calibration)
        files |= work.stage("calibration", inputs, 1 << 20, write).files
    elif fit is not None:
        inputs = common | {"fit": fit.inputs, "recipe": plan.recipe.canonical(), "models": list(files.items())}
        write = partial(_fit, fit, work, unproven)
        files |= work.stage("calibration", inputs, 1 << 20, write).files
        unproven = unproven.model_copy(update={"recipe": _calibrated(plan.recipe)})
    if served:
        inputs = common | {"recipe": plan.recipe.canonical(), "drafters": list(files.items())}
        files |= work.stage(TRTLLM, inputs, 1 << 20, lambda folder: write_llm_args(folder, plan.recipe)).files
    if engines is not None:
        models = {
            name: sha256 for name, sha256 in files.items() if name.partition("/")[0] in {p.name for p in plan.parts}
        }
        engine_files, built = engines.run(common, models)
        files |= engine_files
        unproven = unproven.model_copy(update={"versions": unproven.versions | engines.tools, "engines": built})
    unproven = unproven.model_copy(update={"files": files})

    def check(folder: Path) -> dict[str, Any]:
        bundle = replace(assemble(work.bundle, unproven), keep=False)
        if not validate:
            return {}
        return check_bundle(bundle, work.progress) | ({"fp8": fp8.compare(bundle)} if fp8 is not None else {})

    inputs = {"manifest": unproven.model_dump(mode="json"), "validate": validate}
    result = work.stage("check", inputs, 0, check).result
    return unproven.model_copy(update={"checks": result})


def _fp8(plan: Plan, work: StageCache, manifest: Manifest) -> Fp8Build:
    """Run the stages that need the unquantized target; their files are not part of the bundle."""
    assert plan.target is not None
    assert plan.target_file is not None
    recipe = plan.recipe
    common: dict[str, object] = {"versions": manifest.versions, "precision": recipe.precision}
    source, need, write = _target(plan, plan.target, work)
    folder, common = plan.target_file, common | {"source": source}
    if recipe.target.pypi or recipe.target.dequantize or recipe.target.lora:
        work.stage("plain_target", common, need, write, internal=True)
        folder = work.internal / "plain_target"
    plain = manifest.model_copy(update={"recipe": recipe.model_copy(update={"fp8": None})})
    build = Fp8Build(plan, work, load_modelopt(work.progress), plain, folder)
    prompts = recipe.path(build.wanted.prompts) if build.wanted.prompts else None
    inputs = common | {
        "prompts": hash_files(prompts.parent, [prompts.name]) if prompts else None,
        "count": build.wanted.count,
        "tokens": build.wanted.tokens,
    }
    work.stage("texts", inputs, 1 << 20, build.write_texts, internal=True)
    return build


def _target(plan: Plan, part: Part, work: StageCache) -> tuple[object, int, Run]:
    """Inputs, bytes needed and writer of the target's stage."""
    file, precision, pypi = plan.target_file, plan.recipe.precision, plan.recipe.target.pypi
    dequantize = plan.recipe.target.dequantize
    assert file is not None
    need, adapters = part.weight_bytes + _SMALL_FILES, adapters_of(plan.recipe)
    loras = [{"files": hash_files(folder, [CONFIG, WEIGHTS]), "scale": scale} for folder, scale in adapters]
    if not pypi:
        hashes = hash_files(file, source_files(file), work.progress)
        inputs: dict[str, object] = {"files": hashes, "dequantize": True} if dequantize else dict(hashes)
        copy = partial(write_target, file, dequantize=dequantize, adapters=adapters)
        return _with(inputs, loras), need, lambda folder: copy(folder, precision, work.progress)

    def write(folder: Path) -> None:
        with work.scratch() as converted:
            with work.progress(f"converting {file.name}"):
                convert_gguf(file, converted)
            write_target(converted, folder, precision, work.progress, adapters=adapters)

    wheel = _with(pypi.model_dump(exclude={"local"}), loras)
    return wheel, need + part.parameters * 4 + _SMALL_FILES, write  # 4: the conversion is in fp32


def _with(inputs: dict[str, object], loras: list[dict[str, object]]) -> dict[str, object]:
    """The inputs of a target, and its adapters where it has some."""
    return {"target": inputs, "lora": loras} if loras else inputs


def _drafter(plan: Plan, part: Part, work: StageCache) -> tuple[object, int, Run]:
    """Inputs, bytes needed and writer of a drafter's stage: it is rewritten with every field explicit."""
    source, dtype = Path(part.source), DTYPES[plan.recipe.precision]
    files = hash_files(source, source_files(source), work.progress)
    inputs = {"config": part.kind.geometry(part.config), "files": files}
    if plan.recipe.drafters.vocabulary is not None:
        inputs["draft_vocabulary"] = digest(part.draft_config.draft_vocabulary)
    need = part.parameters * dtype.itemsize + _SMALL_FILES
    return inputs, need, lambda folder: part.kind.copy(source, folder, dtype, part.config)


def _with_vocabulary(plan: Plan, target: Path) -> tuple[Plan, Ranking | None]:
    """The plan with the ids that its drafters draft among, by the tokenizer of the built target, and their ranking."""
    if (cut := plan.recipe.drafters.vocabulary) is None or plan.target is None:
        return plan, None
    ranking, drafters = rank(plan.recipe, load_tokenizer(target), plan.target.config.vocab_size), dict(plan.drafters)
    for role, part in drafters.items():
        whole = read_drafter(plan.recipe.drafters.sources[role], Path(part.source))
        drafters[role] = replace(part, config=narrowed(whole, ranking.order, cut.size))
    return replace(plan, drafters=drafters), ranking


def _fit(fit: Fit, work: StageCache, manifest: Manifest, folder: Path) -> None:
    calibration = fit.run(assemble(work.bundle, manifest))
    folder.mkdir(parents=True)
    write_calibration(folder / CALIBRATION_NAME, calibration)


def _calibrated(recipe: Recipe) -> Recipe:
    """The recipe with the calibration in its bundle."""
    drafters = recipe.drafters.model_copy(update={"calibration": Source(path=CALIBRATION)})
    return recipe.model_copy(update={"drafters": drafters})


def _write_calibration(plan: Plan, calibration: CalibrationFile, folder: Path) -> None:
    """Write the recipe's calibration. Raises `BuildError` if it was fitted to other drafters."""
    for role, part in plan.drafters.items():
        fitted = calibration.drafters.get(role.key)
        fingerprint = part.kind.fingerprint(part.kind.load(Path(part.source), torch.float32, part.config))
        if fingerprint != fitted:
            source = plan.recipe.drafters.calibration
            assert source is not None
            raise BuildError(
                f"The calibration was fitted to another {role.key} drafter.",
                where=f"{located(plan.recipe, source)}: drafters.{role.key}",
                found=fitted,
                expected=fingerprint,
                fix="run d2sd calibrate on a bundle with these drafters",
            )
    folder.mkdir(parents=True)
    write_calibration(folder / CALIBRATION_NAME, calibration)


def _target_geometry(part: Part) -> TargetGeometry:
    assert isinstance(part.config, DecoderConfig)
    body = part.body
    return TargetGeometry(
        family=part.config.family,
        num_layers=body.num_layers,
        hidden_size=body.hidden_size,
        num_heads=body.num_heads,
        num_kv_heads=body.num_kv_heads,
        head_dim=body.head_dim,
        vocab_size=part.config.vocab_size,
        parameters=part.parameters,
        licence=part.licence,
        quantization=None if part.choice is None else part.choice.text,
    )


def _drafter_geometry(part: Part, ranking: Ranking | None) -> DrafterGeometry:
    config = part.draft_config
    ids = config.draft_vocabulary
    common: dict[str, JsonValue] = {
        "num_layers": config.body.num_layers,
        "block_size": config.block_size,
        "parameters": part.parameters,
        "licence": part.licence,
    }
    if ids is not None:
        common |= {"draft_vocabulary": len(ids)} | ({"coverage": ranking.coverage(ids)} if ranking else {})
    return DrafterGeometry.model_validate(common | part.kind.geometry(config))
