"""Grammars compiled by llguidance: what they allow, what is refused, and how long a hostile one may take."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from d2sd.errors import D2SDError, RequestError
from d2sd.runtime.grammar import guidance as module
from d2sd.runtime.grammar import trial
from d2sd.runtime.grammar.grammar import Grammar, Matcher, PathWalker, advance, forced, has
from d2sd.runtime.grammar.guidance import MAX_ITEMS, MAX_LENGTH, GuidanceTokenizer, added_words, literal
from tests.runtime.grammar.tokens import (
    END,
    SPECIAL,
    WORDS,
    guidance,
    ids,
    text_of,
    tokenizer,
    vocab_size,
    worded_tokenizer,
)


def fits(grammar: Grammar, text: str, complete: bool = True) -> bool:
    """Whether the grammar takes a text, token by token, and an end token after it."""
    matcher = grammar.matcher()
    taken = all(matcher.consume(token) for token in ids(text))
    return taken and has(matcher.allowed(), END) == complete


def test_json_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    grammar = guidance().json_schema(json.dumps(schema), "json")
    assert fits(grammar, '{"a": 31}')
    assert fits(grammar, '{"a":31,"b": [1, 2]}')
    assert not fits(grammar, '{"a": "x"}')
    assert not fits(grammar, '{"a":  31}')  # weak models would write nothing but spaces
    assert not fits(grammar, '{"b": 1}')
    assert fits(
        guidance().json_schema(json.dumps(schema | {"x-guidance": {"whitespace_flexible": True}}), "json"),
        '{\n  "a":  31\n}',
    )


def only_token(matcher: Any) -> int:
    """The one token that a grammar allows."""
    (token,) = (token for token in range(vocab_size()) if has(matcher.allowed(), token))
    return token


def written(grammar: Grammar) -> list[int]:
    """The tokens of a text that a grammar leaves no choice about."""
    matcher, found = grammar.matcher(), list[int]()
    while (token := only_token(matcher)) != END:
        assert matcher.consume(token)
        found.append(token)
    return found


def test_added_words_are_tokens_in_our_texts_and_spelled_in_those_of_others() -> None:
    tokens = worded_tokenizer()
    made, words = GuidanceTokenizer(tokens, frozenset({END}), vocab_size()), added_words(tokens)
    assert set(words) == set(WORDS)
    text = "a<think>b</think></tool_call>"
    assert written(made.lark(f"start: {literal(text, words)}", "x")) == tokens(text).input_ids
    assert literal(text, {}) == json.dumps(text)
    assert literal("", words) == '""'
    for spelled in (made.lark(f"start: {json.dumps(text)}", "x"), made.regex(text, "x")):
        found = written(spelled)
        assert tokens.decode(found) == text
        assert not set(found) & set(words.values())
    assert tokens.decode(written(made.json_schema(json.dumps({"const": text}), "x"))) == json.dumps(text)


def test_regex_and_lark() -> None:
    assert fits(guidance().regex("[a-c]{2,3}", "regex"), "abc")
    assert not fits(guidance().regex("[a-c]{2,3}", "regex"), "abcd")
    assert fits(guidance().lark('start: "yes" | "no" WORD\nWORD: /[a-z]+/', "grammar"), "nonever")


def test_only_tokens_of_text_and_the_end_are_allowed() -> None:
    """Neither special tokens nor ids that the model has and the tokenizer does not."""
    matcher = guidance().regex(r"(.|\n)*", "regex").matcher()
    bits = matcher.allowed()
    assert has(bits, END)
    assert not has(bits, SPECIAL)
    assert not any(has(bits, token) for token in range(len(tokenizer()), vocab_size() + 64))
    assert sum(has(bits, token) for token in range(vocab_size())) > 100
    for token in (SPECIAL, END, -1, vocab_size() - 1, vocab_size(), 10**9):
        assert not matcher.consume(token)
    assert not matcher.error


def test_the_end_comes_last() -> None:
    matcher = guidance().regex("ab?", "regex").matcher()
    assert "grammar" in advance(matcher, END)
    assert advance(matcher, ids("a")[0]) == ""
    assert advance(matcher, END) == ""
    assert advance(matcher, ids("b")[0]) == ""
    assert advance(matcher, ids("b")[0])
    assert forced(matcher.allowed()) == END


def test_a_walker_returns_to_where_it_began() -> None:
    matcher = guidance().regex("(a|b)+c", "regex").matcher()
    a, b, c = (ids(letter)[0] for letter in "abc")
    matcher.consume(a)
    before, walker = matcher.allowed(), PathWalker(matcher)
    assert forced(walker.allowed((b, a, c))) == END
    assert has(walker.allowed((b, b)), c)
    assert walker.allowed((b, c, c)) == b""
    assert walker.allowed((b, c, END)) == b""
    assert walker.allowed((b, a)) == walker.allowed((b, b)) == walker.allowed(())
    walker.reset()
    assert matcher.allowed() == before
    assert matcher.consume(c)


REFUSED = {
    "regex": (
        "(",
        "[",
        "(?=a)b",
        r"a\1",
        "a" * (MAX_LENGTH + 1),
        "\ud800",
        "(a{1000}){1000}",
        "a{1000000}",
        "b{40}(a{1000}){1000}",
        "[^\\s\\S]",
    ),
    "lark": ("", "start: nope", "start: /(/", "rule: 'a'"),
    "json_schema": (
        "",
        "[1]",
        "null",
        "{",
        '{"type": "nope"}',
        '{"$ref": "http://x/y"}',
        "false",
        '{"oneOf": [{}, {}]}',
        '{"a": "\ud800"}',
        "[" * 30_000,
        '{"type": "string", "format": "nope"}',
        '{"$ref": "#/$defs/a"}',
        json.dumps({"anyOf": [{"items": {"maxItems": MAX_ITEMS + 1}}]}),
        '{"minItems": 1e9}',
        '{"minItems": 1e400}',
        json.dumps({"maxItems": 10**400}),
        json.dumps({"minItems": 10**4000}),
        '{"minItems": ' + "9" * 9000 + "}",
        '{"$ref": "#"}',
        '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}',
    ),
}


@pytest.mark.parametrize(("kind", "text"), [(k, t) for k, texts in REFUSED.items() for t in texts], ids=lambda t: t[:9])
def test_what_cannot_be_compiled_is_refused(kind: str, text: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RequestError) as caught:
        getattr(guidance(), kind)(text, "structured_outputs.json")
    assert caught.value.where == "structured_outputs.json"
    assert len(str(caught.value)) < 900
    assert capfd.readouterr() == ("", "")


def nested(depth: int) -> Any:
    return {"type": "object", "properties": {"a": nested(depth - 1)}} if depth else {"type": "integer"}


HOSTILE = {
    "deep": json.dumps(nested(50)),
    "deeper": json.dumps(nested(400)),
    "enum": json.dumps({"enum": [f"v{i}" for i in range(5000)]}),
    "properties": json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(500)}}),
    "array": json.dumps({"type": "array", "items": {"type": "array", "minItems": 9999, "maxItems": 9999}}),
    "string": json.dumps({"type": "string", "minLength": 10**5, "maxLength": 10**7}),
    "all": json.dumps({"allOf": [{"properties": {"p": {"type": "string", "pattern": f".*{i}.*"}}} for i in range(30)]}),
    "power": json.dumps({"type": "string", "pattern": "^(.*a){20}.{200}$"}),
    "states": json.dumps({"type": "string", "pattern": "^(a|b)*a(a|b){1000}$"}),
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_schemas_end_soon(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "SECONDS", 1.0)
    start = time.perf_counter()
    try:
        walker = PathWalker(guidance().json_schema(text, "json").matcher())
        for letters in ('{"', '{"a', '"ab', '"abaaab', "[[1,"):
            walker.allowed(ids(letters))
    except RequestError:
        pass
    assert time.perf_counter() - start < 10


MANY_STATES = "[ab]{0,4000}c|(a|b)*a(a|b){12}"


def write(matcher: Matcher, length: int, seed: int) -> int:
    """Consume letters a and b at random, as far as the matcher goes; their number."""
    dice, letters = random.Random(seed), [ids(letter)[0] for letter in "ab"]
    return next(
        (n for n in range(length) if not matcher.allowed() or not matcher.consume(dice.choice(letters))), length
    )


def test_answers_that_share_a_grammar_do_not_exhaust_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matchers share the lexer's states up to a limit; one that reaches it goes on with a lexer of its own."""
    monkeypatch.setitem(module._LIMITS, "max_lexer_states", 500)
    grammar = guidance().regex(MANY_STATES, "regex")
    before = grammar._first
    for answer in range(8):
        matcher = grammar.matcher()
        assert write(matcher, 60, answer) == 60
        assert matcher.error == ""
    assert grammar._first is not before


