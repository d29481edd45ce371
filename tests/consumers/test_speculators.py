"""speculators itself reads what we write and says the same with it; we read what it writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from d2sd.convert.formats.convert import convert
from d2sd.convert.kinds import DFLASH
from d2sd.modeling.drafters.dflash import Drafter
from tests.consumers.helpers import TOLERANCE, expected_added, expected_logits, needs, run_child, write_prompt
from tests.convert.formats.helpers import reduced, tiny_pair
from tests.convert.helpers import tree_bytes, write_target_dir
from tests.tiny import HEADS, tiny_drafter

pytestmark = needs("speculators")


@pytest.fixture(params=["whole vocabulary", "draft vocabulary"])
def drafter(request: pytest.FixtureRequest) -> Drafter:
    whole = tiny_pair()[1]
    return whole if request.param == "whole vocabulary" else reduced(whole)


def drafted(folder: Path, target: Path, work: Path, *converted: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [G, Vd] by speculators, the ids they are of, and what a head adds to them."""
    given, said = write_prompt(work / "in.safetensors", tiny_pair()[0]), work / "out.safetensors"
    run_child("speculators", "speculators_child.py", folder, target, given, said, *converted)
    out = load_file(said)
    return out["logits"], out["ids"], out["added"]


def test_its_loader_reads_ours_and_drafts_the_same(tmp_path: Path, drafter: Drafter) -> None:
    decoder, _ = tiny_pair()
    target = write_target_dir(tmp_path / "target", decoder)
    DFLASH.write(tmp_path / "zlab", drafter.config, drafter.state_dict())
    convert(tmp_path / "zlab", "speculators", tmp_path / "out", target=target)
    logits, ids, _ = drafted(tmp_path / "out", target, tmp_path)
    assert ids.tolist() == list(drafter.config.draft_vocabulary or range(drafter.config.vocab_size))
    torch.testing.assert_close(logits, expected_logits(decoder, drafter), atol=TOLERANCE, rtol=0)


def test_what_its_own_converter_writes_is_our_file_again(tmp_path: Path) -> None:
    decoder, drafter = tiny_pair()
    target = write_target_dir(tmp_path / "target", decoder)
    DFLASH.write(tmp_path / "zlab", drafter.config, drafter.state_dict())
    drafted(tmp_path / "zlab", target, tmp_path, tmp_path / "theirs")
    convert(tmp_path / "theirs", "z-lab", tmp_path / "back", target=target)
    assert tree_bytes(tmp_path / "back") == tree_bytes(tmp_path / "zlab")


@pytest.mark.parametrize("head", [name for name in HEADS if name not in ("injection", "pair")])  # which it lacks
@pytest.mark.parametrize("whole", [True, False], ids=["whole vocabulary", "draft vocabulary"])
def test_its_heads_score_pairs_the_same(tmp_path: Path, head: str, whole: bool) -> None:
    """Logits of a block and scores of each token behind another equal DSpark's and DFlash 2's."""
    if head == "selector" and not whole:
        pytest.skip("speculators wants all tokens for DFlash 2")
    decoder, plain = tiny_pair()
    from_anchor, ids = head != "selector", plain.config.target_layer_ids
    drafter = tiny_drafter(decoder.config, target_layer_ids=ids, head=HEADS[head], sample_from_anchor=from_anchor)
    drafter = drafter if whole else reduced(drafter)
    target = write_target_dir(tmp_path / "target", decoder)
    DFLASH.write(tmp_path / "zlab", drafter.config, drafter.state_dict())
    convert(tmp_path / "zlab", "speculators", tmp_path / "out", target=target)
    logits, tokens, added = drafted(tmp_path / "out", target, tmp_path)
    assert tokens.tolist() == list(drafter.config.draft_vocabulary or range(drafter.config.vocab_size))
    torch.testing.assert_close(logits, expected_logits(decoder, drafter), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(added, expected_added(decoder, drafter), atol=TOLERANCE, rtol=0)
