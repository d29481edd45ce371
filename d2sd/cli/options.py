"""Options that several commands share."""

from __future__ import annotations

from typing import get_args

import click

from d2sd.convert.bundle.backends import BackendName

backend_option = click.option(
    "--executor", "backend", type=click.Choice(get_args(BackendName)), default="torch", show_default=True,
    help="PyTorch, or the bundle's graphs in ONNX Runtime or as TensorRT engines.",
)  # fmt: skip
