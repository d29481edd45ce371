"""Downloads files of one commit of a Hugging Face repository, only on demand, and verifies the hash of each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from d2sd.errors import BuildError
from d2sd.io import cache_folder, digest, exclusive, remove, sha256
from d2sd.progress import Progress, silent
from d2sd.recipe import HF

ALLOW = "D2SD_ALLOW_HUB"
#: Runs in a subprocess: d2sd's own process sets HF_HUB_OFFLINE before it imports transformers.
_PROGRAM = """
import sys
from huggingface_hub import hf_hub_download
repo, name, revision, folder = sys.argv[1:]
hf_hub_download(repo, name, revision=revision, local_dir=folder)
"""


def cached_files(source: HF) -> Path | None:
    """The folder with the files of `source` if the cache has all of them, with the right hashes."""
    folder = _folder(source) / "files"
    return folder if all(_is_complete(folder / name, sha) for name, sha in source.files.items()) else None


def fetch_files(source: HF, progress: Progress = silent) -> Path:
    """Return a folder with the files of `source`, downloading those that the cache does not have.

    Raises `BuildError` if the environment does not allow it, the download fails, or a hash differs.
    """
    where = f"{source.repo} at {source.revision}"
    if os.environ.get(ALLOW) != "1":
        raise BuildError(
            "The recipe names files on the Hugging Face hub, and downloads from the hub are disabled.", where=where,
            fix=f"set {ALLOW}=1, or download the files yourself and name their folder by `path`",
        )  # fmt: skip
    folder = _folder(source)
    with exclusive(folder / "lock", wait=True):
        files, partial = folder / "files", folder / "partial"
        files.mkdir(exist_ok=True)
        for name, sha in source.files.items():
            if not _is_complete(files / name, sha):
                remove(partial)  # of a build that was killed
                try:
                    _download(source, name, partial, progress)
                    (partial / name).replace(files / name)
                finally:
                    remove(partial)
    return files


def _download(source: HF, name: str, partial: Path, progress: Progress) -> None:
    command = [sys.executable, "-c", _PROGRAM, source.repo, name, source.revision, str(partial)]
    environment = os.environ | {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    with progress(f"downloading {source.repo}/{name}"):
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode or not (partial / name).is_file():
        raise BuildError(
            "The file could not be downloaded from the hub.", where=f"{source.repo} at {source.revision}: {name}",
            found=done.stderr.strip().rpartition("\n")[2],
            fix="check the network, and your access to the repository",
        )  # fmt: skip
    found = sha256(partial / name)
    if found != source.files[name]:
        raise BuildError(
            "The downloaded file does not have the recipe's hash.", where=f"{source.repo} at {source.revision}: {name}",
            found=found, expected=source.files[name],
        )  # fmt: skip


def _folder(source: HF) -> Path:
    return cache_folder() / "hf" / digest(source.model_dump())


def _is_complete(file: Path, sha: str) -> bool:
    return file.is_file() and sha256(file) == sha
