"""`d2sd train`: the drafters a training recipe names, stage by stage, each resumable."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from d2sd.cli.report import Reporting, bar
from d2sd.errors import D2SDError

if TYPE_CHECKING:
    from d2sd.convert.bundle import Bundle
    from d2sd.modeling.drafter import Drafter
    from d2sd.runtime.request import Request
    from d2sd.train.features import FeatureCache
    from d2sd.train.prompts import Job
    from d2sd.train_recipe import TrainRecipe, TrainSettings


@click.command(cls=Reporting)
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--work",
    type=click.Path(path_type=Path),
    help="Folder of answers, features and states.  [default: training/<name>]",
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder that gets first/ and second/.")
def train(recipe: Path, work: Path | None, out: Path) -> None:
    """Train the drafters that RECIPE names: answers by the target, cached features, first drafter, second drafter.

    Interrupted, it goes on where it stopped.

    For example:

        d2sd train recipes/train/smollm2-135m.yaml --out models/smollm2-135m
    """
    from d2sd.convert.bundle import load_bundle
    from d2sd.train.initial import drafter_config
    from d2sd.train_recipe import load_train_recipe

    loaded = load_train_recipe(recipe)
    work = work or Path("training") / loaded.name
    jobs = _jobs(loaded)
    bundle = _target(loaded, work)
    drafter_config(loaded.drafter, bundle.target.config, None)  # refuses a misfit before hours of work, not after
    _answer_all(loaded, jobs, bundle, work / "answers.jsonl")
    bundle = load_bundle(work / "target", verify=False)  # an engine may repack the weights that it runs
    data = _features(loaded, jobs, bundle, work)
    first = _train(loaded, loaded.first, bundle, data, work / "first", None)
    _write(first, out / "first")
    if loaded.second is not None:
        _write(_train(loaded, loaded.second, bundle, data, work / "second", first), out / "second")


def _jobs(recipe: TrainRecipe) -> list[Job]:
    from d2sd.cli.serving import read_prompts
    from d2sd.train.prompts import plan_prompts

    files = [(read_prompts(recipe.path(source.path)), source.count) for source in recipe.data.prompts]
    return plan_prompts(files, recipe.data)


def _target(recipe: TrainRecipe, work: Path) -> Bundle:
    """The target alone is a bundle too: the build fetches, converts, verifies and resumes it for us."""
    from d2sd.convert.build import build
    from d2sd.convert.bundle import load_bundle
    from d2sd.manifest import NAME, load_manifest
    from d2sd.recipe import Drafters, Limits, Recipe, Sampling, Tree

    folder, data, batch = work / "target", recipe.data, recipe.max_batch
    if (folder / NAME).is_file():
        before = load_manifest(folder).recipe
        if (before.target, before.precision) != (recipe.target, recipe.precision):
            raise D2SDError(
                "the target changed since this training began", where=folder,
                found=f"{recipe.target}, {recipe.precision}", expected=f"{before.target}, {before.precision}",
                fix="restore the recipe, or train into another --work folder",
            )  # fmt: skip
    new_tokens = max(data.max_new_tokens, data.self_written.max_tokens if data.self_written else 0)
    plain = Recipe(
        d2sd=1, name=f"{recipe.name}-target", target=recipe.target, drafters=Drafters(), precision=recipe.precision,
        tree=Tree(policy="off"),
        sampling=Sampling(max_new_tokens=new_tokens),
        limits=Limits(
            max_batch=batch,
            max_context=-(-(data.max_prompt_tokens + new_tokens) // 16) * 16,
            prefill_chunk=4 * batch,
        ),
    )  # fmt: skip
    plain = plain.at(recipe.folder)
    build(plain, folder, check=lambda bundle: {}, progress=bar)
    return load_bundle(folder, progress=bar)


def _answer_all(recipe: TrainRecipe, jobs: list[Job], bundle: Bundle, path: Path) -> None:
    """Answer every prompt in flight, appending each answer to `path`; those already there are not asked again.

    A prompt that is too long, or that the target did not end, leaves an empty answer.
    """
    from d2sd.cli.serving import make_engine
    from d2sd.train.answers import append_answer, finished_ids

    engine = make_engine(bundle, policy="off")
    done = finished_ids(path)
    jobs = [job for job in jobs if job.id not in done]
    running: dict[int, Job] = {}
    with bar("answers", len(jobs)) as advance, path.open("a", encoding="utf-8") as out:

        def finish(job: Job, prompt: Sequence[int] = (), answer: Sequence[int] = ()) -> None:
            append_answer(out, job.id, prompt, answer)
            advance(1)

        def start(job: Job) -> None:
            request = _request(recipe, bundle, job)
            if len(request.prompt) <= recipe.data.max_prompt_tokens:
                running[engine.submit(request).id] = job
            else:
                finish(job)

        for job in jobs:
            start(job)
        while engine.busy:
            for output in engine.step():
                if output.finish is None:
                    continue
                job, sequence = running.pop(output.sequence.id), output.sequence
                if job.written:
                    finish(job, sequence.request.prompt, sequence.answer)
                elif output.finish == "stop":  # the turn came to its own end
                    turn = job.text + bundle.tokenizer.decode(sequence.answer, skip_special_tokens=True)
                    start(replace(job, text=turn, written=True))
                else:
                    finish(job)


def _request(recipe: TrainRecipe, bundle: Bundle, job: Job) -> Request:
    """What the engine is asked: to answer a user turn, or to go on with the opening of one."""
    from d2sd.cli.serving import chat_request
    from d2sd.runtime.request import Request, SamplingParams

    if job.written:
        return chat_request(bundle, job.text, SamplingParams(), recipe.data.max_new_tokens)
    wanted, tokenizer = recipe.data.self_written, bundle.tokenizer
    assert wanted is not None
    if not tokenizer.chat_template:
        raise D2SDError("the target has no chat template to write user turns in", where="data.self_written")
    turns = [{"role": "user", "content": _SPLIT}]
    before = tokenizer.apply_chat_template(turns, tokenize=False).split(_SPLIT)[0]
    ids = tokenizer(before + job.text, add_special_tokens=False).input_ids
    sampling = SamplingParams(wanted.temperature, seed=zlib.crc32(job.id.encode()))
    return Request(tuple(ids), wanted.max_tokens, sampling, frozenset(bundle.stop_token_ids))


#: Stands for the user's turn, to see what the chat template puts before it.
_SPLIT = "\x00"


def _features(recipe: TrainRecipe, jobs: list[Job], bundle: Bundle, work: Path) -> FeatureCache:
    from d2sd.convert.files import disk_space
    from d2sd.train.answers import read_answers
    from d2sd.train.features import cache_features

    answers = read_answers(work / "answers.jsonl", vocab_size=bundle.target.config.vocab_size)
    # In the order of the jobs: short answers finish early, and what is held out is the first of them.
    place = {job.id: index for index, job in enumerate(jobs)}
    answers.sort(key=lambda answer: place.get(answer.id, len(place)))
    with bar("features", len(answers)) as advance, disk_space(work, 0, "the features"):
        return cache_features(
            bundle.target, tuple(recipe.drafter.target_layer_ids), answers, work / "features.bf16", advance
        )


def _train(
    recipe: TrainRecipe,
    settings: TrainSettings,
    bundle: Bundle,
    data: FeatureCache,
    folder: Path,
    first: Drafter | None,
) -> Drafter:
    """The first drafter, or with `first` the second, which starts from it."""
    import torch

    from d2sd.modeling.drafter import Drafter
    from d2sd.train.estimate import estimate_tau
    from d2sd.train.initial import drafter_config, drafter_from_target
    from d2sd.train.loop import Trainer

    config = drafter_config(recipe.drafter, bundle.target.config, settings.prefix_base if first else None)
    held_out, rest = data.split(recipe.data.held_out)
    if first is None:
        sample = torch.cat([rest[i].features[1:] for i in range(min(64, len(rest)))])  # the first token is an outlier
        drafter = drafter_from_target(config, bundle.target, sample, torch.Generator().manual_seed(settings.seed))
    else:
        drafter = Drafter(config)
        drafter.load_state_dict(first.state_dict())
    trainer = Trainer(bundle.target, drafter, rest, settings, first)
    with (
        bar(f"training {folder.name}", settings.steps) as advance,
        (folder.parent / f"{folder.name}.csv").open("a") as log,
    ):
        shown = 0

        def report(step: int, loss: float) -> None:
            nonlocal shown
            advance(step - shown)  # the first step after a resumption stands for those before it
            shown = step
            log.write(f"{step},{loss:.5f}\n")
            log.flush()

        trainer.run(folder, report)
        advance(settings.steps - shown)  # all of them, where an earlier run had finished
    if first is None:
        click.echo(
            f"teacher-forced tau on {len(held_out)} held-out answers: "
            f"{estimate_tau(bundle.target, drafter, held_out):.3f}"
        )
    return drafter


def _write(drafter: Drafter, folder: Path) -> None:
    import torch

    from d2sd.convert.drafter import write_drafter

    folder.mkdir(parents=True, exist_ok=True)
    write_drafter(folder, drafter.config, {k: v.to(torch.bfloat16) for k, v in drafter.state_dict().items()})
    click.echo(folder)
