"""`d2sd eval`: accuracy through lm-eval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from d2sd.bench.accuracy.run import Evaluation
from d2sd.bench.accuracy.tasks import NAMES
from d2sd.cli.options import FilePath, backend_option, bundle_argument, device_option, policy_option
from d2sd.cli.report import Reporting
from d2sd.progress import bar


@click.command(cls=Reporting)
@bundle_argument
@click.option("--compare", type=FilePath, multiple=True, help="Another bundle, such as an FP8 one; repeatable.")
@click.option(
    "--task", "tasks", type=click.Choice(NAMES), default=NAMES, multiple=True, help="Repeatable.  [default: all]"
)
@click.option("--limit", type=click.IntRange(1), help="Documents of each task.  [default: all]")
@policy_option
@click.option("--chat", is_flag=True, help="Put prompts into the chat template.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=256, show_default=True)
@click.option("--data", type=FilePath, default=Path("data"), show_default=True, help="Folder that d2sd data filled.")
@click.option("--out", type=FilePath, default=Path("build/eval.json"), show_default=True, help="JSON to write.")
@device_option
@backend_option
def eval(bundle: Path, compare: tuple[Path, ...], out: Path, **settings: Any) -> None:
    """Measure the accuracy of BUNDLE by lm-eval, with and without speculation; in fp32 no answer may differ.

    For example:

        d2sd eval bundles/smollm2-135m --compare bundles/smollm2-135m-fp8 --limit 64
    """
    result = Evaluation((bundle, *compare), **settings).run(out, bar)
    click.echo(f"{result.table()}\n\n{out}")
    result.check()
