"""ModelOpt's own loader reads a bundle's drafter and says the same with it; we read what its exporter makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from d2sd.convert.formats.read import read_drafter
from tests.consumers.conftest import Built
from tests.consumers.helpers import ANCHOR, TOLERANCE, expected_logits, needs, prompt, run_child, write_prompt

pytestmark = needs("modelopt")


@pytest.fixture(scope="module")
def run(built: Built, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], Path]:
    """Return the tensors of ModelOpt's run, and the folder that it exported."""
    work = tmp_path_factory.mktemp("modelopt")
    given, out = write_prompt(work / "in.safetensors", built.decoder), work / "out.safetensors"
    run_child("modelopt", "modelopt_child.py", built.first, built.target, given, out, work / "exported")
    return load_file(out), work / "exported"


def test_its_loader_reads_ours_and_drafts_the_same(built: Built, run: tuple[dict[str, Tensor], Path]) -> None:
    said, _ = run
    assert said["anchor"].tolist() == [int(prompt(built.decoder)[ANCHOR])]
    expected = expected_logits(built.decoder, built.drafter)[1:]  # it leaves out the anchor's own slot
    torch.testing.assert_close(said["logits"], expected, atol=TOLERANCE, rtol=0)


def test_what_it_exports_is_read_as_what_it_was(built: Built, run: tuple[dict[str, Tensor], Path]) -> None:
    drafter = read_drafter(run[1])
    assert (drafter.format, drafter.config) == ("DFlash", built.drafter.config)
    for name, tensor in built.drafter.state_dict().items():
        assert torch.equal(drafter.tensors[name], tensor)
