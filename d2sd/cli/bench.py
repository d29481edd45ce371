"""`d2sd bench`: every method on one runtime, in one run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import click

from d2sd.bench.compare import compare as compared
from d2sd.bench.matrix import Matrix, read_sets
from d2sd.bench.result import Settings, load_result
from d2sd.bench.run import Run
from d2sd.cli.options import FilePath, backend_option, device_option
from d2sd.cli.report import Reporting
from d2sd.convert.bundle.backends import BackendName
from d2sd.convert.bundle.load import load_bundle
from d2sd.convert.bundle.serving import can_run
from d2sd.extras import require_plots
from d2sd.progress import bar
from d2sd.recipe import Policy


class Listed(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of Click only
    """Values separated by commas, each of one type."""

    name = "list"

    def __init__(self, one: Any) -> None:
        self.one = click.types.convert_type(one)

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> list[Any]:
        """Convert every value."""
        if isinstance(value, list):
            return value
        return [self.one.convert(part.strip(), param, ctx) for part in str(value).split(",")]


class Method(click.ParamType):  # type: ignore[type-arg]
    """A policy, or policy:rows."""

    name = "policy[:rows]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Raise a usage error unless the value is a policy or policy:rows."""
        policy, colon, rows = str(value).partition(":")
        click.Choice(get_args(Policy)).convert(policy, param, ctx)
        if colon and not (re.fullmatch("[0-9]{1,4}", rows) and 2 <= int(rows) <= 4096):
            self.fail(f"the rows of {str(value)[:80]!r} must be an integer from 2 to 4096, as in chain:16", param, ctx)
        return str(value)


@click.command(cls=Reporting)
@click.argument("bundle", type=FilePath, required=False)
@click.option(
    "--methods", type=Listed(Method()), help="Policies; name:rows for one budget.  [default: all the bundle can run]"
)
@click.option(
    "--rows", type=Listed(click.IntRange(2, 4096)), default="16,32,64", show_default=True, help="Row budgets."
)
@click.option(
    "--prompts", type=FilePath, multiple=True,
    help="A set: JSONL of {id, turns}; repeatable. A folder is all sets in it.  [default: our own two dozen]",
)  # fmt: skip
@click.option("--temperatures", type=Listed(click.FloatRange(0, 99)), default="0,1", show_default=True)
@click.option("--concurrency", type=Listed(click.IntRange(1, 1024)), default="1", show_default=True)
@click.option("--per-set", type=click.IntRange(1), default=16, show_default=True, help="Prompts of each set.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--repeat", type=click.IntRange(1), default=1, show_default=True, help="Runs a cell; the median counts.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@device_option
@backend_option
@click.option("--out", type=FilePath, help="Folder of the results.  [default: build/bench/<name>]")
@click.option("--plan", is_flag=True, help="Print what would be measured.")
@click.option("--compare", nargs=2, type=FilePath, metavar="A.json B.json", help="Ratios of two results, B to A.")
def bench(
    bundle: Path | None, methods: list[str] | None, rows: list[int], prompts: tuple[Path, ...],
    temperatures: list[float], concurrency: list[int], per_set: int, max_new_tokens: int, repeat: int, seed: int,
    device: str, backend: BackendName, out: Path | None, plan: bool, compare: tuple[Path, Path] | None,
) -> None:  # fmt: skip
    """Measure BUNDLE: tokens per step, acceptance, cost and speed of every method.

    Writes JSON, tables and plots. Every answer is compared with the answer of plain decoding. An interrupted run
    resumes where it stopped.

    For example:

        d2sd bench bundles/smollm2-135m --methods chain,ddtree,hybrid --rows 16,64
    """
    if compare is not None:
        click.echo(compared(load_result(compare[0]), load_result(compare[1])))
        return
    if bundle is None:
        raise click.UsageError("name a bundle, or two results with --compare")
    loaded = load_bundle(bundle, progress=bar)
    tree = loaded.recipe.tree
    sets = read_sets(prompts, per_set)
    wanted = methods or [name for name in get_args(Policy) if can_run(loaded, name)]
    matrix = Matrix(wanted, rows, list(sets), temperatures, concurrency, tree.block_size)
    if plan:
        click.echo(matrix.plan(sets, repeat))
        return
    require_plots()  # now, not after hours of measuring
    settings = Settings(
        per_set=per_set, max_new_tokens=max_new_tokens, block_size=tree.block_size, branches=tree.branches, seed=seed,
    )  # fmt: skip
    device = {"torch": device, "onnx": "cpu", "tensorrt": "cuda"}[backend]
    out = out or Path("build/bench") / loaded.recipe.name
    for path in Run(loaded, matrix, sets, settings, repeat, device, backend, out).all():
        click.echo(path)
