"""Turns the requests of Dynamo's frontend, token ids and options, into requests of the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_type_hints

import numpy

from d2sd.bundle.requests import default_params, each_completion, make_request
from d2sd.errors import RequestError
from d2sd.runtime.grammar.forms import StructuredOutputsParams
from d2sd.runtime.sampling_params import SamplingParams, hints
from d2sd.serve.fields import FIELDS
from d2sd.serve.structured import GrammarCompiler

if TYPE_CHECKING:
    from d2sd.bundle.load import Bundle
    from d2sd.runtime.request import Request


#: Numbers among the sampling options, also those that may be None: they arrive as float32.
_NUMBERS = [name for name, hint in get_type_hints(SamplingParams).items() if hint in (float, float | None)]
_STOP_IDS = ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden")
#: Sampling parameters that a part of a message has under the same name.
_SHARED = {name: FIELDS[name].dynamo for name in hints() if FIELDS[name].dynamo != "none"}
#: Fields of each part without a row in the table: those that are read here, and those of Dynamo's frontend and router.
_OWN: Mapping[str, Sequence[str]] = {
    "sampling_options": ("guided_decoding",),
    "stop_conditions": (*_STOP_IDS, "stop", "max_thinking_tokens"),
    "output_options": ("skip_special_tokens", "return_tokens_as_token_ids", "formatted_prompt", "no_stop_trim"),
    "routing": (
        *("backend_instance_id", "prefill_worker_id", "decode_worker_id", "dp_rank", "prefill_dp_rank"),
        *("expected_output_tokens", "priority_jump", "strict_priority", "allowed_worker_ids", "routing_constraints"),
    ),
}
#: Members of a request besides these parts and what `_PARTS` refuses.
_MEMBERS = (
    *("model", "token_ids", "eos_token_ids", "mdc_sum", "annotations", "router_config_override", "router"),
    *("extra_args", "agent_context", "migration_link", "mm_routing_info", "request_timestamp_ms", "tracker"),
    "_HEALTH_CHECK",
)
#: Parts of a request that are refused, by what they are for.
_PARTS = {
    "multi_modal_data": "images, audio and video",
    "prompt_embeds": "prompts as embeddings",
    "prefill_result": "disaggregated serving",
    "bootstrap_info": "disaggregated serving",
    "encoder_result": "disaggregated serving",
}
_FORMS = ("json", "regex", "choice", "grammar")


def restored(value: float) -> float:
    """The shortest decimal number that float32 stores as `value`: what the client sent."""
    return float(str(numpy.float32(value)))


def capacity(max_context: int, pages: int, page_size: int, block_size: int) -> int:
    """Most tokens of one request: a decode step must fit its pages too."""
    return min(max_context, pages * page_size - block_size)


def depends_on_prompt(request: Request) -> bool:
    """Whether the answer depends on where the prompt ends, which a request that has moved does not tell.

    repetition_penalty counts prompt and answer alike. A grammar depends on it too, but such requests are not moved.
    """
    sampling = request.sampling
    counts = sampling.presence_penalty or sampling.frequency_penalty or sampling.min_tokens
    return bool(counts) or sampling.thinking_token_budget is not None


class RequestReader:
    """Reads the requests for one bundle; options that a request leaves out take the defaults of the recipe.

    Without max_tokens an answer ends at the `capacity`, as in vLLM: a default length would begin anew when a stream
    moves to another worker.
    """

    def __init__(self, bundle: Bundle, capacity: int) -> None:
        self._bundle, self._capacity, self._grammars = bundle, capacity, GrammarCompiler(bundle)

    def read(self, message: Mapping[str, Any]) -> Request:
        """The request of a message. Raises `RequestError`, also for what d2sd does not do."""
        _refuse(message)
        bundle, prompt, stops = self._bundle, message["token_ids"], _part(message, "stop_conditions")
        found = {name: _part(message, part).get(name) for name, part in _SHARED.items()}
        values = {name: value for name, value in found.items() if value is not None}
        values |= {name: restored(values[name]) for name in _NUMBERS if name in values}
        values["thinking_token_budget"] = stops.get("max_thinking_tokens")
        if (switch := _annotated(message, "speculative")) is not None:
            values["speculative"] = switch
        length = values.pop("max_tokens", max(1, self._capacity - len(prompt)))
        ends = set[int]().union(*(stops.get(name, ()) for name in _STOP_IDS))
        ends -= set(bundle.stop_token_ids) if stops.get("ignore_eos") else set()
        params = default_params(bundle, **values | {"stop_token_ids": sorted(ends)})
        form = _form(_part(_part(message, "sampling_options"), "guided_decoding"))
        routing = _part(message, "routing")
        request = make_request(
            bundle,
            prompt,
            params,
            length,
            grammar=None if form is None else self._grammars.compile(form, "guided_decoding"),
            priority=-(routing.get("priority") or 0),
            cache_salt=routing.get("cache_salt") or "",
        )
        return each_completion(request)[0]


def _part(message: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of a request; what the client left out is null."""
    part = message.get(name) or {}
    if not isinstance(part, Mapping):
        raise RequestError("This part of a request is not a mapping.", where=name, found=part)
    return {key: value for key, value in part.items() if value is not None}


def _annotated(message: Mapping[str, Any], name: str) -> Any:
    """The value of an annotation `name:JSON`, a string that the frontend passes on unread; None without one."""
    for annotation in message.get("annotations") or ():
        key, _, value = annotation.partition(":")
        if key == name:
            try:
                return json.loads(value)
            except (ValueError, RecursionError):
                what, expected = "An annotation cannot be read.", f"JSON behind {name}:"
                raise RequestError(what, where="nvext.annotations", found=annotation[:80], expected=expected) from None
    return None


def _refuse(message: Mapping[str, Any]) -> None:
    """Raise RequestError for what d2sd does not do: Dynamo passes it on, and would not notice."""
    for name, purpose in _PARTS.items():
        if message.get(name):
            raise RequestError(f"This worker does not support {purpose}.", where=name)
    if (adapter := _part(message, "routing").get("lora_name")) is not None:
        raise _unsupported("lora_name", adapter)
    for name, value in message.items():
        if name not in (*_OWN, *_MEMBERS) and _asks(name, value):
            raise _unsupported(name, value)
    for part, own in _OWN.items():
        for name, value in _part(message, part).items():
            known = name in own or (name in FIELDS and FIELDS[name].dynamo == part)
            if not known and _asks(name, value):
                raise _unsupported(name, value)


def _asks(name: str, value: Any) -> bool:
    """Whether a field asks for something: it is not empty, not off, and not the value that changes nothing."""
    return value is not None and value is not False and value not in ("", [], {}, _neutral(name))


def _neutral(name: str) -> float | None:
    """The number that changes nothing in a field that the worker does without, if there is one."""
    neutral = FIELDS[name].neutral if name in FIELDS else None
    return neutral if type(neutral) in (int, float) else None


def _unsupported(name: str, value: Any) -> RequestError:
    neutral = _neutral(name)
    harmless = "nothing" if neutral is None else f"{neutral}, or nothing"
    return RequestError("This worker does not support the parameter.", where=name, found=value, expected=harmless)


def _form(guided: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """The form of the answer that `guided_decoding` demands."""
    if unknown := sorted(set(guided) - {*_FORMS, "backend"}):
        raise RequestError(
            "This worker does not support the form.", where=f"guided_decoding.{unknown[0]}", expected=", ".join(_FORMS)
        )
    forms = {name: guided[name] for name in _FORMS if name in guided}
    return StructuredOutputsParams(**forms) if forms else None
