"""Finds a C compiler, and builds the library of CPU kernels once per machine.

The library is built for this processor and kept in the user's cache folder, under the hash of its sources, the compiler
and the processor's features; its last bytes are the hash of the others, so that a part of one is never loaded. In a
cache that others write it is kept in a folder of this user; where that cannot be written either, it is built for this
process alone, in a temporary one. The compiler is the command in D2SD_CC, or else `cc`, or else that of the package
`ziglang` (the extra `cpu`). An empty D2SD_CC means none.
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
#: Bytes of a SHA-256.
_HASH = 32
#: Other users whose libraries are loaded: root, who makes the images of containers.
_TRUSTED = frozenset({0})


def compiler() -> list[str] | None:
    """The command of a C compiler for this processor, or None."""
    setting = os.environ.get(COMMAND)
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    if setting is not None:
        return [*shlex.split(setting), native] if setting.strip() else None
    if shutil.which("cc"):
        return ["cc", native]
    package = find_spec("ziglang")
    if package is not None and package.origin is not None:
        return [str(Path(package.origin).with_name("zig")), "cc", "-mcpu=native"]
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
        if not _is_whole(library):
            _compile([*command, *_FLAGS], library)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"the C compiler failed ({shlex.join(command)}): {said.strip()[-500:]}"
    return library


def _folder(name: str) -> Path:
    """The first of the cache's folders that has the file `name` or can be written, or else one removed at exit."""
    reason: object = "others can write it"
    try:
        for folder in (cache_folder(), cache_folder() / f"user-{os.geteuid()}"):
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            if _is_ours(folder):
                if not _is_whole(folder / name):
                    tempfile.TemporaryFile(dir=folder).close()
                return folder
    except OSError as error:
        reason = error
    folder = Path(tempfile.mkdtemp(prefix="d2sd-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    logger.warning("the CPU kernels are compiled for this process alone: the cache cannot be written: %s", reason)
    return folder


def _is_ours(path: Path) -> bool:
    """Whether this user or root alone can have written a file or a folder."""
    found = path.lstat()
    return found.st_uid in {os.geteuid(), *_TRUSTED} and not found.st_mode & 0o022 and not path.is_symlink()


def _is_whole(library: Path) -> bool:
    """Whether a library is there, ours, and ends with the hash of what is in front: loading a part of one is fatal."""
    try:
        data = library.read_bytes() if _is_ours(library) else b""
    except FileNotFoundError:
        return False
    return len(data) > _HASH and hashlib.sha256(data[:-_HASH]).digest() == data[-_HASH:]


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
        digest = hashlib.sha256(temporary.read_bytes()).digest()
        temporary.chmod(0o755)
        with temporary.open("ab") as stream:
            stream.write(digest)
            stream.flush()
            os.fsync(stream.fileno())
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
