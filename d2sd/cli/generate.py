"""`d2sd generate`: text from a bundle, with statistics and pictures of the speculation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from d2sd.bench.answers import write_answers, write_pictures
from d2sd.bench.speculation_table import show_stats, time_plain
from d2sd.bundle.options import EngineOptions
from d2sd.bundle.requests import chat_request, default_params
from d2sd.bundle.serving import make_engine
from d2sd.cli.options import FilePath, bundle_argument, engine_options
from d2sd.cli.report import Reporting
from d2sd.io import check_writable, size_text
from d2sd.progress import bar
from d2sd.runtime.sequence import Sequence
from d2sd.runtime.text import TextStream
from d2sd.viz.record import Recording


@click.command(cls=Reporting)
@bundle_argument
@click.option(
    "-p", "--prompt", "prompts", multiple=True, required=True, help="User turn; repeatable: they run in one batch."
)
@click.option("--max-new-tokens", type=int, help="Length limit of each answer.  [default: the bundle's]")
@click.option("--temperature", type=float, help="0 is greedy.  [default: the bundle's]")
@click.option("--top-p", type=float, help="[default: the bundle's]")
@click.option("--top-k", type=int, help="0 is off.  [default: the bundle's]")
@click.option(
    "--seed", type=int, help="The same seed gives the same text, whatever the policy.  [default: the bundle's]"
)
@click.option("--stop", multiple=True, help="Stop string; repeatable.")
@click.option("--raw", is_flag=True, help="Use the prompt as it is, without the chat template.")
@click.option("--stats", is_flag=True, help="Show tokens per step, acceptance, winning branches and the cycle cost.")
@click.option(
    "--tree-svg", type=FilePath, help="Write the tree of the step that accepted most to this file, as an SVG picture."
)
@click.option("--html", type=FilePath, help="Write a page that shows every step to this file.")
@engine_options("max_batch", "prefix_cache")
def generate(
    bundle: Path, prompts: tuple[str, ...], max_new_tokens: int | None, stop: tuple[str, ...], raw: bool, stats: bool,
    tree_svg: Path | None, html: Path | None, engine: EngineOptions, **sampling: float | None,
) -> None:  # fmt: skip
    """Generate text from the bundle at BUNDLE.

    Answers stream, in the order of their prompts. With --stats every answer is generated again by plain decoding.

    For example:

        d2sd generate bundles/smollm2-135m -p "Why is the sky blue?" --stats
    """
    for path in filter(None, (tree_svg, html)):
        check_writable(path)
    loaded = engine.load(bundle, progress=bar)
    defaults = loaded.recipe.sampling
    given = {name: value for name, value in sampling.items() if value is not None}
    params = default_params(loaded, **{"seed": defaults.seed} | given)
    length = defaults.max_new_tokens if max_new_tokens is None else max_new_tokens
    requests = [replace(chat_request(loaded, text, params, length, raw=raw), stop=stop) for text in prompts]
    options = engine.model_copy(update={"max_batch": min(len(prompts), loaded.recipe.limits.max_batch)})
    made = make_engine(loaded, options)
    sequences = [made.submit(request) for request in requests]
    recordings: dict[Sequence, Recording] = {}
    if tree_svg is not None or html is not None:
        decode = loaded.tokenizer.decode
        text = partial(decode, skip_special_tokens=True)
        made.record_trace = True
        recordings = {s: Recording(p, decode, TextStream(text)) for s, p in zip(sequences, prompts, strict=True)}
    write_answers(made, dict(zip(sequences, prompts, strict=True)), recordings)
    if recordings:
        write_pictures(list(recordings.values()), tree_svg, html)
    if stats:
        for what, size in made.runner.exchanged.items():
            click.echo(f"exchanged by {what}: {size_text(size // made.clock.steps)} a step", err=True)
        served = [s.stats for s in sequences], made.stats, made.clock
        del made  # its pools: those of two do not fit where one takes most of the memory
        make = partial(make_engine, loaded, options.model_copy(update={"policy": "off"}))
        show_stats(*served, time_plain(make, requests, sum(len(s.answer) for s in sequences)))
