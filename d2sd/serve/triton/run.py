"""`python -m d2sd.serve.triton.run REPOSITORY [OPTION ...]`: start tritonserver with this environment's Python.

The server is the one in PATH, such as that of NVIDIA's image, else that of the wheel nvidia-pytriton. Options are
tritonserver's. The process becomes the server: signals reach it directly.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from d2sd.errors import D2SDError
from d2sd.io import printable

#: Seconds that the server waits for running requests when it ends: more than the default drain_timeout.
_EXIT_TIMEOUT = 60


def command(repository: Path, options: list[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of the server. Raises D2SDError if there is none, or none for this Python."""
    if not repository.is_dir():
        raise D2SDError("There is no model repository.", where=repository, fix="write it: d2sd triton BUNDLE -o FOLDER")
    names = {option.partition("=")[0] for option in options}
    if "--exit-timeout-secs" not in names:
        options = [*options, f"--exit-timeout-secs={_EXIT_TIMEOUT}"]
    # The embedded Python finds this environment through PATH (pyvenv.cfg), not through PYTHONPATH, which it ignores.
    variables = dict(environment)
    variables["PATH"] = os.pathsep.join((str(Path(sys.prefix) / "bin"), environment.get("PATH", "")))
    arguments = [f"--model-repository={repository}", *options]
    server = shutil.which("tritonserver", path=environment.get("PATH"))
    if server is not None:
        return [server, *arguments], variables
    root = _wheel()
    _link_stub(root)
    libraries = sysconfig.get_config_var("LIBDIR")
    variables["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (libraries, environment.get("LD_LIBRARY_PATH"))))
    return [str(root / "bin" / "tritonserver"), f"--backend-directory={root / 'backends'}", *arguments], variables


def _wheel() -> Path:
    """The folder of the server in nvidia-pytriton."""
    spec = find_spec("pytriton")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / "tritonserver" / "bin" / "tritonserver").is_file():
            return Path(folder) / "tritonserver"
    raise D2SDError(
        "Triton Inference Server is not installed.",
        expected="tritonserver in PATH, or the wheel nvidia-pytriton",
        fix="pip install nvidia-pytriton==0.7.0, or use NVIDIA's image tritonserver",
    )


def _link_stub(root: Path) -> None:
    """Link the wheel's program for this version of Python into the folder of the Python backend."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / version / "triton_python_backend_stub"
    link = root / "backends" / "python" / stub.name
    if not stub.is_file():
        there = ", ".join(sorted(path.name for path in (root / "python_backend_stubs").iterdir()))
        raise D2SDError("The wheel nvidia-pytriton has no stub for this Python.", found=version, expected=there)
    if link.exists() and link.resolve() == stub.resolve():
        return
    try:
        link.unlink(missing_ok=True)
        link.symlink_to(stub)  # a link: the stub finds its libraries relative to its own place
    except OSError as error:
        raise D2SDError(
            "The stub cannot be linked.", where=link, found=error.strerror, fix=f"ln -s {stub} {link}"
        ) from None


def _fail(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(2)


def main() -> None:
    """Replace this process by the server."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        _fail("usage: python -m d2sd.serve.triton.run REPOSITORY [OPTION ...]")
    try:
        arguments, environment = command(Path(sys.argv[1]), sys.argv[2:], os.environ)
    except D2SDError as error:
        _fail(f"error: {printable(error)}")
    os.execve(arguments[0], arguments, environment)  # noqa: S606


if __name__ == "__main__":
    main()
