"""Signatures are made and checked by a program of the user's, such as cosign."""

from __future__ import annotations

import shlex
import subprocess

from d2sd.errors import RegistryError


def run_hook(command: str, pinned: str, where: str) -> None:
    """Run `command` with `pinned`, HOST/NAME@DIGEST, as its last argument; its output goes to stderr.

    Raises `RegistryError` if it cannot be started or its exit status is not 0. No shell is involved.
    """
    try:
        arguments = shlex.split(command)
        status = subprocess.run([*arguments, pinned], stdout=2, check=False).returncode if arguments else "no command"
    except (OSError, ValueError) as error:
        status = getattr(error, "strerror", None) or str(error)
    if status != 0:
        raise RegistryError(f"The command of {where} failed.", where=pinned, found=f"{command}: {status}")
