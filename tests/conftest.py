"""Fixtures that every test folder shares."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

# Tiny matrices gain nothing from threads, and threads that wait for each other on a busy machine cost a hundredfold.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """Directory of the SmolLM2-135M-Instruct checkpoint in Hugging Face's layout."""
    value = os.environ.get("D2SD_SMOLLM2")
    if not value:
        pytest.skip("D2SD_SMOLLM2 names no checkpoint directory of SmolLM2-135M-Instruct")
    directory = Path(value)
    # A wrong path is a mistake of whoever set it: skipping would hide it.
    assert (directory / "config.json").is_file(), f"D2SD_SMOLLM2={value} holds no config.json"
    return directory
