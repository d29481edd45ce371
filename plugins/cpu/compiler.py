"""Finds a C compiler, and builds the library of CPU kernels once per machine.

The library is built for this processor and kept in the user's cache folder, under the hash of its sources, the compiler
and the processor's features. Where that folder cannot be written it is built for this process alone, in a temporary
folder. The compiler is the command in D2SD_CC, or else `cc`, or else that of the package `ziglang`
(the extra `cpu`). An empty D2SD_CC means none.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from d2sd.extras import install_line
from d2sd.io import cache_folder

logger = logging.getLogger(__name__)

COMMAND = "D2SD_CC"
_FLAGS = ("-O3", "-ffp-contract=off", "-Wno-psabi", "-shared", "-fPIC", "-pthread")
_SOURCES = Path(__file__).parent
_SECONDS = 120


def compiler() -> list[str] | None:
    """The command of a C compiler for this processor, or None."""
    setting = os.environ.get(COMMAND)
    if setting is not None:
        return [*shlex.split(setting), "-march=native"] if setting.strip() else None
    if shutil.which("cc"):
        return ["cc", "-march=native"]
    if find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc", "-mcpu=native"]
    return None


@cache
def build() -> Path | str:
    """The library, built if it is not in the cache yet; or the reason why there is none."""
    try:
        command = compiler()
    except ValueError as error:  # of shlex
        return f"{COMMAND} is not a command: {error}"
    if command is None:
        return f"no C compiler: {install_line('cpu')} brings one, or set {COMMAND}"
    sources = sorted([*_SOURCES.glob("*.h"), *_SOURCES.glob("*.c")])
    known = "\n".join(
        [*command, *_FLAGS, platform.machine(), _features(), *(file.read_text("utf-8") for file in sources)]
    )
    name = f"cpu-{hashlib.sha256(known.encode('utf-8')).hexdigest()[:24]}.so"
    try:
        library = _folder(name) / name
        if not library.exists():
            _compile([*command, *_FLAGS], library)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"the C compiler failed ({shlex.join(command)}): {said.strip()[-500:]}"
    return library


def _folder(name: str) -> Path:
    """The cache folder if it has the file `name` or can be written, or else a private one, removed at exit."""
    try:
        folder = cache_folder()
        if not (folder / name).exists():
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        folder = Path(tempfile.mkdtemp(prefix="d2sd-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        logger.warning("the CPU kernels are compiled for this process alone: the cache cannot be written: %s", error)
    return folder


def _compile(command: list[str], library: Path) -> None:
    """Build in a temporary file and rename, so that two processes may build at once."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        temporary = Path(folder) / library.name
        subprocess.run(
            [*command, str(_SOURCES / "layers.c"), "-o", str(temporary), "-lm"],
            check=True,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_SECONDS,
        )
        temporary.replace(library)


def processor() -> str:
    """The processor's name."""
    return _cpuinfo("model name") or platform.processor() or "unknown"


def _features() -> str:
    """The processor's instruction sets, as the kernel lists them: a cache folder may be shared by machines."""
    return _cpuinfo("flags", "Features") or platform.processor()


def _cpuinfo(*keys: str) -> str:
    """The first processor's value in /proc/cpuinfo under one of these keys, or an empty string."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(keys)), "")
