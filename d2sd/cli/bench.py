"""`d2sd bench`: every method on one runtime, in one run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import click
from click.core import ParameterSource

from d2sd.bench.compare import compare as compared
from d2sd.bench.estimate import duration, estimated_seconds
from d2sd.bench.matrix import Matrix, read_sets, with_copies
from d2sd.bench.result import Settings, load_result
from d2sd.bench.run import Run, own_folder
from d2sd.bench.summary import remarks, summary
from d2sd.bundle.devices import BackendName
from d2sd.bundle.load import load_bundle
from d2sd.bundle.serving import can_run
from d2sd.cli.options import FilePath, backend_option, device_option
from d2sd.cli.report import Reporting
from d2sd.console import show_table
from d2sd.extras import require_plots
from d2sd.option_types import Listed, Method
from d2sd.progress import bar
from d2sd.recipe import Policy

#: What `--quick` measures where an option is not given.
QUICK_METHODS: tuple[Policy, ...] = ("chain", "ddtree", "hybrid", "auto")
QUICK = {"rows": [64], "temperatures": [0.0], "per_set": 4, "max_new_tokens": 32}


class Quick(Reporting):
    """A command whose options have other defaults under `--quick`."""

    def invoke(self, ctx: click.Context) -> Any:
        """Replace the values that were not given, and run."""
        if ctx.params["quick"]:
            for name, value in QUICK.items():
                if ctx.get_parameter_source(name) is ParameterSource.DEFAULT:
                    ctx.params[name] = value
        return super().invoke(ctx)


@click.command(cls=Quick)
@click.argument("bundle", type=FilePath, required=False)
@click.option(
    "--quick",
    is_flag=True,
    help="Few policies at 64 rows, T = 0, 4 prompts, 32 tokens: a minute or two with SmolLM2 on a CPU.",
)
@click.option(
    "--methods", type=Listed(Method()), help="Policies; +lookup: with copies; name:rows.  [default: all that can run]"
)
@click.option(
    "--rows", type=Listed(click.IntRange(2, 4096)), default="16,32,64", show_default=True, help="Row budgets."
)
@click.option(
    "--prompts",
    type=FilePath,
    multiple=True,
    help="A set: JSONL of {id, turns}; repeatable. A folder is all sets in it.  [default: our own two dozen]",
)
@click.option("--temperatures", type=Listed(click.FloatRange(0, 99)), default="0,1", show_default=True)
@click.option("--concurrency", type=Listed(click.IntRange(1, 1024)), default="1", show_default=True)
@click.option("--per-set", type=click.IntRange(1), default=16, show_default=True, help="Prompts of each set.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--repeat", type=click.IntRange(1), default=1, show_default=True, help="Runs a cell; the median counts.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@device_option
@backend_option
@click.option("--out", type=FilePath, help="Folder of the results.  [default: build/bench/<folder of BUNDLE>]")
@click.option("--plan", is_flag=True, help="Print what would be measured, and how long it may take here.")
@click.option("--compare", nargs=2, type=FilePath, metavar="A.json B.json", help="Ratios of two results, B to A.")
def bench(
    bundle: Path | None, quick: bool, methods: list[str] | None, rows: list[int], prompts: tuple[Path, ...],
    temperatures: list[float], concurrency: list[int], per_set: int, max_new_tokens: int, repeat: int, seed: int,
    device: str, backend: BackendName, out: Path | None, plan: bool, compare: tuple[Path, Path] | None,
) -> None:  # fmt: skip
    """Measure BUNDLE: tokens per step, acceptance, cost and speed of every method.

    Writes JSON, tables and plots, and prints the main table. Every answer is compared with that of plain decoding. An
    interrupted run resumes where it stopped.

    For example:

        d2sd bench bundles/smollm2-135m --quick

        d2sd bench bundles/smollm2-135m --methods chain,ddtree,hybrid --rows 16,64
    """
    if compare is not None:
        click.echo(compared(load_result(compare[0]), load_result(compare[1])))
        return
    if bundle is None:
        raise click.UsageError("name a bundle, or two results with --compare")
    loaded = replace(load_bundle(bundle, progress=bar), keep=False)
    tree = loaded.recipe.tree
    sets = read_sets(prompts, per_set)
    device = {"torch": device, "onnx": "cpu", "tensorrt": "cuda"}[backend]
    runs = [name for name in (QUICK_METHODS if quick else get_args(Policy)) if can_run(loaded.draft_configs, name)]
    methods = methods or (with_copies(runs) if tree.lookup else runs)
    matrix = Matrix(methods, rows, list(sets), temperatures, concurrency, tree.block_size)
    if plan:
        click.echo(matrix.plan(sets, repeat))
        seconds = estimated_seconds(loaded, matrix, sets, max_new_tokens, device, backend)
        least, most = (duration(each * repeat) for each in seconds)
        click.echo(f"about {least} to {most} on this machine, without the time in which `auto` measures step costs")
        return
    require_plots()  # now, not after hours of measuring
    settings = Settings(
        per_set=per_set, max_new_tokens=max_new_tokens, block_size=tree.block_size, branches=tree.branches, seed=seed
    )
    out = out or own_folder(loaded)
    for path in Run(loaded, matrix, sets, settings, repeat, device, backend, out).all():
        click.echo(path)
    result = load_result(out / "result.json")
    show_table(summary(result))
    click.echo("\n".join(remarks(result)))
