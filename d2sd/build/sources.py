"""Locates the models of a recipe, a local path, or a file or folder of a wheel, and fetches wheels.

A wheel comes from the package index by its hash; a file or a folder is extracted from it. The cache only contains
complete files.
"""

from __future__ import annotations

import lzma
import os
import re
import shlex
import struct
import subprocess
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from d2sd.convert.checkpoint.headers import has_weights
from d2sd.errors import BuildError, CheckpointError
from d2sd.helpers import python_command
from d2sd.io import atomic_write, cache_folder, disk_space, exclusive, remove, sha256
from d2sd.progress import Progress, silent
from d2sd.recipe import DrafterSource, PyPI, Recipe, RecipeFile, Source, Target

#: What `zipfile` raises for an archive that is damaged, encrypted (RuntimeError) or compressed in another way.
_UNREADABLE = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, RuntimeError, ValueError)


def sources_of(recipe: Recipe) -> list[Source]:
    """Every source that a bundle is built from."""
    named = (recipe.target, *recipe.drafters.sources.values(), recipe.drafters.calibration)
    return [source for source in named if source is not None]


def located(recipe: RecipeFile, source: Source) -> Path | None:
    """The file or folder of `source`; None if it has to be fetched first. Nothing is fetched or written.

    A relative path of a recipe addressed by name leads into the current folder, as in a clone, or else the package.
    """
    if source.path is not None:
        here, beside = recipe.path(source.path), _beside(recipe, source.path)
        return beside if beside.exists() and not here.exists() else here
    assert source.pypi is not None, "a source has exactly one of two"
    if source.pypi.local is not None:
        local = _beside(recipe, source.pypi.local)
        if local.exists():
            return local
    return cached_file(source.pypi)


def adapters_of(recipe: Recipe) -> list[tuple[Path, float]]:
    """The folders of the target's LoRA adapters, with their scales."""
    found = [(located(recipe, Source(path=one.path)), one.scale) for one in recipe.target.lora]
    return [(folder, scale) for folder, scale in found if folder is not None]


def _beside(recipe: RecipeFile, written: str) -> Path:
    """A path relative to the recipe's file: of a recipe by name, to the package, where the shipped drafters are."""
    return Path(os.path.normpath(recipe.home / written))  # home has no symbolic links


def check_downloaded(recipe: Recipe, *, weights: bool) -> None:
    """Raise CheckpointError, with the commands, where folders that the recipe calls downloads of a hub are not here.

    Without `weights` their config.json is enough, or a geometry in the recipe.
    """
    missing = [
        (source, folder)
        for source, folder in downloads(recipe)
        if not is_downloaded(folder, weights) and (weights or source.geometry is None)
    ]
    if not missing:
        return
    lines = [line for source, folder in missing for line in _download_lines(source, folder, weights)]
    if not weights:
        lines.append("(config.json is enough to plan; without it after the repository, all files, which a build needs)")
    lines.append("or all of it by `d2sd pull`, with the recipe, or by --pull of `d2sd build`")
    raise CheckpointError(
        "Models that the recipe names have not been downloaded.",
        where=", ".join(str(folder) for _, folder in missing),
        expected="config.json and weights" if weights else "config.json",
        fix="\n       ".join(lines),
    )


def downloads(recipe: Recipe) -> list[tuple[Source, Path]]:
    """The sources that are downloads of a hub, and their folders."""
    return [(source, recipe.path(source.path)) for source in sources_of(recipe) if source.repo and source.path]


def download_lines(recipe: Recipe, source: Source) -> list[str]:
    """The commands that download a model of a hub; none for one that is here."""
    named = [(folder, one) for one, folder in downloads(recipe) if one is source and not is_downloaded(folder, True)]
    return [line for folder, one in named for line in _download_lines(one, folder, weights=True)]


def is_downloaded(folder: Path, weights: bool) -> bool:
    """Whether a model's config.json is here, and some of its weights."""
    return (folder / "config.json").is_file() and (not weights or has_weights(folder))


#: Files of targets that hold their weights a second time, in their makers' own formats.
OTHERS = ("original/*", "metal/*")


def published(source: Source, folder: Path) -> Path:
    """The folder of a model as it is published; another than the recipe's where that is of what is made of it."""
    is_converted = isinstance(source, DrafterSource) and source.converted
    return folder.with_name(f"{folder.name}-published") if is_converted else folder


def _download_lines(source: Source, folder: Path, weights: bool) -> list[str]:
    into = published(source, folder)
    converted = into != folder
    revision = ["--revision", source.revision] if source.revision else []
    others = [word for pattern in OTHERS for word in ("--exclude", pattern)] if isinstance(source, Target) else []
    files = others if weights or converted else ["config.json"]
    lines = [shlex.join(["hf", "download", str(source.repo), *revision, *files, "--local-dir", str(into)])]
    if converted:
        lines.append(shlex.join(["d2sd", "convert", str(into), "--to", "z-lab", "-o", str(folder)]))
    return lines


def obtained(recipe: RecipeFile, source: Source, progress: Progress = silent) -> Path:
    """The file or folder of `source`, downloaded if need be. Raises `BuildError` if that fails."""
    path = located(recipe, source)
    if path is not None:
        return path
    assert source.pypi is not None, "a local path is always located"
    return fetch(source.pypi, progress)


def cached_file(source: PyPI) -> Path | None:
    """The file or folder of `source` if the cache has a complete copy of it; nothing is fetched or written."""
    folder = cache_folder() / source.sha256
    wheel = _cached_wheel(source, folder)
    if wheel is None:
        return None
    files = folder / "files"
    with _opened(wheel) as archive:
        root, members = _members(archive, source, wheel)
        complete = all(_is_complete(archive, member, files / name) for name, member in members.items())
    return files / root if complete else None


