"""`d2sd train --plan`: the stages of a training, how much of each is done, and the time left. Nothing is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from d2sd.build.plan import Part, make_plan
from d2sd.build.sources import located
from d2sd.manifest import NAME
from d2sd.modeling.config import DecoderConfig
from d2sd.policies import DrafterName
from d2sd.recipe import Target
from d2sd.train.data.features import read_progress
from d2sd.train.data.prompts import take_turns
from d2sd.train.data.responses import KIND, finished_ids, read_responses
from d2sd.train.pipeline.log import pace, seconds_each
from d2sd.train.pipeline.models import check_geometry, plain_recipe
from d2sd.train.pipeline.responses import planned_jobs, read_screened
from d2sd.train_recipe import TrainRecipe, TrainSettings


def plan(recipe: TrainRecipe, work: Path, out: Path) -> Iterator[tuple[str, str]]:
    """(stage, its state) in order. Raises the D2SDErrors of a run, also for damaged work files."""
    target = make_plan(plain_recipe(recipe)).target
    ready = {role: located(recipe, source) for role, source in recipe.ready.items()}
    found = [*ready.values(), *(located(recipe, source) for source in recipe.starts.values())]
    if target is not None and None not in found:
        assert isinstance(target.config, DecoderConfig)
        check_geometry(recipe, target.config)
    yield "target", f"{_named(recipe.target)}, {'ready' if (work / 'target' / NAME).is_file() else 'to be built'}"
    yield from _prompts(recipe, work)
    yield "features", _features(recipe, work, target)
    for role, folder in ready.items():
        yield f"{role.key} drafter", f"ready: {folder}" if folder is not None else "ready, to be fetched"
    for role, settings in recipe.trained.items():
        yield f"{role.key} drafter", _training(role.key, settings, work)
    if recipe.head is not None:
        yield "heads", f"{recipe.head.steps:,} steps each"
    yield "evaluation", f"{recipe.evaluation.prompts} held-out prompts, {recipe.evaluation.max_new_tokens} tokens each"
    yield "calibration", f"{recipe.data.held_out} held-out prompts"
    yield "out", f"{out}, work in {work}"


def _named(target: Target) -> str:
    if target.pypi is not None:
        return f"{target.pypi.file} of {target.pypi.package}=={target.pypi.version}"
    return str(target.path)


def _prompts(recipe: TrainRecipe, work: Path) -> Iterator[tuple[str, str]]:
    jobs = planned_jobs(recipe)
    opened = sum(job.kind is not None for job in jobs)
    if opened:
        missing = sum(job.kind is not None for job in take_turns(jobs, work)[0])
        left = _left(pace(work, "turns"), missing)
        yield "turns", f"{opened - missing:,} of {opened:,} written by the target{left}"
    done = len(finished_ids(work).keys() & {job.id for job in jobs})
    screened = read_screened(work)
    known = screened is not None and screened.planned == len(jobs)
    total = screened.asked if screened is not None and known else len(jobs)
    left = _left(pace(work, KIND), total - done)
    yield "answers", f"{done:,} of {'' if known else 'at most '}{total:,} prompts answered{left}"


def _features(recipe: TrainRecipe, work: Path, target: Part | None) -> str:
    if recipe.data.features != "cached":
        how = "online" if recipe.data.features == "online" else "in the memory of the device"
        return f"computed {how}, nothing is stored"
    if target is None:
        return "size unknown: the target is not fetched yet"
    data, vocab_size = recipe.data, getattr(target.config, "vocab_size", 0)
    known = any(reason is None for reason in finished_ids(work).values())
    responses = read_responses(work, vocab_size=vocab_size) if known else []
    limit = len(planned_jobs(recipe)) * (data.max_prompt_tokens + data.max_new_tokens)
    tokens = sum(len(r.prompt_ids) + len(r.response_ids) for r in responses) or limit
    width = target.body.hidden_size * (len(recipe.shape.aux_layer_ids(target.body.num_layers)) + 1)
    size = f"{2 * width * tokens / 1e6:,.1f} MB {'for the responses so far' if responses else 'at most'}"
    progress = read_progress(work / "features.json")
    done = progress.done if progress is not None else 0
    return f"{done:,} sequences stored, {size}{_left(pace(work, 'features'), len(responses) - done)}"


def _training(name: DrafterName, settings: TrainSettings, work: Path) -> str:
    done, step, evaluation = seconds_each(work, name)
    seconds = None if step is None else (settings.steps - done) * step
    if seconds is not None and evaluation is not None:
        seconds += evaluation * (settings.steps // settings.evaluate_every - done // settings.evaluate_every)
    return f"{done:,} of {settings.steps:,} steps{_left(seconds, 1 if done < settings.steps else 0)}"


def _left(seconds_each: float | None, count: int) -> str:
    """The time left, at the measured speed."""
    if count <= 0:
        return ""
    if seconds_each is None:
        return "; time unknown"
    seconds = seconds_each * count
    unit, size = ("h", 3600) if seconds >= 7200 else ("min", 60) if seconds >= 120 else ("s", 1)
    return f"; about {seconds / size:,.0f} {unit} left at the pace so far"
