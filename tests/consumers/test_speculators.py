"""speculators itself reads what we write and says the same with it; we read what it writes.

Needs an environment with the package: D2SD_SPECULATORS_PYTHON names its interpreter, or this one has it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from d2sd.convert.drafter import write_drafter
from d2sd.convert.formats.convert import convert
from d2sd.modeling.drafter import Drafter
from tests.convert.formats.helpers import draft_logits, reduced, tiny_pair, write_tiny_target
from tests.convert.helpers import tree_bytes
from tests.tiny import random_tokens

PYTHON = os.environ.get("D2SD_SPECULATORS_PYTHON") or (
    sys.executable if importlib.util.find_spec("speculators") else None
)
pytestmark = pytest.mark.skipif(PYTHON is None, reason="no speculators here, and no D2SD_SPECULATORS_PYTHON")
ANCHOR = 9
CHILD = Path(__file__).with_name("speculators_child.py")


@pytest.fixture(params=["whole vocabulary", "draft vocabulary"])
def drafter(request: pytest.FixtureRequest) -> Drafter:
    whole = tiny_pair()[1]
    return whole if request.param == "whole vocabulary" else reduced(whole)


def drafted(folder: Path, target: Path, work: Path, *converted: Path) -> tuple[Tensor, Tensor]:
    """Logits [G, Vd] by speculators, and the ids they are of."""
    tokens = random_tokens(tiny_pair()[0], 1, 20)[0]
    save_file({"tokens": tokens, "anchor": torch.tensor(ANCHOR)}, work / "in.safetensors")
    command = [PYTHON, CHILD, folder, target, work / "in.safetensors", work / "out.safetensors", *converted]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    out = load_file(work / "out.safetensors")
    return out["logits"], out["ids"]


def test_its_loader_reads_ours_and_drafts_the_same(tmp_path: Path, drafter: Drafter) -> None:
    decoder, _ = tiny_pair()
    target = write_tiny_target(tmp_path / "target", decoder)
    write_drafter(tmp_path / "zlab", drafter.config, drafter.state_dict())
    convert(tmp_path / "zlab", "speculators", tmp_path / "out", target=target)
    logits, ids = drafted(tmp_path / "out", target, tmp_path)
    tokens = random_tokens(decoder, 1, 20)[0]
    expected = draft_logits(decoder, drafter, tokens[:ANCHOR], int(tokens[ANCHOR]))
    assert ids.tolist() == list(drafter.config.draft_vocabulary or range(drafter.config.vocab_size))
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_what_its_own_converter_writes_comes_back_byte_for_byte(tmp_path: Path) -> None:
    decoder, drafter = tiny_pair()
    target = write_tiny_target(tmp_path / "target", decoder)
    write_drafter(tmp_path / "zlab", drafter.config, drafter.state_dict())
    drafted(tmp_path / "zlab", target, tmp_path, tmp_path / "theirs")
    convert(tmp_path / "theirs", "speculators", tmp_path / "again", target=target)
    theirs = tree_bytes(tmp_path / "theirs")
    assert tree_bytes(tmp_path / "again") == {name: theirs[name] for name in ("config.json", "model.safetensors")}
    convert(tmp_path / "theirs", "z-lab", tmp_path / "back", target=target)
    assert tree_bytes(tmp_path / "back") == tree_bytes(tmp_path / "zlab")
