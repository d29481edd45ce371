"""`d2sd trtllm`: compatibility of the installed TensorRT-LLM with d2sd and with a bundle."""

from __future__ import annotations

from pathlib import Path

import click

from d2sd.cli.options import FilePath
from d2sd.cli.report import Reporting, ReportingGroup
from d2sd.convert.trtllm.llm_args import check_llm_args
from d2sd.integrations.trtllm.probe import COMMITS, failures, probe
from d2sd.integrations.trtllm.register import incompatibilities


@click.group(cls=ReportingGroup)
def trtllm() -> None:
    """Compare the installed TensorRT-LLM with the version d2sd was written for.

    For example:

        d2sd trtllm check bundles/qwen3-8b
    """


@trtllm.command(cls=Reporting)
@click.argument("bundle", type=FilePath, required=False)
@click.pass_context
def check(context: click.Context, bundle: Path | None) -> None:
    """Compare what d2sd uses of TensorRT-LLM with what is installed; with BUNDLE, check its arguments too.

    Exit code 1 means that both drafters would not be registered: the first one would draft alone.

    For example:

        d2sd trtllm check bundles/qwen3-8b
    """
    rows = probe()
    for row in rows:
        click.echo(f"{'ok' if row.good else 'NO':4}{row.need}: {row.found}")
        if not row.good:
            click.echo(f"    expected: {row.expected}")
    for module, commit in COMMITS.items():
        click.echo(f"    read: {module} at {commit}")
    reasons = failures(rows)
    if bundle is not None:
        for name in check_llm_args(bundle):
            click.echo(f"{name}: every key as in TensorRT-LLM's sources")
        reasons += incompatibilities(bundle)
    click.echo("linear DFlash, first drafter alone: by TensorRT-LLM itself, not yet run")
    verdict = "would be registered, not yet run" if not reasons else f"no, linear DFlash instead: {'; '.join(reasons)}"
    click.echo(f"both drafters, one chain: {verdict}")
    click.echo("D²SD's tree: not available in TensorRT-LLM; d2sd serves it on its own runtime")
    context.exit(1 if reasons else 0)
