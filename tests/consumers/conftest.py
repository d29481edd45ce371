"""A bundle of tiny models, as consumers get it, and its target in FP8."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from d2sd.convert.build import build
from d2sd.convert.drafter import write_drafter
from d2sd.modeling.config import Family, Role
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafter import Drafter
from d2sd.recipe import load_recipe
from tests.consumers.helpers import run_child
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
    recipe = write_project(work / "project")
    decoder = tiny_decoder(family, layers=6, rope=ROPE, tie=family == "qwen2")
    write_target_dir(work / "project/target", decoder)
    # Edge-LLM exports no target without a template.
    edit_json(work / "project/target/tokenizer_config.json", "chat_template", "{{ messages[0].content }}")
    for name, role in (("first", "first"), ("second", "variable_prefix")):
        drafter = _drafter(decoder, role)  # type: ignore[arg-type]
        write_drafter(work / "project" / name, drafter.config, drafter.state_dict())
    build(load_recipe(recipe), work / "bundle", check=lambda bundle: {})
    return Built(work / "bundle", decoder, _drafter(decoder, "first"))


@pytest.fixture(scope="session")
def fp8_target(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle's target in FP8, as ModelOpt exports it."""
    folder = tmp_path_factory.mktemp("fp8") / "target"
    run_child("modelopt", "fp8_child.py", built.target, folder)
    return folder


def _drafter(decoder: Decoder, role: Role) -> Drafter:
    """With as many layers as layer ids: ModelOpt takes no other."""
    return tiny_drafter(decoder.config, role=role, layers=3, target_layer_ids=(0, 2, 4))
