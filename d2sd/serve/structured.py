"""Structured output: grammars compiled for the tokenizer of a bundle. No torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from threading import Event, Lock
from typing import TYPE_CHECKING, TypeVar

from d2sd.errors import RequestError
from d2sd.runtime.grammar.forms import StructuredOutputsParams
from d2sd.runtime.grammar.guidance import GuidanceGrammar, GuidanceTokenizer, literal

if TYPE_CHECKING:
    from d2sd.bundle.load import Bundle

T = TypeVar("T")

#: Compiled grammars that are kept; one takes from kilobytes to a few megabytes.
_KEPT = 64
#: Refused grammars that are remembered: trying one again costs up to seconds.
_REFUSED = 1024


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
            if grammar := self._kept(key):
                return grammar
            if key in self._refused:
                self._refused.move_to_end(key)
                raise self._refused[key].at(where)
            tokenizer = self._made_tokenizer()
        try:
            grammar = _compile(tokenizer, params, where, stop)
        except RequestError as error:
            with self._lock:
                _keep(self._refused, key, error.at(None), _REFUSED)  # without the frames of a traceback
            raise
        with self._lock:
            _keep(self._grammars, key, grammar, _KEPT)
        return grammar

    def _kept(self, key: bytes) -> GuidanceGrammar | None:
        """The compiled grammar, unless answers have shown that it is worn or too slow."""
        grammar = self._grammars.get(key)
        if grammar is None or grammar.worn or grammar.problem:
            if grammar is not None and grammar.problem:
                _keep(self._refused, key, RequestError("The grammar is refused.", found=grammar.problem), _REFUSED)
            self._grammars.pop(key, None)
            return None
        self._grammars.move_to_end(key)
        return grammar

    def _made_tokenizer(self) -> GuidanceTokenizer:
        if self._tokenizer is None:
            try:
                self._tokenizer = self._make_tokenizer()
            except RequestError as error:  # trying takes half a second
                self._tokenizer = error.at(error.where)
        if isinstance(self._tokenizer, RequestError):
            raise self._tokenizer.at(self._tokenizer.where)
        return self._tokenizer

    def _make_tokenizer(self) -> GuidanceTokenizer:
        bundle = self._bundle
        if not bundle.stop_token_ids:
            raise RequestError(
                "Structured output needs a token that ends the answer.",
                where=bundle.path / "target",
                found="no eos_token_id in generation_config.json or config.json",
            )
        ends = frozenset(bundle.stop_token_ids)
        return GuidanceTokenizer(bundle.tokenizer, ends, bundle.target.config.vocab_size)


def _compile(
    tokenizer: GuidanceTokenizer, params: StructuredOutputsParams, where: str, stop: Event | None
) -> GuidanceGrammar:
    if params.regex is not None:
        return tokenizer.regex(params.regex, where, stop)
    if params.choice is not None:
        texts = (literal(text, tokenizer.words) for text in params.choice)
        return tokenizer.lark("start: " + " | ".join(texts), where, stop)
    if params.grammar is not None:
        return tokenizer.lark(params.grammar, where, stop)
    assert not isinstance(params.json, Mapping)
    return tokenizer.json_schema(params.json or '{"type": "object"}', where, stop)


def _keep(cache: OrderedDict[bytes, T], key: bytes, value: T, most: int) -> None:
    cache[key] = value
    cache.move_to_end(key)
    if len(cache) > most:
        cache.popitem(last=False)
