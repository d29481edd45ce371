"""Prompts that cost before they are refused, other routes, and clients that leave."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

from tools.hostile import grammars, sampling
from tools.hostile.case import CHAT, COMPLETIONS, Case, Kind, Scene, letters, size

#: Bytes of the largest text: as JSON it is below the 4 MiB of a body.
_MOST = 3_900_000


def _text(draw: random.Random, length: int) -> str:
    """A text of about `length` bytes in UTF-8 that is hard to tokenize in one of many ways."""
    unit = draw.choice(
        (
            "a",
            " ",
            "\n",
            "ab",
            "é",
            "好",
            "🙂",
            "1",
            "-",
            "a ",
            "\t ",
            "'s",
            "\u200d",
            "\u0301",
            "<|im_end|>",
            "\x00",
            letters(draw, 4000),
            letters(draw, 4000, "abcdefghijklmnopqrstuvwxyz"),
            letters(draw, 3000, "0123456789.,;"),
        )
    )
    return unit * (length // len(json.dumps(unit, ensure_ascii=False).encode()))


def _long(draw: random.Random, scene: Scene) -> Case:
    """A prompt that is far too long, as text."""
    text = _text(draw, draw.choice((size(draw, 100_000, _MOST), _MOST)))
    made = scene.completion(draw, prompt=draw.choice((text, [text], [text[: len(text) // 9]] * 9)))
    return Case(json.dumps(made, ensure_ascii=False).encode())


def _turns(draw: random.Random, scene: Scene) -> Case:
    """Many turns, or turns of many parts."""
    count = size(draw, 2000, 80_000)
    if draw.random() < 0.5:
        messages: list[Any] = [{"role": ("user", "assistant")[n % 2], "content": "a"} for n in range(count - count % 2)]
        messages.append({"role": "user", "content": "b"})
    else:
        messages = [{"role": "user", "content": [{"type": "text", "text": "a"}] * count}]
    return Case.of(scene.chat(draw, messages=messages), CHAT)


def _long_chat(draw: random.Random, scene: Scene) -> Case:
    """A conversation that is far too long."""
    turn = {"role": draw.choice(("user", "system")), "content": _text(draw, size(draw, 100_000, _MOST))}
    made = scene.chat(draw, messages=[turn] if turn["role"] == "user" else [turn, {"role": "user", "content": "a"}])
    return Case(json.dumps(made, ensure_ascii=False).encode(), draw.choice((CHAT, CHAT, "/trace")))


def _token_ids(draw: random.Random, scene: Scene) -> Case:
    """Prompts of token ids: too long, too many, outside the vocabulary."""
    count = size(draw, 3000, 500_000)
    token = draw.randrange(scene.vocab)
    prompt: Any = draw.choice(
        (
            [token] * count,
            [[token]] * count,
            [[token] * (count // 100)] * 100,
            [token, 2**70],
            [scene.vocab],
            [[]] * count,
        )
    )
    return Case.of(scene.completion(draw, prompt=prompt, n=draw.choice((1, 2, 128))))


def _invalid(draw: random.Random, scene: Scene) -> Case:
    """Lists and mappings of which every item is wrong: an error for each, in each form that a field may have."""
    length = draw.choice((size(draw, 20_000, _MOST), _MOST))
    item = draw.choice(
        ("-1", "1", "0.5", "{}", "[]", "null", '""', "[-1]", '{"a":1}', '{"role":"x"}', '{"type":"text"}')
    )
    items = ",".join([item] * (length // (len(item) + 1)))
    keys = ",".join(f'"{draw.choice("kx")}{n}":{item}' for n in range(length // (len(item) + 12)))
    values = {
        COMPLETIONS: ("prompt", "prompt", "stop", "bad_words", "stop_token_ids", "structured_outputs", "n"),
        CHAT: ("messages", "tools", "stop", "metadata", "response_format", "logit_bias", "tool_choice"),
        "/detokenize": ("tokens",),
        "/tokenize": ("messages", "prompt"),
    }
    path = draw.choice((COMPLETIONS, CHAT, "/detokenize", "/tokenize"))
    name = draw.choice(values[path])
    valid = {COMPLETIONS: '"prompt":"a"', CHAT: '"messages":[{"role":"user","content":"a"}]'}.get(path, '"model":null')
    body = draw.choice(
        (
            f'{{{valid},"{name}":[{items}]}}',
            f'{{{valid},"{name}":{{{keys}}}}}',
            f"{{{valid},{keys}}}",
            f'{{{valid},"messages":[{{"role":"user","content":[{items}]}}]}}',
            f'{{{valid},"messages":[{{"role":"user","content":"a",{keys}}}]}}',
        )
    )
    return Case(body.encode(), path)


def _tokenize(draw: random.Random, scene: Scene) -> Case:
    """The tokenizer by itself."""
    length = size(draw, 100_000, _MOST)
    if draw.random() < 0.3:
        return Case.of({"tokens": [draw.randrange(scene.vocab)] * (length // 7)}, "/detokenize")
    text = _text(draw, length)
    body: Any = {"prompt": text} if draw.random() < 0.5 else {"messages": [{"role": "user", "content": text}]}
    return Case(json.dumps(body, ensure_ascii=False).encode(), "/tokenize")


def _template(draw: random.Random, scene: Scene) -> Case:
    """Arguments and messages for the chat template."""
    values: tuple[Any, ...] = (
        {"enable_thinking": draw.random() < 0.5},
        {"messages": [{"role": "user", "content": "w5"}]},
        {"tools": "x" * 10**5},
        {"add_generation_prompt": [[]]},
        {"tokenize": True},
        {"chat_template": "{{ 9**(9**9) }}"},
        {"self": 1},
        {f"k{n}": n for n in range(size(draw, 10, 50_000))},
        {"loop": None, "range": 10**400},
        {"__class__": {}},
        {letters(draw, size(draw, 10, 10**6)): 1},
        {"strftime_now": "%" * 10**5},
        {"raise_exception": 1},
    )
    fields: dict[str, Any] = {"chat_template_kwargs": draw.choice(values)}
    if draw.random() < 0.2:
        fields = {"chat_template": "{% set x=[0]*10**9 %}"}
    if draw.random() < 0.3:
        call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "[" * size(draw, 10, 10**5)}}
        turns = [{"role": "assistant", "content": None, "tool_calls": [call] * draw.randint(1, 50)}]
        fields = {
            "messages": [
                {"role": "user", "content": "a"},
                *turns,
                {"role": "tool", "content": "1", "tool_call_id": "x"},
            ]
        }
    return Case.of(scene.chat(draw, **fields), CHAT)


def _responses(draw: random.Random, scene: Scene) -> Case:
    """OpenAI's responses API with the same poisons."""
    text = _text(draw, size(draw, 10, _MOST))
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}
    poison: dict[str, Any] = draw.choice(
        (
            {"input": text},
            {"input": [item] * size(draw, 2, 30_000)},
            {"previous_response_id": text[:300]},
            {"instructions": text},
            {"input": [{"type": "function_call_output", "call_id": "x", "output": text}]},
            {"tools": [{"type": "function", "name": f"f{n}", "parameters": {}} for n in range(size(draw, 1, 3000))]},
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": grammars.schema(draw)}}},
            {"max_output_tokens": 10**30},
            {"input": [{"type": "reasoning", "summary": []}]},
            {"reasoning": {"effort": text}},
            {"metadata": {f"k{n}": "v" for n in range(size(draw, 1, 10_000))}},
            {"input": {"a": [item]}},
            {},
        )
    )
    base = {"input": "w5 a", "max_output_tokens": scene.answer, "temperature": 0, "stream": draw.random() < 0.3}
    return Case(json.dumps(base | poison, ensure_ascii=False).encode(), "/v1/responses")


