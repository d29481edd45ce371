"""Sends a bundle to a registry."""

from __future__ import annotations

from pathlib import Path

from d2sd.bundle.files import verify_files
from d2sd.bundle.registry.artifact import EMPTY, artifact_of, digest_of
from d2sd.bundle.registry.client import RegistryClient
from d2sd.bundle.registry.hooks import run_hook
from d2sd.bundle.registry.reference import parse_reference
from d2sd.errors import RegistryError
from d2sd.manifest import load_manifest
from d2sd.progress import Progress, silent


def push(
    bundle: Path, reference: str, *, plain_http: bool = False, sign_command: str | None = None,
    progress: Progress = silent,
) -> str:  # fmt: skip
    """Push the bundle as one artifact; return HOST/NAME@DIGEST, which `pull` accepts.

    Files that the repository has are not sent. The tag is set last, after `sign_command` has run, so it never names an
    incomplete or unsigned artifact. Raises `BundleError` for a damaged bundle, `RegistryError` for all else.
    """
    parsed = parse_reference(reference)
    if parsed.digest:
        raise RegistryError("An artifact is pushed to a tag.", where="REFERENCE", found=reference)
    manifest = load_manifest(bundle)
    verify_files(bundle, manifest, progress)
    artifact = artifact_of(bundle, manifest)
    data = artifact.canonical()
    digest = digest_of(data)
    with RegistryClient(parsed, "pull,push", plain_http=plain_http) as client:
        if not client.has_blob(artifact.config.digest):
            client.upload(artifact.config.digest, artifact.config.size, EMPTY, lambda count: None)
        with progress(f"pushing {bundle.name}", artifact.size) as advance:
            for layer in artifact.layers:
                if client.has_blob(layer.digest):
                    advance(layer.size)
                else:
                    client.upload(layer.digest, layer.size, bundle / layer.title, advance)
        if sign_command:
            client.put_manifest(digest, data)
            run_hook(sign_command, parsed.pinned(digest), "--sign-command")
        client.put_manifest(parsed.tag, data)
    return parsed.pinned(digest)
