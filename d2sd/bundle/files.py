"""The files of a bundle: all that its manifest lists, nothing else, and no byte changed; where they may be written."""

from __future__ import annotations

import os
from pathlib import Path

from d2sd.errors import BuildError, BundleError
from d2sd.io import hash_files, remove
from d2sd.manifest import NAME, Manifest, load_manifest
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
    for name, digest in hash_files(path, present, progress).items():
        if digest != manifest.files[name]:
            raise BundleError(
                "A file of the bundle has changed.",
                where=path / name,
                found=digest,
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


def output_path(output: Path) -> Path:
    """The resolved path. Raises `BuildError` if it cannot be used or what exists there could not be replaced."""
    try:
        output = output.resolve()
        check_replaceable(output)
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL, half a surrogate pair
        raise BuildError("The output path cannot be used.", where=ascii(str(output)), found=error) from None
    return output


def publish(bundle: Path, output: Path, work: Path) -> None:
    """Rename `bundle`, which is below the folder `work` next to `output`, to `output`, and delete `work`."""
    check_replaceable(output)  # again: files may have been added in the meantime
    replaced = work / "replaced"
    remove(replaced)
    if output.exists():
        output.replace(replaced)
    bundle.replace(output)
    remove(work)


def check_replaceable(output: Path) -> None:
    """Raise `BuildError` unless `output` is absent, an empty folder, or a bundle that holds only files of its own.

    Publishing deletes the existing output, so a file that d2sd did not write is an error.
    """
    if not (output.exists() or output.is_symlink()) or (output.is_dir() and not any(output.iterdir())):
        return
    fix = "choose another output, or move it away"
    if not (output / NAME).is_file():
        raise BuildError("The output path exists and is not a bundle.", where=output, fix=fix)
    try:
        files = load_manifest(output).files
        strange = sorted(set(list_bundle(output)) - files.keys() - {NAME})
    except BundleError as error:
        where = error.where or output
        raise BuildError(
            f"The output path exists and is not a bundle that can be replaced. {error.what}",
            where=where,
            found=error.found,
            expected=error.expected,
            fix=fix,
        ) from None
    if strange:
        raise BuildError(
            "The bundle at the output path holds files that its manifest does not list.",
            where=output,
            found=", ".join(strange),
            fix=fix,
        )
