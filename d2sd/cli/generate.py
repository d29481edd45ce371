"""`d2sd generate`: text from a bundle, and what speculation did for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from d2sd.cli.report import Reporting, bar
from d2sd.recipe import Policy

if TYPE_CHECKING:
    from d2sd.runtime.engine import Engine, StepTrace
    from d2sd.runtime.sequence import Sequence


@click.command(cls=Reporting)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "-p", "--prompt", "prompts", multiple=True, required=True, help="User turn; repeatable: they run in one batch."
)
@click.option("--policy", type=click.Choice(get_args(Policy)), help="Tree policy.  [default: the bundle's]")
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
@click.option("--show-tree", is_flag=True, help="Draw the tree of the step that accepted most.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
def generate(
    bundle: Path, prompts: tuple[str, ...], policy: Policy | None, max_new_tokens: int | None,
    temperature: float | None, top_p: float | None, top_k: int | None, seed: int | None, stop: tuple[str, ...],
    raw: bool, stats: bool, show_tree: bool, device: str,
) -> None:  # fmt: skip
    """Generate from the bundle at BUNDLE; a single answer streams as it is written.

    For example:

        d2sd generate bundles/smollm2-135m -p "Why is the sky blue?" --stats
    """
    from d2sd.cli.serving import chat_request, make_engine
    from d2sd.convert.bundle import load_bundle
    from d2sd.runtime.request import SamplingParams

    loaded = load_bundle(bundle, progress=bar)
    defaults = loaded.recipe.sampling
    sampling = SamplingParams(
        temperature=defaults.temperature if temperature is None else temperature,
        top_p=defaults.top_p if top_p is None else top_p,
        top_k=defaults.top_k if top_k is None else top_k,
        seed=defaults.seed if seed is None else seed,
    )
    length = defaults.max_new_tokens if max_new_tokens is None else max_new_tokens
    requests = [chat_request(loaded, text, sampling, length, raw=raw, stop=stop) for text in prompts]
    engine = make_engine(loaded, policy=policy, device=device)
    sequences = [engine.submit(request) for request in requests]
    best = _write(engine, dict(zip(sequences, prompts, strict=True)))
    if show_tree and best is not None:
        from rich.console import Console

        from d2sd.cli.draw import draw_tree

        Console().print(draw_tree(*best, lambda token: loaded.tokenizer.decode([token])))
    if stats:
        from d2sd.cli.stats import show_stats

        baseline = make_engine(loaded, policy="off", device=device)
        with bar("timing plain decoding"):
            baseline.generate([replace(request, max_new_tokens=min(8, length)) for request in requests])
        show_stats([s.stats for s in sequences], engine.clock, baseline.clock)


def _write(engine: Engine, prompts: dict[Sequence, str]) -> tuple[StepTrace, int] | None:
    """Run to the end, writing answers; returns the step that accepted most, and its row in the batch.

    A single answer streams; several are written whole, each when it is finished.
    """
    texts = dict.fromkeys(prompts, "")
    best, most = None, 0
    while engine.busy:
        for output in engine.step():
            if len(prompts) == 1:
                click.echo(output.text, nl=False)
            texts[output.sequence] += output.text
            if output.finish is not None and len(prompts) > 1:
                click.secho(f"> {prompts[output.sequence]}", dim=True)
                click.echo(texts[output.sequence] + "\n")
            if len(output.tokens) > most and engine.trace is not None:
                best, most = (engine.trace, engine.trace.sequences.index(output.sequence)), len(output.tokens)
    if len(prompts) == 1:
        click.echo()
    return best
