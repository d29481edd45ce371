"""`d2sd generate`: text from a bundle, with statistics and pictures of the speculation."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from d2sd.bench.answers import write_answers, write_pictures
from d2sd.bench.speculation_table import show_stats, time_plain
from d2sd.bundle.backends import BackendName
from d2sd.bundle.options import EngineOptions
from d2sd.bundle.serving import chat_request
from d2sd.cli.options import (
    FilePath,
    backend_option,
    bundle_argument,
    device_option,
    policy_option,
    tensor_parallel_option,
)
from d2sd.cli.report import Reporting
from d2sd.io import check_writable, size_text
from d2sd.progress import bar
from d2sd.recipe import Method
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.sequence import Sequence
from d2sd.runtime.text import TextStream
from d2sd.viz.record import Recording


@click.command(cls=Reporting)
@bundle_argument
@click.option(
    "-p", "--prompt", "prompts", multiple=True, required=True, help="User turn; repeatable: they run in one batch."
)
@policy_option
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
@device_option
@tensor_parallel_option
@backend_option
def generate(
    bundle: Path, prompts: tuple[str, ...], policy: Method | None, max_new_tokens: int | None,
    temperature: float | None, top_p: float | None, top_k: int | None, seed: int | None, stop: tuple[str, ...],
    raw: bool, stats: bool, tree_svg: Path | None, html: Path | None, device: str,
    tensor_parallel: int, backend: BackendName,
) -> None:  # fmt: skip
    """Generate text from the bundle at BUNDLE.

    Answers stream, in the order of their prompts. With --stats every answer is generated again by plain decoding.

    For example:

        d2sd generate bundles/smollm2-135m -p "Why is the sky blue?" --stats
    """
    for path in filter(None, (tree_svg, html)):
        check_writable(path)
    how = EngineOptions(policy=policy, device=device, tensor_parallel=tensor_parallel, backend=backend)
    loaded = how.load(bundle, progress=bar)
    defaults = loaded.recipe.sampling
    options: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    sampling = SamplingParams(**{n: getattr(defaults, n) if value is None else value for n, value in options.items()})
    length = defaults.max_new_tokens if max_new_tokens is None else max_new_tokens
    requests = [chat_request(loaded, text, sampling, length, raw=raw, stop=stop) for text in prompts]
    how = how.model_copy(update={"max_batch": min(len(prompts), loaded.recipe.limits.max_batch)})
    engine = how.engine(loaded)
    sequences = [engine.submit(request) for request in requests]
    recordings: dict[Sequence, Recording] = {}
    if tree_svg is not None or html is not None:
        decode = loaded.tokenizer.decode
        text = partial(decode, skip_special_tokens=True)
        engine.record_trace = True
        recordings = {s: Recording(p, decode, TextStream(text)) for s, p in zip(sequences, prompts, strict=True)}
    write_answers(engine, dict(zip(sequences, prompts, strict=True)), recordings)
    if recordings:
        write_pictures(list(recordings.values()), tree_svg, html)
    if stats:
        for what, size in engine.runner.exchanged.items():
            click.echo(f"exchanged by {what}: {size_text(size // engine.clock.steps)} a step", err=True)
        served = [s.stats for s in sequences], engine.stats, engine.clock
        del engine  # its pools: those of two do not fit where one takes most of the memory
        make = partial(how.model_copy(update={"policy": "off"}).engine, loaded)
        show_stats(*served, time_plain(make, requests, sum(len(s.answer) for s in sequences)))
