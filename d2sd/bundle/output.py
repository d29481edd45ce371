"""Where a bundle is written: the path is checked first, and the complete folder is renamed to it at the end."""

from __future__ import annotations

from pathlib import Path

from d2sd.bundle.files import list_bundle
from d2sd.errors import BuildError, BundleError
from d2sd.io import remove
from d2sd.manifest import NAME, load_manifest


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
            f"The output path exists and is not a bundle that can be replaced. {error.what}", where=where,
            found=error.found, expected=error.expected, fix=fix,
        ) from None  # fmt: skip
    if strange:
        raise BuildError(
            "The bundle at the output path holds files that its manifest does not list.", where=output,
            found=", ".join(strange), fix=fix,
        )  # fmt: skip
