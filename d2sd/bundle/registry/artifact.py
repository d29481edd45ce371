"""The OCI manifest of a bundle.

One layer for each file: its digest is the SHA-256 that the bundle's manifest.json has, and its title is the path, so
that `oras pull` restores the bundle too. There are no dates, so equal bundles have equal digests.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from d2sd.errors import RegistryError
from d2sd.io import parse_json, sha256
from d2sd.manifest import NAME, Manifest
from d2sd.schema import validated

MANIFEST_TYPE: Literal["application/vnd.oci.image.manifest.v1+json"] = "application/vnd.oci.image.manifest.v1+json"
ARTIFACT_TYPE: Literal["application/vnd.d2sd.bundle.v1"] = "application/vnd.d2sd.bundle.v1"
FILE_TYPE = "application/vnd.d2sd.bundle.file.v1"
#: OCI's empty config, for artifacts that have none.
EMPTY, EMPTY_TYPE = b"{}", "application/vnd.oci.empty.v1+json"
TITLE = "org.opencontainers.image.title"
#: Registries accept manifests up to this size.
MAX_MANIFEST = 4 << 20

Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


class Descriptor(BaseModel):
    """One blob. Fields have OCI's names; the specification allows further ones."""

    model_config = ConfigDict(frozen=True)

    mediaType: str
    digest: Digest
    size: int = Field(ge=0)
    annotations: dict[str, str] = {}

    @property
    def title(self) -> str:
        """Path of the file in the bundle, or an empty string."""
        return self.annotations.get(TITLE, "")


class Artifact(BaseModel):
    """An OCI image manifest, version 1.1."""

    model_config = ConfigDict(frozen=True)

    schemaVersion: Literal[2] = 2
    mediaType: Literal["application/vnd.oci.image.manifest.v1+json"] = MANIFEST_TYPE
    artifactType: Literal["application/vnd.d2sd.bundle.v1"] = ARTIFACT_TYPE
    config: Descriptor
    layers: tuple[Descriptor, ...]
    annotations: dict[str, str] = {}

    @property
    def size(self) -> int:
        """Bytes of all layers."""
        return sum(layer.size for layer in self.layers)

    def canonical(self) -> bytes:
        """The bytes that are sent, and hashed."""
        return json.dumps(self.model_dump(), sort_keys=True).encode()


def digest_of(data: bytes) -> str:
    """sha256:..."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def artifact_of(bundle: Path, manifest: Manifest) -> Artifact:
    """The artifact of a verified bundle."""
    files = {NAME: sha256(bundle / NAME)} | manifest.files
    target, recipe = manifest.target, manifest.recipe
    return Artifact(
        config=Descriptor(mediaType=EMPTY_TYPE, digest=digest_of(EMPTY), size=len(EMPTY)),
        layers=tuple(
            Descriptor(
                mediaType=FILE_TYPE, digest=f"sha256:{hexdigest}", size=(bundle / name).stat().st_size,
                annotations={TITLE: name},
            )
            for name, hexdigest in files.items()
        ),
        annotations={
            TITLE: recipe.name,
            "d2sd.version": version("d2sd"),
            "d2sd.target": f"{target.family}, {target.parameters} parameters",
            "d2sd.precision": recipe.precision,
            "d2sd.policy": recipe.tree.policy,
        },
    )  # fmt: skip


def parse_artifact(data: bytes, where: str) -> Artifact:
    """Read the OCI manifest of a bundle. Raises `RegistryError` if it is another kind of artifact or damaged."""
    try:
        values = parse_json(data.decode())
    except ValueError as error:
        raise RegistryError("The artifact's manifest is damaged.", where=where, found=error) from None
    kind = values.get("artifactType") if isinstance(values, dict) else None
    if kind != ARTIFACT_TYPE:
        raise RegistryError("The artifact is not a bundle.", where=where, found=kind, expected=ARTIFACT_TYPE)
    return validated(Artifact, values, where, error=RegistryError, what="The artifact's manifest is damaged.")


def layers_by_name(artifact: Artifact, where: str) -> dict[str, Descriptor]:
    """{path in the bundle: layer}. Raises `RegistryError` for a file without a name, or two of one name."""
    found: dict[str, Descriptor] = {}
    for layer in artifact.layers:
        if not layer.title or layer.title in found:
            what = "Two files of the artifact have one name." if layer.title else "A file of the artifact has no name."
            raise RegistryError(what, where=where, found=layer.title or layer.digest)
        found[layer.title] = layer
    if NAME not in found:
        raise RegistryError("The artifact has no manifest.json.", where=where)
    return found


def check_layers(layers: dict[str, Descriptor], manifest: Manifest, where: str) -> None:
    """Raise `RegistryError` unless the layers are the files of the bundle's manifest, hash for hash.

    The manifest's file names were validated: none is absolute or has a `..`.
    """
    listed = {name: f"sha256:{hexdigest}" for name, hexdigest in manifest.files.items()}
    sent = {name: layer.digest for name, layer in layers.items() if name != NAME}
    if listed != sent:
        strange = sorted(name for name, _ in listed.items() ^ sent.items())
        raise RegistryError(
            "The artifact's files are not those of its manifest.json.", where=where, found=", ".join(strange[:10])
        )
    names = listed.keys() | {NAME}
    both = names & {str(above) for name in names for above in PurePosixPath(name).parents}
    if both:
        raise RegistryError("A name is a file and a folder.", where=where, found=", ".join(sorted(both)))
