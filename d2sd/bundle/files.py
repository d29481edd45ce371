"""The files of a bundle: all that its manifest lists, nothing else, and no byte changed."""

from __future__ import annotations

import os
from pathlib import Path

from d2sd.errors import BundleError
from d2sd.io import hash_files
from d2sd.manifest import NAME, Manifest
from d2sd.progress import Progress, silent


def verify_files(path: Path, manifest: Manifest, progress: Progress = silent) -> None:
    """Check that the folder holds exactly the manifest's files, byte for byte. Raises `BundleError`."""
    present = [name for name in list_bundle(path) if name != NAME]
    for what, names in {
        "A file of the bundle is missing.": manifest.files.keys() - set(present),
        "The bundle holds a file that its manifest does not list.": set(present) - manifest.files.keys(),
    }.items():
        if names:
            raise BundleError(what, where=path, found=", ".join(sorted(names)), fix="build it again")
    for name, found in hash_files(path, present, progress).items():
        if found != manifest.files[name]:
            raise BundleError(
                "A file of the bundle has changed.",
                where=path / name,
                found=found,
                expected=manifest.files[name],
                fix="build it again",
            )


def list_bundle(path: Path) -> list[str]:
    """Every file below `path`, as sorted POSIX paths relative to it.

    Raises `BundleError` for anything but regular files: links to folders, whose files would not be checked, links
    that leave the bundle, broken links, pipes and devices.
    """
    root, names = path.resolve(), []
    for folder, folders, files in os.walk(path):
        for name in folders:
            if (Path(folder) / name).is_symlink():
                raise BundleError("A folder of the bundle is a symbolic link.", where=Path(folder) / name)
        for name in files:
            file = Path(folder) / name
            if file.is_symlink() and not Path(os.path.realpath(file)).is_relative_to(root):
                raise BundleError("A symbolic link leaves the bundle.", where=file, found=str(file.readlink()))
            if not file.is_file():
                raise BundleError("A file of the bundle is not a regular file.", where=file)
            names.append(file.relative_to(path).as_posix())
    return sorted(names)
