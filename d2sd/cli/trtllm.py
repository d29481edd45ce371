"""`d2sd trtllm`: arguments for TensorRT-LLM, and whether the installed one can have d2sd's tree."""

from __future__ import annotations

from pathlib import Path

import click

from d2sd.cli.options import FilePath, bundle_argument
from d2sd.cli.report import Reporting, ReportingGroup
from d2sd.convert.trtllm.llm_args import check_llm_args, write_tree_arguments
from d2sd.integrations.trtllm.contract import failures, lines, probe


@click.group(cls=ReportingGroup)
def trtllm() -> None:
    """Serve a bundle's chain or tree with TensorRT-LLM.

    For example:

        d2sd trtllm check bundles/qwen3-8b --tree
    """


@trtllm.command(cls=Reporting)
@click.argument("bundle", type=FilePath, required=False)
@click.option("--tree", is_flag=True, help="Compare the installed TensorRT-LLM with what d2sd's tree uses of it.")
def check(bundle: Path | None, tree: bool) -> None:
    """Check the arguments of BUNDLE, and with --tree the installed TensorRT-LLM. Exit code 1: it cannot have the tree.

    For example:

        d2sd trtllm check bundles/qwen3-8b --tree
    """
    for name in check_llm_args(bundle) if bundle is not None else ():
        click.echo(f"{name}: every key as in TensorRT-LLM's reference")
    rows = probe() if tree else []
    click.echo("\n".join(lines(rows)), nl=tree)
    click.get_current_context().exit(1 if failures(rows) else 0)


@trtllm.command(cls=Reporting)
@bundle_argument
@click.option("--nodes", type=click.IntRange(2), help="Nodes of every tree, the anchor included.")
@click.option("--max-batch", type=click.IntRange(1), help="Requests in flight.")
@click.option("-o", "--out", type=FilePath, required=True, help="YAML file, in the bundle's folder or elsewhere.")
def args(bundle: Path, nodes: int | None, max_batch: int | None, out: Path) -> None:
    """Write the arguments of a tree of another size for BUNDLE: fewer nodes serve larger batches.

    For example:

        d2sd trtllm args bundles/qwen3-8b --nodes 32 --max-batch 32 -o tree32.yaml
    """
    click.echo(f"{out}: trees of {write_tree_arguments(out, bundle, nodes=nodes, max_batch=max_batch)}")