def test_a_matcher_that_cannot_go_on_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module._LIMITS, "max_lexer_states", 300)
    matcher = guidance().regex(MANY_STATES, "regex").matcher()
    assert write(matcher, 1000, 5) < 1000
    assert "states" in matcher.error
    assert matcher.allowed() == b""
    assert "states" in advance(matcher, ids("a")[0])


def test_an_answer_whose_masks_take_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other answer of its grammar begins; one whose masks are fast goes on as long as it likes."""
    clock = iter(float(n) for n in range(10**6))
    grammar = guidance().regex("[ab]*", "regex")
    matcher = grammar.matcher()
    monkeypatch.setattr(module, "thread_time", lambda: next(clock) * 0.015)  # of a mask or a token
    assert write(matcher, 400, 1) == 400
    monkeypatch.setattr(module, "thread_time", lambda: next(clock) * 0.3)
    assert grammar.problem == ""
    assert write(matcher, 400, 2) < 30
    assert "too long" in matcher.error
    assert "too long" in advance(matcher, ids("a")[0])
    assert "too long" in grammar.problem


def test_a_worn_grammar_that_takes_long_to_compile_is_not_compiled_by_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(module._LIMITS, "max_lexer_states", 300)
    monkeypatch.setattr(module, "_RENEWED", 0.0)
    grammar = guidance().regex(MANY_STATES, "regex")
    matcher = grammar.matcher()
    assert write(matcher, 1000, 5) < 1000
    assert "states" in matcher.error
    assert grammar.worn


def test_a_byte_level_tokenizer_whose_decoder_begins_with_byte_fallback() -> None:
    """transformers converts such ones from GGUF: llguidance alone would take a space for the letter Ġ."""
    definition = json.loads(tokenizer().backend_tokenizer.to_str())
    fallback = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    definition["decoder"] = {
        "type": "Sequence",
        "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}, fallback, definition["decoder"]],
    }
    mixed = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(definition)), eos_token="<end>")
    assert mixed.decode(list(ids("a b"))) == "a b"
    grammar = GuidanceTokenizer(mixed, frozenset({END}), vocab_size()).regex("a b é", "regex")
    assert fits(grammar, "a b é")


def test_a_tokenizer_that_llguidance_cannot_read() -> None:
    from tokenizers import models

    words = Tokenizer(models.WordLevel({"w0": 0, "w1": 1}, unk_token="w0"))
    slow = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1")
    with pytest.raises(D2SDError, match="tokenizer"):
        GuidanceTokenizer(slow, frozenset({1}), 2)


def test_several_end_tokens() -> None:
    both = GuidanceTokenizer(tokenizer(), frozenset({END, SPECIAL}), vocab_size()).regex("a", "regex").matcher()
    both.consume(ids("a")[0])
    assert has(both.allowed(), END)
    assert has(both.allowed(), SPECIAL)
    assert text_of([END]) == ""