def fetch(source: PyPI, progress: Progress = silent) -> Path:
    """Return the file or folder of `source`, downloading and extracting what the cache does not hold.

    Raises `BuildError` where pip cannot download the wheel, its hash differs, or it does not hold the file.
    """
    folder = cache_folder() / source.sha256
    with exclusive(folder / "lock", wait=True):
        wheel = _download(source, folder, progress)
        return _extract(source, wheel, folder / "files", progress)


def _cached_wheel(source: PyPI, folder: Path) -> Path | None:
    """The wheel with the recipe's hash; other files there are ignored."""
    return next((wheel for wheel in sorted(folder.glob("*.whl")) if sha256(wheel) == source.sha256), None)


def _download(source: PyPI, folder: Path, progress: Progress) -> Path:
    wheel = _cached_wheel(source, folder)
    if wheel is not None:
        return wheel
    partial = folder / "partial"
    remove(partial)  # of a build that was killed
    requirement = f"{source.package}=={source.version}"
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--quiet", "--disable-pip-version-check"]
    command = python_command("pip", "download", *options, "--dest", str(partial), requirement)
    try:
        # --no-deps: the wheel is only a container of files, so its requirements are not needed
        with progress(f"downloading {requirement}"):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(partial.glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            raise BuildError(
                "pip could not download the wheel.",
                where=requirement,
                found=" / ".join(done.stderr.strip().splitlines()[-3:]),
                fix=_remedy(done.stderr),
            )
        digest = sha256(wheels[0])
        if digest != source.sha256:
            raise BuildError(
                "The downloaded wheel does not have the recipe's hash.",
                where=wheels[0].name,
                found=digest,
                expected=source.sha256,
            )
        return wheels[0].replace(folder / wheels[0].name)
    finally:
        remove(partial)


def _remedy(messages: str) -> str:
    """Tell an index that does not answer from one that does not have the wheel: pip ends with the same line in both."""
    fetched = "or fetch the wheel elsewhere and set PIP_FIND_LINKS to its folder"
    if re.search("Retrying|[Cc]onnection|timed out|SSL", messages):
        return f"check the network, the proxy and `pip config list`, {fetched}"
    if "No matching distribution" in messages:
        return f"no index of `pip config list` has this wheel: add one that does (PIP_EXTRA_INDEX_URL), {fetched}"
    return f"see the message of pip, {fetched}"


def _extract(source: PyPI, wheel: Path, folder: Path, progress: Progress) -> Path:
    with _opened(wheel) as archive:
        root, members = _members(archive, source, wheel)
        for left in folder.rglob("*.partial"):  # of builds that were killed; the lock is ours
            left.unlink()
        for name, member in members.items():
            if not _is_complete(archive, member, folder / name):
                _extract_file(archive, member, folder / name, progress)
    return folder / root


def _extract_file(archive: zipfile.ZipFile, member: zipfile.ZipInfo, file: Path, progress: Progress) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    remove(file)  # it may be a link
    with (
        disk_space(file.parent, member.file_size, f"extracting {file.name}"),
        progress(f"extracting {file.name}", member.file_size) as advance,
        archive.open(member) as stream,
        atomic_write(file) as partial,
        partial.open("wb") as out,
    ):
        while chunk := stream.read(1 << 20):
            out.write(chunk)
            advance(len(chunk))


def _members(archive: zipfile.ZipFile, source: PyPI, wheel: Path) -> tuple[str, dict[str, zipfile.ZipInfo]]:
    """Find `source.file`, a file or a folder of files, given by its path in the wheel or its base name.

    Returns its name in the cache, and {path in the cache: member}. These paths are built from base names, so a wheel
    cannot choose where it is extracted.
    """
    files: dict[str, zipfile.ZipInfo] = {}  # path in the wheel -> that file
    folders: dict[str, dict[str, zipfile.ZipInfo]] = {}  # path in the wheel -> files directly below it, by name
    for member in archive.infolist():
        path = PurePosixPath(member.filename)
        if member.is_dir() or path.name in ("", ".."):
            continue
        if source.file in (member.filename, path.name):
            files[member.filename] = member
        if source.file in (str(path.parent), path.parent.name):
            folders.setdefault(str(path.parent), {})[path.name] = member
    if len(files) + len(folders) != 1:
        names = ", ".join(sorted(member.filename for member in archive.infolist())[:20])
        raise BuildError(
            "The wheel does not hold exactly one such file.", where=wheel.name, found=names, expected=source.file
        )
    root = PurePosixPath(source.file).name
    if files:
        return root, dict(zip([root], files.values(), strict=True))
    (below,) = folders.values()
    return root, {f"{root}/{name}": member for name, member in below.items()}


def _is_complete(archive: zipfile.ZipFile, member: zipfile.ZipInfo, file: Path) -> bool:
    """Whether `file` has the bytes of `member`; in a shared cache others could forge its CRC-32."""
    if not file.is_file() or file.stat().st_size != member.file_size:
        return False
    with file.open("rb") as copy, archive.open(member) as stream:
        while chunk := stream.read(1 << 20):
            if copy.read(len(chunk)) != chunk:
                return False
    return True


@contextmanager
def _opened(wheel: Path) -> Iterator[zipfile.ZipFile]:
    """The wheel as an archive; raises BuildError where it cannot be read as one, then or later."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except (OSError, *_UNREADABLE) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk; bz2's have no number
        fix = "name another wheel in the recipe: this one has the hash that the recipe gives"
        raise BuildError("The wheel cannot be read.", where=wheel, found=error, fix=fix) from None
