"""One table of engine options: every face has its names, defaults and bounds."""

from __future__ import annotations

import inspect
from typing import Any

import click
import numpy as np
import pytest

from d2sd import LLM, AsyncLLM
from d2sd.bundle.options import EngineKeywords, EngineOptions
from d2sd.cli.serve import serve
from d2sd.cli.worker import worker
from d2sd.errors import D2SDError
from d2sd.serve.triton.parameters import Parameters

DEFAULTS = {name: field.default for name, field in EngineOptions.model_fields.items()}


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_python_has_the_options_by_name(kind: Any) -> None:
    given = {name: one.default for name, one in inspect.signature(kind).parameters.items()}
    assert given.pop("model") is inspect.Parameter.empty
    assert given.pop("verify") is True
    assert given == DEFAULTS


@pytest.mark.parametrize("command", [serve, worker])
def test_commands_have_the_options_with_their_bounds(command: click.Command) -> None:
    options = {option.name: option for option in command.params if option.name in DEFAULTS}
    assert {name: option.default for name, option in options.items()} == DEFAULTS
    kinds = {name: option.type for name, option in options.items() if isinstance(option.type, click.IntRange)}
    assert {name: (kind.min, kind.max) for name, kind in kinds.items()} == {
        "max_batch": (1, 4096),
        "tensor_parallel": (1, 64),
    }
    assert isinstance(options["policy"].type, click.Choice)


def test_triton_has_the_options_but_its_device() -> None:
    with pytest.raises(D2SDError, match="no such parameter") as refused:
        Parameters.parse(["bundle=/b", "device=cuda"])
    assert set(str(refused.value.expected).split(", ")) == {*DEFAULTS, *Parameters.model_fields} - {"device"}
    assert Parameters.parse(["bundle=/b", "max_batch=3", "prefix_cache=false"]).strings() == {
        "bundle": "/b",
        "max_batch": "3",
        "prefix_cache": "False",
        "tensor_parallel": "1",
        "backend": "torch",
        "max_waiting": "256",
        "stream_interval": "4",
        "drain_timeout": "30",
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_batch": "2"},
        {"max_batch": True},
        {"max_batch": 2.0},
        {"max_batch": 4097},
        {"max_batch": float("nan")},
        {"max_batch": 10**400},
        {"tensor_parallel": 0},
        {"prefix_cache": 1},
        {"policy": "fast"},
        {"policy": {"name": "chain"}},
        {"device": b"cpu"},
        {"of_tomorrow": None},
    ],
)
def test_a_wrong_or_unknown_option_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(D2SDError) as refused:
        EngineOptions.of(wrong, "This is wrong.", strict=True)
    assert refused.value.where == next(iter(wrong))
    assert len(str(refused.value)) < 1000


def test_numbers_may_be_numpys() -> None:
    assert EngineOptions.of({"max_batch": np.int64(3)}, "", strict=True) == EngineOptions(max_batch=3)


def test_type_checkers_know_every_option() -> None:
    assert EngineKeywords.__annotations__.keys() == EngineOptions.model_fields.keys()
