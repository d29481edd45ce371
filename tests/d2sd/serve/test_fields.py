"""One table of request fields: each face is a column of it."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args

import pytest

from d2sd.runtime.sampling_params import SamplingParams, hints
from d2sd.serve.fields import FIELDS, Bodies, body_fields
from d2sd.serve.openai.protocol import ChatBody, CompletionBody, GenerationBody
from d2sd.serve.openai.responses_api.protocol import ResponsesBody
from d2sd.serve.triton.names import INPUTS

SAMPLING = [one.name for one in fields(SamplingParams)]


def test_every_sampling_parameter_has_a_row_with_its_neutral_value() -> None:
    neutral = SamplingParams()
    assert set(SAMPLING) <= set(FIELDS)
    for name in SAMPLING:
        assert FIELDS[name].neutral in (None, getattr(neutral, name)), name


def test_a_parameter_without_a_row_is_taken_by_every_face_as_it_is() -> None:
    """A new parameter, like `min_p`, has no row of its own."""
    row = FIELDS["min_p"]
    assert (row.json, row.bodies, row.triton, row.dynamo) == (None, "all", (), "sampling_options")
    assert body_fields("all")["min_p"] == (hints()["min_p"] | None, None)


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_bodies_have_the_fields_of_the_table(kind: type[GenerationBody]) -> None:
    for where in get_args(Bodies):
        if where != "none":
            assert body_fields(where).keys() <= kind.model_fields.keys()


def test_a_response_has_no_field_of_completions() -> None:
    assert body_fields("all").keys() <= ResponsesBody.model_fields.keys()
    assert not body_fields("completions").keys() & ResponsesBody.model_fields.keys()


def test_inputs_of_triton_are_fields_of_a_completion_with_fitting_types() -> None:
    types = {float: "FP32", int: ("INT32", "UINT64"), str: "STRING", bool: "BOOL"}
    for row in FIELDS.values():
        for name in row.triton:
            assert INPUTS[name].field == row.name
            value = getattr(SamplingParams(seed=1, max_tokens=1, stop="a"), row.name)
            kind = str if row.many else type(value)
            assert INPUTS[name].data_type in types[kind], name
