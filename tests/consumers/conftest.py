"""Bundles of tiny models, as consumers get them, also in FP8."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from d2sd.build.pipeline import build
from d2sd.convert.kinds import DFLASH
from d2sd.modeling.config import Family, Role
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.recipe import load_recipe
from tests.convert.formats.helpers import ROPE
from tests.convert.helpers import edit_json, write_project, write_target_dir
from tests.tiny import tiny_decoder, tiny_drafter


@dataclass(frozen=True)
class Built:
    """A bundle in fp32, and the models it was made of."""

    folder: Path
    decoder: Decoder
    drafter: Drafter  # the first one

    @property
    def target(self) -> Path:
        return self.folder / "target"

    @property
    def first(self) -> Path:
        return self.folder / "drafter_first"


@pytest.fixture(scope="session", params=["llama"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    family: Family = request.param
    work = tmp_path_factory.mktemp(family)
    recipe = _project(work / "project", family)
    build(load_recipe(recipe), work / "bundle", validate=False)
    decoder = _decoder(family)
    return Built(work / "bundle", decoder, _drafter(decoder, "first"))


@pytest.fixture(scope="session", params=["wide drafters", "FP8 drafters"])
def fp8_bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with every linear layer but the head in FP8, calibrated at build time."""
    pytest.importorskip("modelopt", reason="the extra fp8 is not installed")
    work = tmp_path_factory.mktemp("fp8")
    recipe = _project(
        work / "project",
        "llama",
        precision="bf16",
        limits={"max_batch": 2, "max_context": 512},
        fp8={"drafters": request.param == "FP8 drafters", "count": 4, "tokens": 8},
    )
    loaded = load_recipe(recipe)
    build(loaded, work / "bundle", validate=False)
    return work / "bundle"


def _project(folder: Path, family: Family, **changes: Any) -> Path:
    recipe = write_project(folder, **changes)
    decoder = _decoder(family)
    write_target_dir(folder / "target", decoder)
    # Edge-LLM exports no target without a template.
    edit_json(folder / "target/tokenizer_config.json", "chat_template", "{{ messages[0].content }}")
    for name, role in (("first", "first"), ("second", "variable_prefix")):
        drafter = _drafter(decoder, role)  # type: ignore[arg-type]
        DFLASH.write(folder / name, drafter.config, drafter.state_dict())
    return recipe


def _decoder(family: Family) -> Decoder:
    return tiny_decoder(family, layers=6, rope=ROPE, tie=family == "qwen2")


def _drafter(decoder: Decoder, role: Role) -> Drafter:
    """With as many layers as layer ids: ModelOpt takes no other."""
    return tiny_drafter(decoder.config, role=role, layers=3, target_layer_ids=(0, 2, 4))
