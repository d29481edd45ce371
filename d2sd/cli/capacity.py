"""`d2sd capacity`: what a GPU holds, and how fast it was measured to be."""

from __future__ import annotations

from pathlib import Path

import click

from d2sd.bench.capacity import Lengths, make_sheet, read_plan
from d2sd.build.plan import GPUS
from d2sd.build.shares import of_one_gpu
from d2sd.cli.options import table_option
from d2sd.cli.report import Reporting
from d2sd.errors import D2SDError
from d2sd.io import write_text
from d2sd.option_types import PolicyType
from d2sd.recipe import Method

_TOKENS, _BATCH = click.IntRange(1, 2**24), click.IntRange(1, 2**16)


@click.command(cls=Reporting)
@click.argument("source", metavar="BUNDLE_OR_RECIPE", type=click.Path(path_type=Path))
@click.option("--gpu", type=click.Choice(list(GPUS)), required=True)
@click.option("--prompt-tokens", type=_TOKENS, required=True, help="Of a request (ISL).")
@click.option("--output-tokens", type=_TOKENS, required=True, help="Of its answer (OSL).")
@table_option("tensor_parallel")
@click.option("--max-batch", type=_BATCH, help="Requests that decode together.  [default: the recipe's]")
@click.option("--policy", type=PolicyType, help="Tree policy.  [default: the recipe's]")
@click.option("--tau", type=float, help="Tokens a step of the policy.  [default: the calibration's forecast]")
@click.option(
    "--step-times",
    type=click.Path(path_type=Path),
    help="File of step times that an engine kept.  [default: this bundle's in d2sd's cache folder]",
)
@click.option("--out", type=click.Path(path_type=Path), help="File of the sheet: .md or .json.")
def capacity(
    source: Path, gpu: str, prompt_tokens: int, output_tokens: int, tensor_parallel: int, max_batch: int | None,
    policy: Method | None, tau: float | None, step_times: Path | None, out: Path | None,
) -> None:  # fmt: skip
    """Show how many requests a GPU holds, and its decode steps where an engine has measured them.

    Memory is computed from geometry: of a recipe's checkpoints config.json is enough.

    For example:

        d2sd capacity bundles/smollm2-135m --gpu H100 --prompt-tokens 512 --output-tokens 128
    """
    if out is not None and out.suffix not in (".md", ".json"):
        raise D2SDError("The sheet has no such form.", where="--out", found=out, expected="a name in .md or .json")
    plan = of_one_gpu(read_plan(source), tensor_parallel)
    lengths = Lengths(prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    sheet = make_sheet(plan, source, gpu, lengths, max_batch, policy, tau, step_times)
    if out is not None:
        write_text(out, sheet.markdown() if out.suffix == ".md" else sheet.model_dump_json(indent=1) + "\n")
    click.echo(sheet.markdown())
