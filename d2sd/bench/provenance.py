"""Provenance of a result: machine, versions, commit, bundle, command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import torch

from d2sd.bench.result import Provenance
from d2sd.plugins.cpu.compiler import processor

_TOOLS = ("d2sd", "torch", "transformers")


def provenance(bundle: Mapping[str, str], device: str, backend: str = "torch") -> Provenance:
    """`bundle` identifies the bundle, run by `backend` on `device`; everything else is detected."""
    machine: dict[str, str | int] = {
        "processor": processor(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device.startswith("cuda"):
        machine["gpu"] = torch.cuda.get_device_name(device)
    return Provenance(
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        commit=_commit(),
        versions={"python": platform.python_version()} | {tool: version(tool) for tool in _TOOLS},
        machine=machine,
        bundle=dict(bundle),
        device=device if backend == "torch" else f"{device}, {backend}",
    )


def _commit() -> str | None:
    """Commit of the checkout of this file, marked if there are uncommitted changes; None if there is no checkout."""
    outputs = []
    for command in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            done = subprocess.run(
                ["git", *command], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        outputs.append(done.stdout.strip())
    return outputs[0] + (" and changes" if outputs[1] else "")
