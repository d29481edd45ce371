"""Structured output: what a caller asks for, and its compiled grammar for the tokenizer of a bundle. No torch."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, Any, TypeVar

from d2sd.errors import RequestError
from d2sd.runtime.grammar.guidance import GuidanceGrammar, GuidanceTokenizer
from d2sd.serve.schemas import text_with_options, with_options

if TYPE_CHECKING:
    from d2sd.bundle.load import Bundle

T = TypeVar("T")

#: Compiled grammars that are kept; one takes from kilobytes to a few megabytes.
_KEPT = 64
#: The fields of `StructuredOutputsParams` of which one is given.
FORMS = ("json", "regex", "choice", "grammar", "json_object")
#: Keys of a response format; name, description and strict are for people and for other servers.
_FORMAT_KEYS = {"type", "json_schema", "schema", "name", "description", "strict"}
#: Refused grammars that are remembered: trying one again costs up to seconds.
_REFUSED = 1024


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """The form of an answer, with vLLM's names: exactly one of the first five fields, and options.

    Attributes:
        json: a JSON schema, as a mapping or as text. Answers have at most one space after a colon or comma and none
            elsewhere, unless the schema has {"x-guidance": {"whitespace_flexible": true}}.
        regex: a regular expression in Rust's syntax that the whole answer matches.
        choice: the strings of which the answer is one.
        grammar: a Lark grammar in llguidance's dialect.
        json_object: True for any JSON object.
        disable_any_whitespace: no space in JSON outside of its strings.
        disable_additional_properties: objects of a JSON schema that names properties have no others, unless it says
            so: what vLLM's default backend does. Without it they may, as the standard has it.

    Raises `RequestError` naming the field.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False

    def __post_init__(self) -> None:
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            raise RequestError(
                "Structured output takes one form.", where="structured_outputs", found=", ".join(given) or "none",
                expected="one of json, regex, choice, grammar, json_object",
            )  # fmt: skip
        if self.json_object and self.disable_any_whitespace:
            object.__setattr__(self, "json", {"type": "object"})
            object.__setattr__(self, "json_object", None)
        compact, closed = self.disable_any_whitespace, self.disable_additional_properties
        if isinstance(self.json, str):
            object.__setattr__(self, "json", text_with_options(self.json, compact=compact, closed=closed))
        if isinstance(self.json, Mapping):
            object.__setattr__(self, "json", _dump(with_options(self.json, compact=compact, closed=closed)))
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
        return next(name for name in FORMS if getattr(self, name) is not None)

    @property
    def digest(self) -> bytes:
        """A hash of the form."""
        return sha256(repr(self).encode("utf-8", "surrogatepass")).digest()

    @staticmethod
    def of_response_format(value: Mapping[str, Any] | None, **options: Any) -> StructuredOutputsParams | None:
        """From OpenAI's `response_format`, with a schema for `json_object` too; None for plain text.

        The schema may be inside `json_schema`, as OpenAI's chats have it, or next to the type, as its responses
        and other servers do. `options` are the fields `disable_...`. Raises `RequestError` for what it does not have.
        """
        if value is None:
            return None
        kind = value.get("type")
        if unknown := sorted(map(str, value.keys() - _FORMAT_KEYS)):
            raise RequestError("This is not part of a response format.", where=f"response_format.{unknown[0]}")
        if kind == "text":
            return None
        if kind not in ("json_object", "json_schema"):
            raise RequestError(
                "Unknown response format.",
                where="response_format.type",
                found=kind,
                expected="text, json_object or json_schema",
            )
        wrapped, schema, where = value.get("json_schema"), value.get("schema"), "response_format.schema"
        if schema is None and (kind == "json_schema" or wrapped is not None):
            schema = wrapped.get("schema") if isinstance(wrapped, Mapping) else None
            where = "response_format.json_schema.schema"
        if kind == "json_object" and (schema is None or schema == {}):
            return StructuredOutputsParams(json_object=True, **options)
        if not isinstance(schema, Mapping):
            raise RequestError("The schema is missing.", where=where, found=schema, expected="a JSON schema")
        return StructuredOutputsParams(json=schema, **options)


