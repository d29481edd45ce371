"""Requests of Dynamo's frontend: numbers as the client sent them, defaults of the recipe, nothing ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2sd.bundle.load import load_bundle
from d2sd.errors import RequestError
from d2sd.serve.dynamo.requests import RequestReader, capacity, depends_on_prompt, restored
from tests.d2sd.serve.dynamo.test_engine import message


@pytest.fixture(scope="module")
def reader(tiny_bundle: Path) -> RequestReader:
    return RequestReader(load_bundle(tiny_bundle), 60)


@given(st.decimals(0, 100, places=4))
def test_numbers_survive_float32(sent: Any) -> None:
    assert restored(float(numpy.float32(float(sent)))) == float(sent)


def test_a_request_has_what_the_client_sent(reader: RequestReader) -> None:
    sent = message(
        [3, 9],
        7,
        temperature=0.699999988079071,
        top_p=0.8999999761581421,
        top_k=5,
        seed=9,
        min_p=0.10000000149011612,
        repetition_penalty=1.2999999523162842,
        presence_penalty=0.20000000298023224,
        min_tokens=3,
        stop_token_ids=[8],
    )
    request = reader.read(sent | {"routing": {"priority": 3, "cache_salt": "a"}})
    sampling = request.sampling
    assert (request.prompt, request.max_new_tokens, request.stop_tokens) == ((3, 9), 7, frozenset({2, 8}))
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.7, 0.9, 5, 9)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.presence_penalty) == (0.1, 1.3, 0.2)
    assert (sampling.min_tokens, request.priority, request.cache_salt) == (3, -3, "a")
    assert depends_on_prompt(request)
    budgeted = reader.read({"token_ids": [3, 9], "stop_conditions": {"max_thinking_tokens": 5}})
    assert budgeted.sampling.thinking_token_budget == 5
    assert depends_on_prompt(budgeted)
    assert not depends_on_prompt(reader.read(message([3, 9], repetition_penalty=1.5)))


def test_what_the_client_left_out_is_the_recipes_or_all_there_is_room_for(reader: RequestReader) -> None:
    request = reader.read({"token_ids": [3, 9]})
    defaults = reader._bundle.recipe.sampling
    assert (request.sampling.temperature, request.max_new_tokens) == (defaults.temperature, 58)
    assert request.stop_tokens == {2}
    assert reader.read(message([3], 0)).max_new_tokens == 0  # the engine refuses it
    assert reader.read(message([3], ignore_eos=True)).stop_tokens == frozenset()
    # as long as the rest of an answer that has moved
    assert reader.read({"token_ids": [3, 9, 4, 5]}).max_new_tokens == 56


def test_capacity_is_what_the_pages_hold() -> None:
    assert capacity(64, 100, 16, 4) == 64
    assert capacity(64, 4, 16, 4) == 60


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("sampling_options", "best_of", 3),
        ("sampling_options", "use_beam_search", True),
        ("sampling_options", "length_penalty", 0.5),
        ("output_options", "prompt_logprobs", 1),
        ("sampling_options", "logit_bias", {"5": 1.0}),
        ("sampling_options", "bad_words", ["w5"]),
        ("sampling_options", "of_tomorrow", 0),
        ("sampling_options", "n", 0),
        ("stop_conditions", "of_tomorrow", 0.0),
        ("stop_conditions", "stop_regex", "w5"),
        ("output_options", "of_tomorrow", True),
        ("routing", "lora_name", "x"),
        ("routing", "of_tomorrow", 1),
        ("sampling_options", "max_tokens", 3),
        ("sampling_options", "skip_special_tokens", 1),
        ("sampling_options", "", "hot"),
        ("stop_conditions", "", [5]),
        ("of_tomorrow", "", {"a": 1}),
        ("require_reasoning", "", True),
        ("temperature", "", 0.5),
    ],
)
def test_what_is_not_done_is_refused_by_name(reader: RequestReader, part: str, name: str, value: Any) -> None:
    with pytest.raises(RequestError) as refused:
        reader.read({"token_ids": [3], part: {name: value} if name else value})
    assert refused.value.where == (name or part)
    reader.read({"token_ids": [3], part: {name: None} if name else None})


def test_what_asks_for_nothing_or_is_the_frontends_is_taken(reader: RequestReader) -> None:
    """Dynamo 1.6.1 sends all of these; a list that is empty and a switch that is off are no wish."""
    routing = {"backend_instance_id": 7, "dp_rank": 0, "expected_output_tokens": 9, "priority_jump": 0.5}
    added: dict[str, Any] = {"model": "m", "eos_token_ids": [2], "mdc_sum": "a", "annotations": ["token_ids"]}
    added |= {"routing": routing}
    added |= {"extra_args": {"formatted_prompt": "w3"}, "migration_link": {"trace_id": "a"}, "_HEALTH_CHECK": True}
    assert reader.read({"token_ids": [3], "require_reasoning": False, **added}).prompt == (3,)
    sampling = {
        "n": 1,
        "best_of": 1,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "logit_bias": {},
        "bad_words": [],
    }
    stops = {"stop": ["w5"], "stop_token_ids_visible": [5], "stop_token_ids_hidden": [6], "of_tomorrow": False}
    shown = {"skip_special_tokens": False, "return_tokens_as_token_ids": True, "no_stop_trim": True}
    parts = {"sampling_options": sampling, "stop_conditions": stops, "output_options": shown}
    assert reader.read({"token_ids": [3], **parts}).stop_tokens >= {5, 6}
