"""Structured output: what a caller asks for, and its compiled grammar for the tokenizer of a bundle. No torch."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from threading import Lock
from typing import TYPE_CHECKING, Any

from d2sd.errors import RequestError
from d2sd.runtime.grammar.guidance import GuidanceGrammar, GuidanceTokenizer

if TYPE_CHECKING:
    from d2sd.convert.bundle.load import Bundle

#: Compiled grammars that are kept; one takes from kilobytes to a few megabytes.
_KEPT = 64


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """The form of an answer, with vLLM's names: exactly one of the fields.

    Attributes:
        json: a JSON schema, as a mapping or as text. Answers have at most one space after a colon or comma and none
            elsewhere, unless the schema has {"x-guidance": {"whitespace_flexible": true}}.
        regex: a regular expression in Rust's syntax that the whole answer matches.
        choice: the strings of which the answer is one.
        grammar: a Lark grammar in llguidance's dialect.
        json_object: True for any JSON object.

    Raises `RequestError` naming the field.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if len(given) != 1:
            raise RequestError(
                "Structured output takes one form.", where="structured_outputs", found=", ".join(given) or "none",
                expected="one of json, regex, choice, grammar, json_object",
            )  # fmt: skip
        if isinstance(self.json, Mapping):
            object.__setattr__(self, "json", _dump(self.json))
        if self.choice is not None:
            texts = () if isinstance(self.choice, str) else tuple(self.choice)
            if not texts or not all(isinstance(text, str) and text for text in texts):
                raise RequestError(
                    "The choices are not strings.", where="structured_outputs.choice", found=self.choice,
                    expected="a list of non-empty strings",
                )  # fmt: skip
            object.__setattr__(self, "choice", texts)
        for name in ("json", "regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise RequestError("This is not text.", where=f"structured_outputs.{name}", found=type(value).__name__)

    @property
    def kind(self) -> str:
        """Name of the field that is set."""
        return next(field.name for field in fields(self) if getattr(self, field.name) is not None)

    @staticmethod
    def of_response_format(value: Mapping[str, Any] | None) -> StructuredOutputsParams | None:
        """From OpenAI's `response_format`; None for plain text. Raises `RequestError` for a type it does not have."""
        kind = None if value is None else value.get("type")
        if value is None or kind == "text":
            return None
        if kind == "json_object":
            return StructuredOutputsParams(json_object=True)
        if kind == "json_schema":
            wrapped = value.get("json_schema")
            schema = wrapped.get("schema") if isinstance(wrapped, Mapping) else None
            if not isinstance(schema, Mapping):
                raise RequestError(
                    "The schema is missing.", where="response_format.json_schema.schema", found=schema,
                    expected="a JSON schema",
                )  # fmt: skip
            return StructuredOutputsParams(json=schema)
        raise RequestError(
            "Unknown response format.", where="response_format.type", found=kind,
            expected="text, json_object or json_schema",
        )  # fmt: skip


class GrammarCompiler:
    """Compiles the grammars of one bundle and keeps the last ones. Thread-safe.

    Compilation takes milliseconds, for large schemas up to seconds, and the first one about a second more for the
    tokenizer: call it outside the engine's thread.
    """

    def __init__(self, bundle: Bundle) -> None:
        self._bundle, self._lock = bundle, Lock()
        self._tokenizer: GuidanceTokenizer | None = None
        self._grammars: OrderedDict[StructuredOutputsParams, GuidanceGrammar] = OrderedDict()

    def compile(self, params: StructuredOutputsParams, where: str = "structured_outputs") -> GuidanceGrammar:
        """The grammar for `Request.grammar`. Raises `RequestError` below the field `where` if it cannot be compiled."""
        with self._lock:
            if params in self._grammars:
                self._grammars.move_to_end(params)
                return self._grammars[params]
            tokenizer = self._tokenizer = self._tokenizer or self._make_tokenizer()
        made = _compile(tokenizer, params, f"{where}.{params.kind}")
        with self._lock:
            self._grammars[params] = made
            if len(self._grammars) > _KEPT:
                self._grammars.popitem(last=False)
        return made

    def _make_tokenizer(self) -> GuidanceTokenizer:
        bundle = self._bundle
        if not bundle.stop_token_ids:
            raise RequestError(
                "Structured output needs a token that ends the answer.", where=bundle.path / "target",
                found="no eos_token_id in generation_config.json or config.json",
            )  # fmt: skip
        ends = frozenset(bundle.stop_token_ids)
        return GuidanceTokenizer(bundle.tokenizer, ends, bundle.target.config.vocab_size)


def _compile(tokenizer: GuidanceTokenizer, params: StructuredOutputsParams, where: str) -> GuidanceGrammar:
    if params.regex is not None:
        return tokenizer.regex(params.regex, where)
    if params.choice is not None:
        return tokenizer.lark("start: " + " | ".join(map(_dump, params.choice)), where)
    if params.grammar is not None:
        return tokenizer.lark(params.grammar, where)
    assert not isinstance(params.json, Mapping)
    return tokenizer.json_schema(params.json or '{"type": "object"}', where)


def _dump(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError("This is not JSON.", where="structured_outputs.json", found=error) from None
