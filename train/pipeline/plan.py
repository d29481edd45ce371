"""`d2sd train --plan`: the stages of a training, what is done of each, and what is to come. Nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import click

from d2sd.bench.result import Drafter
from d2sd.convert.build.plan import Part, make_plan
from d2sd.convert.build.sources import located
from d2sd.manifest import NAME
from d2sd.modeling.config import DecoderConfig
from d2sd.recipe import Target
from d2sd.train.data.prompts import take_turns
from d2sd.train.data.responses import KIND, finished_ids, read_answers
from d2sd.train.pipeline.log import pace, seconds_each
from d2sd.train.pipeline.ready import first_config
from d2sd.train.pipeline.responses import SCREENED, planned_jobs
from d2sd.train.pipeline.target import plain_recipe
from d2sd.train_recipe import TrainRecipe, TrainSettings


def show_plan(recipe: TrainRecipe, work: Path, out: Path) -> None:
    """Print it. Raises D2SDError for what would be refused before any work."""
    target = make_plan(plain_recipe(recipe)).target
    ready = located(recipe, recipe.ready_first) if recipe.ready_first is not None else None
    if target is not None and (recipe.ready_first is None or ready is not None):
        assert isinstance(target.config, DecoderConfig)
        first_config(recipe, target.config)
    _line("target", f"{_named(recipe.target)}, {'ready' if (work / 'target' / NAME).is_file() else 'to be built'}")
    _prompts(recipe, work)
    _features(recipe, work, target)
    if recipe.ready_first is not None:
        _line("first drafter", f"ready: {ready}" if ready is not None else "ready, to be fetched")
    trained: tuple[tuple[Drafter, TrainSettings | None], ...] = ("first", recipe.first), ("second", recipe.second)
    for name, settings in trained:
        if settings is not None:
            _training(name, settings, work)
    _line("evaluation", f"{recipe.evaluation.prompts} held-out prompts, {recipe.evaluation.max_new_tokens} tokens each")
    _line("calibration", f"{recipe.data.held_out} held-out prompts")
    _line("out", f"{out}, work in {work}")


def _named(target: Target) -> str:
    if target.pypi is not None:
        return f"{target.pypi.file} of {target.pypi.package}=={target.pypi.version}"
    return target.path or f"{target.hf}"


def _prompts(recipe: TrainRecipe, work: Path) -> None:
    jobs = planned_jobs(recipe)
    opened = sum(job.kind is not None for job in jobs)
    if opened:
        missing = sum(job.kind is not None for job in take_turns(jobs, work)[0])
        _line("turns", f"{opened - missing:,} of {opened:,} written by the target{_left(pace(work, 'turns'), missing)}")
    done = len(finished_ids(work).keys() & {job.id for job in jobs})
    path = work / SCREENED
    screened = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    known = screened.get("planned") == len(jobs)
    asked = screened["asked"] if known else len(jobs)
    left = _left(pace(work, KIND), asked - done)
    _line("answers", f"{done:,} of {'' if known else 'at most '}{asked:,} prompts answered{left}")


def _features(recipe: TrainRecipe, work: Path, target: Part | None) -> None:
    if recipe.data.features == "online":
        _line("features", "computed whenever they are needed, nothing is stored")
        return
    if target is None:
        _line("features", "the target is not fetched yet, so their size is unknown")
        return
    data, vocab_size = recipe.data, getattr(target.config, "vocab_size", 0)
    known = any(reason is None for reason in finished_ids(work).values())
    answers = read_answers(work, vocab_size=vocab_size) if known else []
    most = len(planned_jobs(recipe)) * (data.max_prompt_tokens + data.max_new_tokens)
    tokens = sum(len(answer.prompt_ids) + len(answer.answer_ids) for answer in answers) or most
    width = target.body.hidden_size * (len(recipe.drafter.target_layer_ids) + 1)
    size = f"{2 * width * tokens / 1e6:,.1f} MB {'for the answers so far' if answers else 'at most'}"
    path = work / "features.json"
    done = json.loads(path.read_text("utf-8"))["done"] if path.is_file() else 0
    _line("features", f"{done:,} sequences stored, {size}{_left(pace(work, 'features'), len(answers) - done)}")


def _training(name: Drafter, settings: TrainSettings, work: Path) -> None:
    done, step, evaluation = seconds_each(work, name)
    seconds = None if step is None else (settings.steps - done) * step
    if seconds is not None and evaluation is not None:
        seconds += evaluation * (settings.steps // settings.evaluate_every - done // settings.evaluate_every)
    _line(f"{name} drafter", f"{done:,} of {settings.steps:,} steps{_left(seconds, 1 if done < settings.steps else 0)}")


def _left(seconds_each: float | None, count: int) -> str:
    """Of the time that is left, what is known from measuring."""
    if count <= 0:
        return ""
    if seconds_each is None:
        return "; time unknown"
    seconds = seconds_each * count
    unit, size = ("h", 3600) if seconds >= 7200 else ("min", 60) if seconds >= 120 else ("s", 1)
    return f"; about {seconds / size:,.0f} {unit} left at the pace so far"


def _line(label: str, text: str) -> None:
    click.echo(f"{label:16}{text}")
