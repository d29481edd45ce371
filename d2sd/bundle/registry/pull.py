"""Fetches a bundle from a registry.

<output>/                     appears at the end, by a rename
.<output name>.pulling/
  bundle/                     files whose hash is right
  partial/<sha256>            a file that is arriving; the next run asks for the rest of it
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from d2sd.bundle.files import list_bundle
from d2sd.bundle.output import output_path, publish
from d2sd.bundle.registry.artifact import (
    Descriptor,
    check_layers,
    digest_of,
    layers_by_name,
    parse_artifact,
)
from d2sd.bundle.registry.client import Advance, RegistryClient
from d2sd.bundle.registry.hooks import run_hook
from d2sd.bundle.registry.reference import parse_reference
from d2sd.errors import RegistryError
from d2sd.io import MAX_BYTES, disk_space, exclusive, remove, sha256
from d2sd.manifest import NAME, load_manifest
from d2sd.progress import Progress, silent


def pull(
    reference: str, output: Path, *, plain_http: bool = False, verify_command: str | None = None,
    progress: Progress = silent,
) -> str:  # fmt: skip
    """Pull a bundle to the folder `output`, which appears complete or not at all; return HOST/NAME@DIGEST.

    An existing bundle is replaced as by a build, and its files are reused. `verify_command` runs before any file is
    fetched. Raises `BuildError` for the output and the disk, `RegistryError` or `BundleError` for the artifact.
    """
    parsed = parse_reference(reference)
    output = output_path(output)
    with RegistryClient(parsed, "pull", plain_http=plain_http) as client:
        data = client.manifest(parsed.digest or parsed.tag)
        pinned = parsed.pinned(digest_of(data))
        if parsed.digest not in (None, digest_of(data)):
            raise RegistryError("The registry sent another artifact.", where=reference, found=digest_of(data))
        artifact = parse_artifact(data, pinned)
        layers = layers_by_name(artifact, pinned)
        if verify_command:
            run_hook(verify_command, pinned, "--verify-command")
        with _work_folder(output) as work:
            with progress(f"pulling {output.name}", artifact.size) as advance:
                _fetch_all(client, layers, output, work, advance, pinned)
            publish(work / "bundle", output, work)
    return pinned


@contextmanager
def _work_folder(output: Path) -> Iterator[Path]:
    """The folder next to `output`; after an error it is deleted unless it has files that the next run can use."""
    work = output.with_name(f".{output.name}.pulling")
    with exclusive(work / "lock", wait=False):
        try:
            for name in ("bundle", "partial"):
                (work / name).mkdir(exist_ok=True)
            yield work
        except BaseException:
            if not any(path.is_file() for name in ("bundle", "partial") for path in (work / name).rglob("*")):
                remove(work)
            raise


def _fetch_all(
    client: RegistryClient, layers: dict[str, Descriptor], output: Path, work: Path, advance: Advance, where: str
) -> None:
    bundle = work / "bundle"
    if layers[NAME].size > MAX_BYTES:
        raise RegistryError("manifest.json is too large.", where=where, expected=f"at most {MAX_BYTES:,} bytes")
    with disk_space(work, layers[NAME].size, "the pull"):
        _fetch(client, layers[NAME], bundle / NAME, output / NAME, work, advance)
        check_layers(layers, load_manifest(bundle), where)
        _prune(work, layers)
    absent = [
        one for name, one in layers.items() if not (_has_size(bundle / name, one) or _has_size(output / name, one))
    ]
    arrived = sum(path.stat().st_size for path in (work / "partial").iterdir())
    with disk_space(work, sum(layer.size for layer in absent) - arrived, "the pull"):
        for name, layer in layers.items():
            if name != NAME:
                _fetch(client, layer, bundle / name, output / name, work, advance)
    if list_bundle(bundle) != sorted(layers):
        raise RegistryError("Another program changed the files that were pulled.", where=bundle)


def _fetch(client: RegistryClient, layer: Descriptor, file: Path, before: Path, work: Path, advance: Advance) -> None:
    """Make `file` what `layer` is: as it is, from the bundle `before` it, or from the registry."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if _is_complete(file, layer):
        advance(layer.size)
        return
    file.unlink(missing_ok=True)
    if _is_complete(before, layer) and _linked(before, file):
        advance(layer.size)
        return
    expected = layer.digest.removeprefix("sha256:")
    partial = work / "partial" / expected
    client.download(layer.digest, layer.size, partial, advance)
    found = sha256(partial)
    if found != expected:
        partial.unlink()
        raise RegistryError("A file arrived with a wrong hash.", where=layer.title, found=found, expected=expected)
    partial.replace(file)


def _has_size(file: Path, layer: Descriptor) -> bool:
    return file.is_file() and not file.is_symlink() and file.stat().st_size == layer.size


def _is_complete(file: Path, layer: Descriptor) -> bool:
    return _has_size(file, layer) and f"sha256:{sha256(file)}" == layer.digest


def _linked(source: Path, file: Path) -> bool:
    try:
        os.link(source, file)
    except OSError:  # a file system without hard links
        return False
    return True


def _prune(work: Path, layers: dict[str, Descriptor]) -> None:
    """Drop what an earlier pull of another artifact left."""
    wanted = {work / "bundle" / name for name in layers}
    wanted |= {work / "partial" / layer.digest.removeprefix("sha256:") for layer in layers.values()}
    for folder in (work / "bundle", work / "partial"):
        for path in sorted(folder.rglob("*"), reverse=True):
            if path.is_symlink() or path.is_file():
                if path not in wanted:
                    path.unlink()
            elif not any(path.iterdir()):
                path.rmdir()
