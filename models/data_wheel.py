"""Pack the shipped drafters of a recipe as a wheel: the same bytes on every machine, because the recipe names its hash.

    python models/data_wheel.py recipes/smollm2-135m.yaml --out dist

The wheel holds the folders and files that `drafters` names by `pypi`, taken from where `local` says they are. A changed
drafter changes the hash: raise the version in the recipe and write the new hash there.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import sys
import zipfile
from pathlib import Path

from d2sd.recipe import PyPI, Recipe, load_recipe

ROOT = Path(__file__).resolve().parents[1]
METADATA = """Metadata-Version: 2.4
Name: {name}
Version: {version}
Summary: Trained drafters of the d2sd recipe {recipe}: checkpoints in the {layout} layout, and their calibration.
License-Expression: Apache-2.0
License-File: LICENSE
"""
WHEEL = "Wheel-Version: 1.0\nGenerator: d2sd\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
#: The earliest that a zip can say; files are stored as they are, for zlib's output differs from version to version.
EPOCH = (1980, 1, 1, 0, 0, 0)


def pack(recipe_file: Path, out: Path) -> Path:
    """Write the data wheel of a recipe into the folder `out` and return its path."""
    recipe = load_recipe(recipe_file)
    sources = wheels(recipe)
    package, version = one(sources)
    module = package.replace("-", "_")
    files: dict[str, bytes] = {}
    for source in sources:
        local = recipe.home / (source.local or "")
        for path in sorted(local.iterdir()) if local.is_dir() else [local]:
            files[f"{module}/{source.file}{f'/{path.name}' if local.is_dir() else ''}"] = path.read_bytes()
    info = f"{module}-{version}.dist-info"
    layout = "DFlash" if recipe.drafters.flex is None else "FlexDraft"
    metadata = METADATA.format(name=package, version=version, recipe=recipe.name, layout=layout)
    files[f"{info}/METADATA"] = metadata.encode()
    files[f"{info}/WHEEL"] = WHEEL.encode()
    files[f"{info}/licenses/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    lines = [f"{name},sha256={_urlsafe(content)},{len(content)}\n" for name, content in files.items()]
    files[f"{info}/RECORD"] = "".join([*lines, f"{info}/RECORD,,\n"]).encode()
    out.mkdir(parents=True, exist_ok=True)
    wheel = out / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            member = zipfile.ZipInfo(name, EPOCH)
            member.create_system, member.external_attr = 3, 0o100644 << 16  # a plain file of Unix, wherever this runs
            archive.writestr(member, content)
    return wheel


def wheels(recipe: Recipe) -> list[PyPI]:
    """What the recipe takes from wheels, but for its target."""
    drafters = recipe.drafters
    named = drafters.first, drafters.second, drafters.flex, drafters.calibration
    return [source.pypi for source in named if source is not None and source.pypi is not None]


def one(sources: list[PyPI]) -> tuple[str, str]:
    """Package and version, which all sources share."""
    ((package, version),) = {(source.package, source.version) for source in sources}
    return package, version


def _urlsafe(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    given = parser.parse_args()
    wheel = pack(given.recipe, given.out)
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    expected = {source.sha256 for source in wheels(load_recipe(given.recipe))}
    print(wheel)
    if expected != {found}:
        sys.exit(f"its sha256 is {found}; the recipe says {', '.join(sorted(expected))}")


if __name__ == "__main__":
    main()
