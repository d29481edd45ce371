"""`d2sd train`: the drafters a training recipe names, stage by stage, each resumable."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from d2sd.cli.report import Reporting, bar

if TYPE_CHECKING:
    from d2sd.convert.bundle import Bundle
    from d2sd.modeling.drafter import Drafter
    from d2sd.train.features import FeatureCache
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
    from d2sd.train_recipe import load_train_recipe

    loaded = load_train_recipe(recipe)
    work = work or Path("training") / loaded.name
    work.mkdir(parents=True, exist_ok=True)
    bundle = _target(loaded, work)
    _answer_all(loaded, bundle, work / "answers.jsonl")
    data = _features(loaded, bundle, work)
    first = _train(loaded, loaded.first, bundle, data, work / "first", None)
    _write(first, out / "first")
    if loaded.second is not None:
        _write(_train(loaded, loaded.second, bundle, data, work / "second", first), out / "second")


def _target(recipe: TrainRecipe, work: Path) -> Bundle:
    """The target alone is a bundle too: the build fetches, converts, verifies and resumes it for us."""
    from d2sd.convert.build import build
    from d2sd.convert.bundle import load_bundle
    from d2sd.recipe import Drafters, Limits, Recipe, Tree

    length, batch = recipe.data.max_prompt_tokens + recipe.data.max_new_tokens, recipe.max_batch
    plain = Recipe(
        d2sd=1, name=f"{recipe.name}-target", target=recipe.target, drafters=Drafters(), precision=recipe.precision,
        tree=Tree(policy="off"),
        limits=Limits(max_batch=batch, max_context=-(-length // 16) * 16, prefill_chunk=4 * batch),
    )  # fmt: skip
    plain = plain.at(recipe.folder)
    build(plain, work / "target", check=lambda bundle: {}, progress=bar)
    return load_bundle(work / "target", progress=bar)


def _answer_all(recipe: TrainRecipe, bundle: Bundle, path: Path) -> None:
    """Answer every prompt in flight, appending each answer to `path`; those already there are not asked again."""
    from d2sd.cli.serving import chat_request, make_engine, read_prompts
    from d2sd.runtime.request import Request, SamplingParams
    from d2sd.train.answers import append_answer, finished_ids
    from d2sd.train.prompts import Job, plan_prompts

    data = recipe.data
    done = finished_ids(path)
    files = [(read_prompts(recipe.path(source.path)), source.count) for source in data.prompts]
    jobs = [job for job in plan_prompts(files, data) if job.id not in done]
    engine = make_engine(bundle, policy="off")
    running: dict[int, Job] = {}

    def start(job: Job) -> None:
        if job.written:
            request = chat_request(bundle, job.text, SamplingParams(), data.max_new_tokens)
        else:
            assert data.self_written is not None
            sampling = SamplingParams(data.self_written.temperature, seed=zlib.crc32(job.id.encode()))
            head = bundle.tokenizer.apply_chat_template([{"role": "user", "content": _SPLIT}], tokenize=False).split(
                _SPLIT
            )[0]
            ids = bundle.tokenizer(head + job.text, add_special_tokens=False).input_ids
            request = Request(tuple(ids), data.self_written.max_tokens, sampling, frozenset(bundle.stop_token_ids))
        if len(request.prompt) <= data.max_prompt_tokens:
            running[engine.submit(request).id] = job

    for job in jobs:
        start(job)
    with bar("answers", len(running)) as advance, path.open("a") as out:
        while engine.busy:
            for output in engine.step():
                if output.finish is None:
                    continue
                job, sequence = running.pop(output.sequence.id), output.sequence
                if job.written:
                    append_answer(out, job.id, sequence.request.prompt, sequence.answer)
                    advance(1)
                elif output.finish == "stop":  # the turn came to its own end
                    start(
                        Job(
                            job.id,
                            job.text + bundle.tokenizer.decode(sequence.answer, skip_special_tokens=True),
                            written=True,
                        )
                    )


#: Stands for the user's turn, to see what the chat template puts before it.
_SPLIT = "\x00"


def _features(recipe: TrainRecipe, bundle: Bundle, work: Path) -> FeatureCache:
    from d2sd.train.answers import read_answers
    from d2sd.train.features import cache_features

    answers = read_answers(work / "answers.jsonl", vocab_size=bundle.target.config.vocab_size)
    with bar("features", len(answers)) as advance:
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

        def report(step: int, loss: float) -> None:
            advance(1)
            log.write(f"{step},{loss:.5f}\n")
            log.flush()

        trainer.run(folder, report)
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
