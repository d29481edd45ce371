"""`d2sd capacity`: GPUs for a load, by arithmetic."""

from __future__ import annotations

import click

from d2sd.bench.fleet import command
from d2sd.cli.report import Reporting

capacity = click.command(cls=Reporting)(command.capacity)
