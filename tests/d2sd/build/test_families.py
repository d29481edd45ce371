"""Bundles of targets with experts, windows, Gemma's layers or gated delta nets: built, proven and served."""

from __future__ import annotations

from pathlib import Path

import pytest

from d2sd.build.pipeline import build
from d2sd.bundle.load import load_bundle
from d2sd.bundle.serving import make_engine
from d2sd.manifest import load_manifest
from d2sd.modeling.config import Family
from d2sd.recipe import load_recipe
from d2sd.runtime.request import Request
from tests.convert.helpers import write_project
from tests.tiny import HYBRIDS, greedy_text, tiny_decoder


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "gemma3_text", "gemma4_text", *HYBRIDS])
def test_a_bundle_is_built_and_served(family: Family, tmp_path: Path) -> None:
    decoder = tiny_decoder(family, head_dim=16, tie=False)
    recipe = write_project(tmp_path, decoder, checks={"count": 1, "tokens": 8})
    build(load_recipe(recipe), tmp_path / "bundle")
    manifest = load_manifest(tmp_path / "bundle")
    assert manifest.target.family == family
    greedy = [figures for figures in manifest.figures() if figures.startswith("greedy")]
    assert greedy
    assert all("equal_to_plain_decoding 1" in figures for figures in greedy)
    engine = make_engine(load_bundle(tmp_path / "bundle"), policy="hybrid")
    (sequence,) = engine.generate([Request((5, 9, 3), 12)])
    assert sequence.answer == greedy_text(decoder, [5, 9, 3], 12)
