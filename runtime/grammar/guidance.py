"""Grammars by llguidance: JSON schemas, regular expressions and Lark grammars over the tokens of one tokenizer."""

# llguidance may be missing where a user's type checker follows these sources.
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from threading import Event
from time import thread_time
from typing import Any

from d2sd.errors import D2SDError, RequestError, shortened
from d2sd.extras import require
from d2sd.panics import panics_as
from d2sd.runtime.grammar.forms import to_json
from d2sd.runtime.grammar.trial import Trial

#: Limits of llguidance, most half of its defaults or less: they bound compilation to about a second, and a step's mask
#: to some milliseconds, whatever the grammar.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
}
#: How answers to a JSON schema are spaced, unless its "x-guidance" says otherwise: no space or one after a colon or a
#: comma, none elsewhere. With free whitespace weak models fill their answers with line breaks.
SPACING: Any = {"whitespace_flexible": False, "key_separator": ": ?", "item_separator": ", ?"}
#: Longest text of a grammar, in characters.
MAX_LENGTH = 1 << 16
#: Most items that an array of a JSON schema may ask for.
MAX_ITEMS = 10_000
#: Processor time that an answer's masks may take, in seconds: at once, and for each token more. It is the engine's
#: thread that pays, so every other answer waits.
_FREE, _EACH = 1.0, 0.05
_TOO_SLOW = "computing the tokens that it allows takes too long"
#: Longest compilation that the engine's thread repeats, in seconds of processor time.
_RENEWED = 0.1
#: Text that a byte-level and a SentencePiece vocabulary store in different ways.
_PROBE = 'a  "b":\n é1'


class GuidanceGrammar:
    """A compiled grammar. Its matchers share the lexer states that they have found, up to a limit.

    A grammar is `worn` when they have reached it and compiling again would keep the engine waiting: make it anew.
    `problem` says why no answer should begin any more; it is found while answers are generated.
    """

    def __init__(self, compile_matcher: Callable[[], Any], end_tokens: frozenset[int], vocab_size: int) -> None:
        self._compile, self._end_tokens, self._vocab_size = compile_matcher, end_tokens, vocab_size
        self.worn, self.problem = False, ""
        begun = thread_time()
        self._first = compile_matcher()
        self._seconds = thread_time() - begun

    def matcher(self) -> GuidanceMatcher:
        return GuidanceMatcher(self, self._first.deep_copy(), self._end_tokens, self._vocab_size)

    def renew(self) -> Any:
        """Compile again, without the states that other answers have found; None if that takes too long."""
        if self._seconds > _RENEWED:
            self.worn = True
            return None
        self._first = self._compile()
        return self._first.deep_copy()


class GuidanceMatcher:
    """The state of one answer (see `d2sd.runtime.grammar.grammar.Matcher`)."""

    def __init__(self, grammar: GuidanceGrammar, matcher: Any, end_tokens: frozenset[int], vocab_size: int) -> None:
        self._grammar, self._matcher, self.end_tokens, self._vocab_size = grammar, matcher, end_tokens, vocab_size
        self._tokens: list[int] = []
        self._left = _FREE  # seconds that the answer may still take
        self._farthest = 0  # most tokens so far, those of drafts included

    @property
    def error(self) -> str:
        if self._left < 0:
            return _TOO_SLOW
        return _short(self._matcher.get_error()) if self._matcher.is_error() else ""

    def allowed(self) -> bytes:
        if self._left < 0:
            return b""
        begun = thread_time()
        bits = self._bits()
        if bits is None and self._restart():
            bits = self._bits()
        self._pay(begun)
        return bits or b""

    def consume(self, token: int) -> bool:
        if not 0 <= token < self._vocab_size or token in self.end_tokens or self._left < 0:
            return False  # llguidance does not recover from a token outside the vocabulary
        begun = thread_time()
        consumed = self._matcher.try_consume_tokens([token])
        if self._matcher.is_error() and self._restart():
            consumed = self._matcher.try_consume_tokens([token])
        self._pay(begun)
        if consumed == 1:
            self._tokens.append(token)
            if len(self._tokens) > self._farthest:
                self._farthest, self._left = len(self._tokens), self._left + _EACH
        return bool(consumed == 1)

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)
        del self._tokens[len(self._tokens) - count :]

    def _pay(self, begun: float) -> None:
        self._left -= thread_time() - begun
        if self._left < 0:
            self._grammar.problem = _TOO_SLOW  # its next answer would keep the engine waiting again

    def _bits(self) -> bytes | None:
        bits: bytes | None = None if self._matcher.is_error() else self._matcher.compute_bitmask()
        return None if self._matcher.is_error() else bits

    def _restart(self) -> bool:
        """After an error, which may be a limit that answers have reached together: go on without the others' states."""
        matcher = self._grammar.renew()
        if matcher is None or not matcher.consume_tokens(self._tokens):
            return False
        self._matcher = matcher
        return True


