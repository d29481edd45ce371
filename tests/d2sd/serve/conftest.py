"""A tiny bundle with a chat template, as `LLM` and engines open it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from d2sd import LLM
from d2sd.build.pipeline import build
from d2sd.bundle.load import Bundle, load_bundle
from d2sd.bundle.serving import make_engine
from d2sd.modeling.decoder import Decoder
from d2sd.recipe import load_recipe
from d2sd.runtime.engine import Engine
from tests.convert.helpers import write_project
from tests.d2sd.serve.http import Running, serving

#: Every turn is its role's word and its content; two turns of one role in a row are refused, as by many real templates.
TEMPLATE = (
    "{% for message in messages %}"
    "{% if not loop.first and message.role == messages[loop.index0 - 1].role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ {'system': 'w10', 'user': 'w11', 'assistant': 'w12'}[message.role] }} {{ message.content }} "
    "{% endfor %}{% if add_generation_prompt %}w12{% endif %}"
)


def build_tiny(
    folder: Path, *, template: str | None = TEMPLATE, decoder: Decoder | None = None, words: Any = None, **changes: Any
) -> Path:
    """Build the tiny project of tests/convert/helpers below `folder`; return its bundle. `changes` are the recipe's.

    `words` is a tokenizer in place of the project's.
    """
    recipe = write_project(folder / "project", decoder, **changes)
    if words is not None:
        words.save_pretrained(folder / "project" / "target")
    if template is not None:
        path = folder / "project" / "target" / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    build(load_recipe(recipe, ["checks.count=1"]), folder / "bundle", validate=False)
    return folder / "bundle"


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("llm"))


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path) -> Bundle:
    return load_bundle(tiny_bundle)


@pytest.fixture
def engine(bundle: Bundle) -> Engine:
    return make_engine(bundle)


@pytest.fixture(scope="module")
def server(tiny_bundle: Path) -> Iterator[Running]:
    with serving(tiny_bundle) as running:
        yield running


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> LLM:
    return LLM(tiny_bundle)
