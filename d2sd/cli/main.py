"""`d2sd`, and `d2sd-build`, which is `d2sd build`. Heavy imports live inside the commands, so that help is instant."""

from __future__ import annotations

import click

from d2sd.cli.bench import bench
from d2sd.cli.build import build
from d2sd.cli.calibrate import calibrate
from d2sd.cli.convert import convert
from d2sd.cli.data import data
from d2sd.cli.generate import generate
from d2sd.cli.inspect import inspect
from d2sd.cli.report import ReportingGroup
from d2sd.cli.train import train
from d2sd.cli.trtllm import trtllm


@click.group(cls=ReportingGroup)
@click.version_option(package_name="d2sd")
def main() -> None:
    """Compile and serve speculative decoding with two block-diffusion drafters, losslessly.

    For example:

        d2sd build recipes/smollm2-135m.yaml
    """


main.add_command(bench)
main.add_command(build)
main.add_command(calibrate)
main.add_command(convert)
main.add_command(data)
main.add_command(generate)
main.add_command(inspect)
main.add_command(train)
main.add_command(trtllm)


def build_main() -> None:
    """Run `d2sd build` under its own name."""
    build.main(prog_name="d2sd-build")
