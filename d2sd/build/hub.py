"""Fetches the models that a recipe names by repository and revision from the Hugging Face hub, by its own library.

`HF_TOKEN`, `HF_HOME`, `HF_ENDPOINT`, `HF_HUB_OFFLINE` and proxies are the library's. It moves a file to its name when
it is whole, and takes up a connection that ends; a run that was killed is taken up with the files that are missing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from glob import escape
from pathlib import Path, PurePosixPath
from typing import Any

from d2sd.build.sources import OTHERS, downloads, is_downloaded, published
from d2sd.convert.formats.convert import convert
from d2sd.errors import BuildError
from d2sd.io import disk_space, exclusive, sha256
from d2sd.progress import Progress, silent
from d2sd.recipe import Recipe, SecondSource, Source, Target

#: Seconds without an answer after which a request to the hub has failed; the library then tries some times more.
_TIMEOUT = 30.0


@dataclass(frozen=True, slots=True)
class Pull:
    """Files of one model at one commit."""

    source: Source
    folder: Path  # of the recipe; what is downloaded goes to `into`
    commit: str
    sizes: dict[str, int]  # bytes by name
    hashes: dict[str, str]  # SHA-256 of large files

    @property
    def into(self) -> Path:
        return published(self.source, self.folder)

    @property
    def missing(self) -> list[str]:
        """Names of files that are not here in their size."""
        return [name for name, size in self.sizes.items() if _size(self.into / name) != size]


def plan_pulls(recipe: Recipe) -> list[Pull]:
    """Ask the hub for the files of every model that the recipe names there. Offline, those that are here are left out.

    Raises `BuildError`.
    """
    from huggingface_hub import HfApi, constants

    found = []
    for source, folder in downloads(recipe):
        if constants.HF_HUB_OFFLINE and is_downloaded(folder, weights=True):
            continue
        with _explained(source):
            about = HfApi().model_info(
                str(source.repo), revision=source.revision, files_metadata=True, timeout=_TIMEOUT
            )
        files = [file for file in about.siblings or () if not _is_left_out(source, file.rfilename)]
        for file in files:
            _check_name(source, file.rfilename)
        hashes = {file.rfilename: file.lfs.sha256 for file in files if file.lfs is not None}
        sizes = {file.rfilename: file.size or 0 for file in files}
        found.append(Pull(source, folder, str(about.sha), sizes, hashes))
    return found


def pull(recipe: Recipe, progress: Progress = silent) -> list[Path]:
    """Download the models that the recipe names on the hub, and convert those in another layout; returns their folders.

    New files have the sizes and hashes that the hub names. Raises `BuildError`; what has been downloaded stays.
    """
    folders = []
    for one in plan_pulls(recipe):
        _download(one, progress)
        if one.into != one.folder and not is_downloaded(one.folder, weights=True):
            role = one.source.role if isinstance(one.source, SecondSource) else None
            convert(one.into, "z-lab", one.folder, target=None, declared=role)
        folders.append(one.folder)
    return folders


def _download(one: Pull, progress: Progress) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    missing = one.missing
    one.into.mkdir(parents=True, exist_ok=True)
    need, repo = sum(one.sizes[name] for name in missing), str(one.source.repo)
    with exclusive(one.into / ".cache" / "d2sd.lock", wait=True):
        for left in (one.into / ".cache").rglob("*.incomplete"):  # of a run that was killed; the lock is ours
            left.unlink()
        with disk_space(one.into, need, f"the download of {repo}"), _explained(one.source):
            # these names alone, which were checked: the library asks the hub for a list of its own
            names = list(map(escape, one.sizes))
            snapshot_download(repo, revision=one.commit, local_dir=one.into, allow_patterns=names)
        _check_hashes(one, progress)


def _check_hashes(one: Pull, progress: Progress) -> None:
    """Delete files that differ from the hub's, then raise `BuildError`. All are read: a run may have been killed."""
    wrong = {}
    with progress(f"hashing {one.into.name}", sum(map(one.sizes.__getitem__, one.hashes))) as advance:
        for name, expected in one.hashes.items():
            if (found := sha256(one.into / name, advance)) != expected:
                wrong[name] = found
                (one.into / name).unlink()
    for name, found in wrong.items():
        raise BuildError(
            "A file differs from the hub's.",
            where=one.into / name,
            found=found,
            expected=one.hashes[name],
            fix="run again: it was deleted",
        )


def _is_left_out(source: Source, name: str) -> bool:
    return isinstance(source, Target) and any(fnmatch(name, pattern) for pattern in OTHERS)


def _check_name(source: Source, name: str) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise BuildError("A file of the model leads out of its folder.", where=str(source.repo), found=name)


def _size(file: Path) -> int | None:
    return file.stat().st_size if file.is_file() else None


@contextmanager
def _explained(source: Source) -> Iterator[None]:
    """Raise what the library raises as a `BuildError` with what to do."""
    import httpx
    from huggingface_hub import errors

    repo = str(source.repo)
    remedies: list[tuple[Any, str, str]] = [
        (
            errors.GatedRepoError,
            "The model is gated: its owner asks for an agreement.",
            f"agree at https://huggingface.co/{repo}, then `hf auth login`, or set HF_TOKEN",
        ),
        (errors.RevisionNotFoundError, "The hub has no such revision of the model.", "check `revision` in the recipe"),
        (
            errors.RepositoryNotFoundError,
            "The hub has no such model, or shows it to others only.",
            "check `repo` in the recipe; for a private one set HF_TOKEN",
        ),
        (
            (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError),
            "The model is not here, and the hub cannot be asked.",
            "unset HF_HUB_OFFLINE, or check the network; what has been downloaded stays",
        ),
        (errors.HfHubHTTPError, "The hub answers with an error.", "check HF_TOKEN, or run again later"),
        (
            (httpx.HTTPError, ConnectionError, TimeoutError),
            "The hub cannot be reached.",
            "check the network, the proxy and HF_ENDPOINT, and run again; what has been downloaded stays",
        ),
        (  # what the library meets in a page of another server, in an address, and of a proxy that it cannot use
            (httpx.InvalidURL, ValueError, TypeError, AttributeError, LookupError, AssertionError, ImportError),
            "The answer is not a hub's, or nothing answers.",
            "check HF_ENDPOINT, HF_TOKEN and the proxy, and whether the network asks for a login",
        ),
    ]
    try:
        yield
    except Exception as error:
        for kinds, what, fix in remedies:
            if isinstance(error, kinds):
                where = repo if source.revision is None else f"{repo} at {source.revision}"
                found = str(error).strip().partition("\n")[0]
                raise BuildError(what, where=where, found=found, fix=fix) from error
        raise
