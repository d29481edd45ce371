"""The recipes inside the package, addressed by name: `d2sd-build smollm2-135m`, `d2sd train smollm2-135m`."""

from __future__ import annotations

from pathlib import Path

from d2sd.errors import RecipeError

RECIPES = Path(__file__).with_name("recipes")


def shipped_names(kind: str = "") -> list[str]:
    """Names of the recipes in the package; `kind` is a folder of `recipes/`, such as `train`."""
    return sorted(path.stem for path in (RECIPES / kind).glob("*.yaml"))


def find_recipe(written: Path, kind: str = "") -> tuple[Path, Path]:
    """Return the file of a recipe given by path or by name, and the base folder of its relative paths.

    For a recipe addressed by name that base is `recipes/<kind>` below the current folder, whether or not it exists, as
    in a checkout whose root is the current folder. Raises `RecipeError` for an unknown name.
    """
    if written.is_file():
        return written, written.parent
    names = shipped_names(kind)
    by_name = f"a recipe in the package is addressed by its name: {', '.join(names)}"
    if written.name in names and written.parent == Path():
        return RECIPES / kind / f"{written.name}.yaml", Path("recipes") / kind
    if not written.exists():
        raise RecipeError("There is no such recipe.", where=written, fix=by_name)
    return written, written.parent  # a folder, a pipe: reading it raises the error
