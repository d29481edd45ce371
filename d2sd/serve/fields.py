"""The fields of a request in one table: a row is a field, and the faces are columns.

A sampling parameter has its name, type, bounds and neutral value in `SamplingParams`, and every face takes it by that
name: it needs no row here. Rows say where a face has another name or type, or does without. All other fields that
several faces know, or that a face takes without effect, have a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field as Bounds

from d2sd.runtime.sampling_params import SamplingParams, hints

#: The bodies of OpenAI's API that have a field under its name: all, or those of chats and text completions. `none`: a
#: body's class has it under another type, or no body has it.
Bodies = Literal["all", "completions", "none"]
#: The part of a message of Dynamo that has a field under its name. `none`: no part has it.
DynamoPart = Literal["sampling_options", "stop_conditions", "output_options", "routing", "none"]
#: Types of Triton's tensors.
DataType = Literal["STRING", "BOOL", "INT32", "INT64", "UINT32", "UINT64", "FP32"]

# The first wrong element is enough: an error for each of a hundred thousand takes seconds.
TokenIds = Annotated[list[Annotated[int, Bounds(ge=0)]], Bounds(fail_fast=True)]
Texts = Annotated[list[str], Bounds(fail_fast=True)]
_Biases = dict[Annotated[str, Bounds(pattern=r"^[0-9]{1,9}$")], float]


@dataclass(frozen=True, slots=True)
class Field:
    """A row of the table."""

    name: str
    json: Any = None  # its type in a JSON body; None: that of `SamplingParams`
    neutral: Any = None  # the value that changes nothing, which every face takes that does no more
    bodies: Bodies = "all"
    triton: tuple[str, ...] = ()  # inputs that hold it
    data_type: DataType = "FP32"  # of these
    dynamo: DynamoPart = "none"

    @property
    def many(self) -> bool:
        """Whether Triton's inputs hold a list of values."""
        return self.data_type == "STRING"


def _named(name: str, other: str = "") -> tuple[str, str]:
    """Names of a parameter in Triton's OpenAI frontend, `other` if that differs, and in TensorRT-LLM's model."""
    return f"sampling_param_{name}", other or name


_ROWS = (
    # sampling parameters
    Field("temperature", triton=_named("temperature"), dynamo="sampling_options"),
    Field("top_p", triton=_named("top_p"), dynamo="sampling_options"),
    Field("top_k", triton=("sampling_param_top_k",), data_type="INT32", dynamo="sampling_options"),
    Field("frequency_penalty", triton=_named("frequency_penalty"), dynamo="sampling_options"),
    Field("presence_penalty", triton=_named("presence_penalty"), dynamo="sampling_options"),
    Field("seed", triton=_named("seed"), data_type="UINT64", dynamo="sampling_options"),
    Field("max_tokens", bodies="completions", triton=_named("max_tokens"), data_type="INT32", dynamo="stop_conditions"),
    Field("stop", str | Texts, triton=_named("stop", "stop_words"), data_type="STRING"),
    Field("min_tokens", dynamo="stop_conditions"),
    Field("thinking_token_budget"),  # Dynamo's max_thinking_tokens
    Field("ignore_eos", dynamo="stop_conditions"),
    Field("stop_token_ids", TokenIds, dynamo="stop_conditions"),
    Field("logprobs", bodies="none", dynamo="output_options"),
    Field("prompt_logprobs", bodies="completions"),
    Field("n", Annotated[int, Bounds(ge=1)], bodies="completions"),
    Field("logit_bias", _Biases),
    Field("bad_words", Texts),
    Field("bad_words_token_ids", bodies="none"),
    Field("structured_outputs", bodies="none"),
    # `{"policy": ...}`, which no input of Triton's types holds, is a field of its `sampling_parameters`
    Field("speculative", triton=("sampling_param_speculative",), data_type="BOOL"),  # an annotation of Dynamo's
    # of the server
    Field("priority", bodies="none", dynamo="routing"),
    Field("cache_salt", bodies="none", dynamo="routing"),
    # accepted for their senders' sake, without effect on an answer
    Field("user", str),
    Field("safety_identifier", str),
    Field("prompt_cache_key", str),
    Field("prompt_cache_retention", str),
    Field("metadata", dict[str, str]),
    Field("store", bool),  # nothing is stored
    Field("service_tier", Literal["auto", "default"]),
    # the values that change nothing; others are refused
    Field("best_of", int, 1, bodies="completions"),  # as many as `n`
    Field("use_beam_search", Literal[False], False),
    Field("length_penalty", Literal[1], 1),
    Field("skip_special_tokens", Literal[True], True),
    Field("spaces_between_special_tokens", Literal[True], True),
)


def _table() -> dict[str, Field]:
    """All rows by name, with those of the sampling parameters that every face takes as they are."""
    rows = {row.name: row for row in _ROWS}
    for parameter in fields(SamplingParams):
        row = rows.get(parameter.name) or Field(parameter.name, dynamo="sampling_options")
        neutral = None if parameter.default is MISSING else parameter.default
        rows[row.name] = replace(row, neutral=neutral)
    return rows


FIELDS: Mapping[str, Field] = MappingProxyType(_table())


def body_fields(bodies: Bodies) -> dict[str, Any]:
    """The fields of these bodies as arguments of pydantic's `create_model`; what a request leaves out is None."""
    kinds = {row.name: row.json or hints()[row.name] for row in FIELDS.values() if row.bodies == bodies}
    return {name: (kind | None, None) for name, kind in kinds.items()}
