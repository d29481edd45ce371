"""`d2sd`, and `d2sd-build`, which is `d2sd build`."""

from __future__ import annotations

import copy
import sys
from importlib import import_module

import click

from d2sd.cli.report import ReportingGroup, report
from d2sd.interrupts import noting_interrupts

#: Module and function of a command have its name; texts are the first sentences of its help.
COMMANDS = {
    "bench": "Measure BUNDLE: tokens per step, acceptance, cost and speed of every method.",
    "build": "Build the serving bundle that RECIPE describes.",
    "calibrate": "Fit the drafters' confidence to what BUNDLE's target accepts.",
    "capacity": "Show how many requests a GPU holds, and its decode steps where an engine has measured them.",
    "convert": "Convert the drafter in SOURCE to another checkpoint format.",
    "data": "Fill data/ with the prompt sets that recipes and benchmarks name.",
    "generate": "Generate text from the bundle at BUNDLE.",
    "inspect": "Verify BUNDLE and print what it holds.",
    "pull": "Fetch the models of RECIPE that it names by repository and revision.",
    "serve": "Serve the bundle at BUNDLE over HTTP, as OpenAI's API.",
    "train": "Train the drafters that RECIPE names.",
    "triton": "Write a model repository that serves the bundle at BUNDLE in Triton Inference Server.",
    "trtllm": "Serve a bundle's chain or tree with TensorRT-LLM.",
    "worker": "Serve the bundle at BUNDLE as one worker behind Dynamo's frontend.",
}


class LazyGroup(ReportingGroup):
    """Imports a command's module when the command is used, so that help needs none of them (Click's lazy loading)."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"d2sd.cli.{cmd_name}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List all commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup)
@click.version_option(package_name="d2sd")
def main() -> None:
    """Compile and serve speculative decoding with two block-diffusion drafters, losslessly.

    For example:

        d2sd-build recipes/smollm2-135m.yaml
    """


def build_main() -> None:
    """Run `d2sd build` under its own name, which has its own --version."""
    with noting_interrupts() as interrupted:
        try:
            command = copy.copy(import_module("d2sd.cli.build").build)
        except (Exception, KeyboardInterrupt) as error:
            sys.exit(report(KeyboardInterrupt() if interrupted() else error))
    command.params = list(command.params)
    click.version_option(package_name="d2sd")(command)
    command.main(prog_name="d2sd-build")