class GrammarCompiler:
    """Compiles the grammars of one bundle and keeps the last ones, and why others were refused. Thread-safe.

    Compilation takes milliseconds, for large schemas up to seconds, and the first one about a second more for the
    tokenizer: call it outside the engine's thread.
    """

    def __init__(self, bundle: Bundle) -> None:
        self._bundle, self._lock = bundle, Lock()
        self._tokenizer: GuidanceTokenizer | RequestError | None = None
        self._grammars: OrderedDict[bytes, GuidanceGrammar] = OrderedDict()
        self._refused: OrderedDict[bytes, RequestError] = OrderedDict()

    def knows(self, params: StructuredOutputsParams) -> bool:
        """Whether `compile` answers without compiling."""
        with self._lock:
            key = params.digest
            return isinstance(self._tokenizer, RequestError) or key in self._refused or self._kept(key) is not None

    def compile(
        self, params: StructuredOutputsParams, where: str = "structured_outputs", stop: Event | None = None
    ) -> GuidanceGrammar:
        """The grammar for `Request.grammar`. Raises `RequestError` below the field `where` if it cannot be compiled.

        Compilation ends soon after `stop` is set, with `d2sd.runtime.grammar.trial.Abandoned`.
        """
        where, key = f"{where}.{params.kind}", params.digest
        with self._lock:
            if kept := self._kept(key):
                return kept
            if key in self._refused:
                self._refused.move_to_end(key)
                raise _moved(self._refused[key], where)
            tokenizer = self._made_tokenizer()
        try:
            made = _compile(tokenizer, params, where, stop)
        except RequestError as error:
            with self._lock:
                _keep(self._refused, key, _moved(error, None), _REFUSED)  # without the frames of a traceback
            raise
        with self._lock:
            _keep(self._grammars, key, made, _KEPT)
        return made

    def _kept(self, key: bytes) -> GuidanceGrammar | None:
        """The compiled grammar, unless answers have shown that it is worn or too slow."""
        kept = self._grammars.get(key)
        if kept is None or kept.worn or kept.problem:
            if kept is not None and kept.problem:
                _keep(self._refused, key, RequestError("The grammar is refused.", found=kept.problem), _REFUSED)
            self._grammars.pop(key, None)
            return None
        self._grammars.move_to_end(key)
        return kept

    def _made_tokenizer(self) -> GuidanceTokenizer:
        if self._tokenizer is None:
            try:
                self._tokenizer = self._make_tokenizer()
            except RequestError as error:  # trying takes half a second
                self._tokenizer = _moved(error, error.where)
        if isinstance(self._tokenizer, RequestError):
            raise _moved(self._tokenizer, self._tokenizer.where)
        return self._tokenizer

    def _make_tokenizer(self) -> GuidanceTokenizer:
        bundle = self._bundle
        if not bundle.stop_token_ids:
            raise RequestError(
                "Structured output needs a token that ends the answer.", where=bundle.path / "target",
                found="no eos_token_id in generation_config.json or config.json",
            )  # fmt: skip
        ends = frozenset(bundle.stop_token_ids)
        return GuidanceTokenizer(bundle.tokenizer, ends, bundle.target.config.vocab_size)


def _compile(
    tokenizer: GuidanceTokenizer, params: StructuredOutputsParams, where: str, stop: Event | None
) -> GuidanceGrammar:
    if params.regex is not None:
        return tokenizer.regex(params.regex, where, stop)
    if params.choice is not None:
        return tokenizer.lark("start: " + " | ".join(map(_dump, params.choice)), where, stop)
    if params.grammar is not None:
        return tokenizer.lark(params.grammar, where, stop)
    assert not isinstance(params.json, Mapping)
    return tokenizer.json_schema(params.json or '{"type": "object"}', where, stop)


def _keep(kept: OrderedDict[bytes, T], key: bytes, value: T, most: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)


def _moved(error: RequestError, where: str | Path | None) -> RequestError:
    """The same error at a field of another request."""
    return RequestError(error.what, where=where, found=error.found, expected=error.expected, fix=error.fix)


def _dump(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError("This is not JSON.", where="structured_outputs.json", found=error) from None
