"""Turns the input tensors of a Triton request into the body of an OpenAI completion, which `d2sd serve` reads too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from d2sd.errors import RequestError, shortened
from d2sd.io import parse_json
from d2sd.serve.fields import FIELDS
from d2sd.serve.openai.protocol import CompletionBody
from d2sd.serve.triton.names import INPUTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

#: guided_decoding_guide_type of TensorRT-LLM -> field of structured_outputs.
_GUIDES = {"json_schema": "json", "json": "json_object", "regex": "regex", "ebnf_grammar": "grammar"}
#: Values in sampling_parameters that the frontend sends for parameters that a client did not give.
_NEUTRAL = {"logprobs": (False, None), **{name: (FIELDS[name].neutral, None) for name in ("best_of", "n")}}


@dataclass(slots=True)
class Call:
    """One request to the model."""

    body: CompletionBody | None  # None: cancel the request of the same id
    options: dict[str, Any] = field(default_factory=dict)  # the values of inputs with `@name`, by that name

    @property
    def echo(self) -> str:
        """The prompt, if it is to precede the answer."""
        assert self.body is not None
        return str(self.body.prompt) if self.options.get("exclude_input") is False else ""


def read_call(tensors: Mapping[str, np.ndarray[Any, Any]], parameters: Mapping[str, Any]) -> Call:
    """Read a request from its input tensors of any shape. Raises RequestError that names the input.

    Triton makes a parameter of every member of a `generate` body that is not an input: all are refused.
    """
    if unknown := [name for name in parameters if not name.startswith("triton_")]:
        raise RequestError("Unsupported parameter.", where=unknown[0], found=parameters[unknown[0]])
    fields: dict[str, Any] = {}
    options: dict[str, Any] = {}
    origin: dict[str, str] = {}  # field -> input that gave it
    for name, tensor in tensors.items():
        value = _value(name, tensor)
        kind = INPUTS[name]
        if not kind.field:
            if value not in kind.neutral:
                raise RequestError("This input is not supported.", where=name, found=value)
            continue
        target, key = (options, kind.field[1:]) if kind.field.startswith("@") else (fields, kind.field)
        if key in target and target[key] != value:
            raise RequestError("Two inputs set one parameter.", where=name, found=f"{origin[key]} and {name}")
        target[key], origin[key] = value, name
    if options.get("cancel"):
        return Call(None, options)
    for key, value in _sampling_parameters(options.pop("sampling_parameters", None)).items():
        if key in fields and fields[key] != value:
            raise RequestError("Two inputs set one parameter.", where="sampling_parameters", found=key)
        fields[key] = value
    if "guide" in options or "guide_type" in options:
        fields["structured_outputs"] = _guide(options.pop("guide_type", ""), options.pop("guide", ""))
    if options.get("cumulative_logprob"):
        fields["logprobs"] = 0
    if "prompt" not in fields:
        raise RequestError("The prompt is missing.", where="text_input", expected="one string")
    return Call(_body(fields), options)


def _value(name: str, tensor: np.ndarray[Any, Any]) -> Any:
    """The value, or the list of values, of an input."""
    kind = INPUTS[name]
    values = [_plain(name, item) for item in tensor.reshape(-1)]
    if kind.many:
        return values
    if len(values) != 1:
        raise RequestError("The input needs one value.", where=name, found=f"shape {list(tensor.shape)}")
    return values[0]


def _plain(name: str, item: Any) -> Any:
    if isinstance(item, bytes):
        try:
            return item.decode("utf-8")
        except UnicodeDecodeError:
            raise RequestError("The input is not UTF-8.", where=name, found=item[:80]) from None
    if INPUTS[name].data_type == "FP32":
        return float(str(item))  # 0.7 in float32 is 0.699999988; its shortest decimal is the value that was meant
    return item.item() if hasattr(item, "item") else item


def _sampling_parameters(text: str | None) -> dict[str, Any]:
    """The fields in the JSON text that the frontend sends to the backend `vllm`."""
    if text is None:
        return {}
    where = "sampling_parameters"
    fields = _json_object(text, where, "input")
    for key, neutral in _NEUTRAL.items():
        if key in fields:
            if repr(fields[key]) not in map(repr, neutral):  # 1 and True are equal
                raise RequestError("This parameter is not supported.", where=f"{where}.{key}", found=fields[key])
            del fields[key]
    if "guided_decoding" in fields:  # JSON text of vLLM's GuidedDecodingParams
        guide = _json_object(fields.pop("guided_decoding"), f"{where}.guided_decoding", "parameter")
        fields["structured_outputs"] = {key: value for key, value in guide.items() if value not in (None, False)}
    return fields


def _json_object(text: Any, where: str, what: str) -> dict[str, Any]:
    try:
        value = parse_json(text) if isinstance(text, str) else text
    except ValueError as error:
        raise RequestError(f"The {what} is not JSON.", where=where, found=str(error)) from None
    if not isinstance(value, dict):
        raise RequestError(f"The {what} is not a JSON object.", where=where, found=value)
    return value


def _guide(kind: str, guide: str) -> dict[str, Any]:
    if kind not in _GUIDES:
        expected = " or ".join(_GUIDES)
        raise RequestError("Unknown guide.", where="guided_decoding_guide_type", found=kind, expected=expected)
    return {_GUIDES[kind]: True if kind == "json" else guide}


def _body(fields: dict[str, Any]) -> CompletionBody:
    try:
        return CompletionBody(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"][:2])
        what = "Unsupported parameter." if first["type"] == "extra_forbidden" else f"Invalid value: {first['msg']}."
        raise RequestError(what, where=name, found=shortened(repr(first.get("input")), 80)) from None