class GuidanceTokenizer:
    """Compiles grammars for one tokenizer. Expensive to make (about a second); make it once."""

    def __init__(self, tokenizer: Any, end_tokens: frozenset[int], vocab_size: int) -> None:
        """`tokenizer` is a fast transformers tokenizer, `vocab_size` the target's, whose extra ids are never allowed.

        `end_tokens` may end an answer. Raises D2SDError if llguidance is not installed or cannot read the tokenizer.
        """
        require("structured", ("llguidance",), "Structured output")
        from llguidance import LLTokenizer

        self._end_tokens, self.words = end_tokens, added_words(tokenizer)
        self._vocab_size = max(vocab_size, len(tokenizer))
        try:
            with panics_as(D2SDError, "llguidance fails on the target's tokenizer.", where="structured_outputs"):
                definition = _definition(tokenizer)
                grammar_tokenizer = LLTokenizer(definition, n_vocab=self._vocab_size, eos_token=sorted(end_tokens))
            ids = tokenizer(_PROBE, add_special_tokens=False).input_ids
            readable = grammar_tokenizer.decode_bytes(ids) == _PROBE.encode()
        except (ValueError, AttributeError):
            readable = False
        if not readable:
            raise RequestError(
                "Structured output cannot read the target's tokenizer.",
                where="structured_outputs",
                found=type(tokenizer).__name__,
                expected="a fast tokenizer whose tokens are bytes or SentencePiece",
            )
        self._tokenizer = grammar_tokenizer
        about = {"definition": definition, "vocab_size": self._vocab_size, "end_tokens": sorted(end_tokens)}
        self._trial = Trial(about)

    def json_schema(self, schema: str, where: str, stop: Event | None = None) -> GuidanceGrammar:
        """The grammar of a JSON schema, itself JSON text. `where` names the field in the RequestError of a bad one.

        Compilation ends soon after `stop` is set, with `trial.Abandoned`; so do the other kinds.
        """
        from llguidance import LLMatcher

        _check_length(schema, where)
        try:
            _check_counts(json.loads(schema), where)
            return self._compile(LLMatcher.grammar_from_json_schema(schema, defaults=SPACING), where, stop)
        except (ValueError, RecursionError) as error:
            raise _refused(str(error), where) from None

    def regex(self, pattern: str, where: str, stop: Event | None = None) -> GuidanceGrammar:
        """The grammar of a regular expression in Rust's syntax, which the whole answer matches."""
        from llguidance import LLMatcher

        _check_length(pattern, where)
        return self._compile(LLMatcher.grammar_from_regex(pattern), where, stop)

    def lark(self, text: str, where: str, stop: Event | None = None) -> GuidanceGrammar:
        """The grammar of a text in llguidance's dialect of Lark."""
        from llguidance import LLMatcher

        _check_length(text, where)
        return self._compile(LLMatcher.grammar_from_lark(text), where, stop)

    def _compile(self, grammar: str, where: str, stop: Event | None) -> GuidanceGrammar:
        from llguidance import LLMatcher, LLParserLimits

        def compiled() -> Any:
            limits = LLParserLimits(verbose_errors=False, **_LIMITS)
            return LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)  # 0: nothing goes to stderr

        if problem := self._trial.problem(grammar, _LIMITS, stop):
            raise _refused(problem, where)
        return GuidanceGrammar(compiled, self._end_tokens, self._vocab_size)


def added_words(tokenizer: Any) -> dict[str, int]:
    """Tokens that were added to a vocabulary and are text, as Qwen's `<tool_call>` is: id by text."""
    return {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if not token.special}


def literal(text: str, words: Mapping[str, int]) -> str:
    """A text in llguidance's Lark. An added word in it is that token, which is how a model that has it writes it."""
    among = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    parts = [part for part in re.split(f"({among})", text) if part] if among else [text]
    return " ".join(f"<[{words[part]}]>" if part in words else to_json(part) for part in parts) or '""'


def _definition(tokenizer: Any) -> str:
    """The tokenizer as JSON. llguidance takes the first decoder it knows; of a byte-level vocabulary that is ByteLevel.

    Tokenizers converted from GGUF have ByteFallback in front of it, which byte-level vocabularies do not use. Without
    `added_words`: llguidance 1.7 takes all added tokens for special ones, and where a grammar's text has one, allows
    that alone and then refuses it.
    """
    backend = tokenizer.backend_tokenizer
    backend = type(backend).from_str(backend.to_str())
    backend.no_padding()
    backend.no_truncation()
    definition = json.loads(backend.to_str())
    definition["added_tokens"] = [token for token in definition["added_tokens"] if token["special"]]
    decoder = definition.get("decoder") or {}
    for stage in decoder.get("decoders", ()):
        if stage["type"] == "ByteLevel":
            definition["decoder"] = stage
    return json.dumps(definition)


def _check_length(text: str, where: str) -> None:
    if len(text) > MAX_LENGTH:
        raise RequestError(
            "The grammar is too long.",
            where=where,
            found=f"{len(text):,} characters",
            expected=f"at most {MAX_LENGTH:,}",
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError("The grammar is not Unicode text.", where=where, fix="pass UTF-8") from None


def _check_counts(schema: Any, where: str) -> None:
    """llguidance unrolls arrays before it applies its limits: refuse counts that take seconds."""
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            for key in ("minItems", "maxItems"):
                count = value.get(key)
                if isinstance(count, (int, float)) and count > MAX_ITEMS:
                    raise RequestError(
                        "An array of the schema is too long.",
                        where=where,
                        found=f"{key} of {shortened(count)}",
                        expected=f"at most {MAX_ITEMS:,}",
                    )
        if isinstance(value, (dict, list)):
            pending += value.values() if isinstance(value, dict) else value


def _refused(message: str, where: str) -> D2SDError:
    return RequestError("The grammar cannot be compiled.", where=where, found=shortened(_short(message)))


def _short(message: str) -> str:
    """The first line of llguidance's message; the rest quotes the grammar and the parser's state."""
    return next((line for line in message.splitlines() if line.strip()), "unknown")