def _harmless(draw: random.Random, scene: Scene) -> Case:
    """No poison at all: what the neighbours of an ordinary client see."""
    body = scene.completion(draw)
    return Case.of(body) if draw.random() < 0.5 else Case.of(scene.chat(draw), CHAT)


#: Classes whose clients may leave, answered or not.
_LEFT = (*sampling.KINDS, *grammars.KINDS)


def _leaves(draw: random.Random, scene: Scene) -> Case:
    """Send an expensive body and leave at once or soon."""
    kinds = [kind for kind in _LEFT if not kind.fills]
    made = draw.choice(kinds).make(draw, scene) if draw.random() < 0.7 else _long(draw, scene)
    return replace(made, leaves=draw.choice((0.0, 0.0, 0.02, 0.3)))


def _leaves_streams(draw: random.Random, scene: Scene) -> Case:
    """Begin a long stream and leave in the middle of it."""
    body = scene.completion(draw, stream=True, max_tokens=scene.context // 2, ignore_eos=True)
    return Case.of(body, COMPLETIONS, leaves=draw.uniform(0, 1))


KINDS = (
    Kind("harmless", _harmless),
    Kind("prompt: long text", _long, at_once=8),
    Kind("prompt: long chat", _long_chat, at_once=8),
    Kind("prompt: turns and parts", _turns),
    Kind("prompt: token ids", _token_ids),
    Kind("invalid items", _invalid),
    Kind("tokenize", _tokenize),
    Kind("chat template", _template),
    Kind("responses", _responses),
    Kind("leaves", _leaves, at_once=8),
    Kind("leaves a stream", _leaves_streams),
)
