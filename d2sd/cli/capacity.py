"""`d2sd capacity`: GPUs for a load, by arithmetic."""

from __future__ import annotations

from pathlib import Path

import click

from d2sd.bench.capacity import Demand, Slo, read_plan
from d2sd.bench.capacity_sheet import make_sheet
from d2sd.bench.roofline import EFFICIENCY
from d2sd.build.plan import GPUS
from d2sd.build.shares import of_one_gpu
from d2sd.cli.options import tensor_parallel_option
from d2sd.cli.report import Reporting
from d2sd.errors import D2SDError
from d2sd.io import write_text
from d2sd.option_types import PolicyType, RealRange
from d2sd.recipe import Method

_TOKENS, _BATCH = click.IntRange(1, 2**24), click.IntRange(1, 2**16)
_RATE, _SECONDS = RealRange(0, 1e9, min_open=True), RealRange(0, 86_400, min_open=True)


@click.command(cls=Reporting)
@click.argument("source", metavar="BUNDLE_OR_RECIPE", type=click.Path(path_type=Path))
@click.option("--gpu", type=click.Choice(list(GPUS)), required=True)
@click.option("--rate", type=_RATE, required=True, help="Requests a second.")
@click.option("--prompt-tokens", type=_TOKENS, required=True, help="Of a request (ISL).")
@click.option("--output-tokens", type=_TOKENS, required=True, help="Of its answer (OSL).")
@click.option("--ttft", type=_SECONDS, required=True, help="Seconds to the first token, at most.")
@click.option("--itl", type=_SECONDS, required=True, help="Seconds from token to token, mean of a request, at most.")
@tensor_parallel_option
@click.option("--max-batch", type=_BATCH, help="Requests that decode together.  [default: the recipe's]")
@click.option("--policy", type=PolicyType, help="Tree policy.  [default: the recipe's]")
@click.option("--tau", type=float, help="Tokens a step of the policy.  [default: the calibration's forecast]")
@click.option(
    "--efficiency",
    type=RealRange(0, 1, min_open=True),
    help=f"Share of the GPU's peaks that a step reaches.  [default: measured here, else {EFFICIENCY:g}, an assumption]",
)
@click.option("--out", type=click.Path(path_type=Path), help="File of the sheet: .md or .json.")
def capacity(
    source: Path, gpu: str, rate: float, prompt_tokens: int, output_tokens: int, ttft: float, itl: float,
    tensor_parallel: int, max_batch: int | None, policy: Method | None, tau: float | None, efficiency: float | None,
    out: Path | None,
) -> None:  # fmt: skip
    """Compute how many GPUs serve a load within latency targets, with and without speculation.

    Arithmetic from geometry and calibration alone: nothing is measured, and of a recipe's checkpoints
    config.json is enough.

    For example:

        d2sd capacity bundles/smollm2-135m --gpu H100 --rate 200 --prompt-tokens 512 --output-tokens 128 \
          --ttft 0.2 --itl 0.01
    """
    if out is not None and out.suffix not in (".md", ".json"):
        raise D2SDError("The sheet has no such form.", where="--out", found=out, expected="a name in .md or .json")
    demand = Demand(
        rate=rate, prompt_tokens=prompt_tokens, output_tokens=output_tokens, targets=Slo(ttft=ttft, itl=itl)
    )
    plan = of_one_gpu(read_plan(source), tensor_parallel)
    sheet = make_sheet(plan, gpu, demand, max_batch, policy, tau=tau, efficiency=efficiency)
    if out is not None:
        write_text(out, sheet.markdown() if out.suffix == ".md" else sheet.model_dump_json(indent=1) + "\n")
    click.echo(sheet.markdown())
