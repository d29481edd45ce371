"""LiteLLM: chat, stream, a tool loop, responses, and the error that makes it fall back to a longer context."""

from __future__ import annotations

import sys
from typing import Any

import litellm

ANSWERS = ("It is 21 degrees.", "It is cold.")
CITY: Any = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": CITY | {"additionalProperties": False}}}
LONG: Any = [{"role": "user", "content": "Weather? " * 4000}]


def main(url: str) -> None:
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    for provider in ("openai", "hosted_vllm"):
        options: Any = {"model": f"{provider}/tiny", "api_base": url, "api_key": "key", "temperature": 1.0}
        assert litellm.completion(messages=messages, **options).choices[0].message.content in ANSWERS
        chunks = litellm.completion(messages=messages, stream=True, **options)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) in ANSWERS
        answer = litellm.completion(messages=messages, tools=[TOOL], **options).choices[0].message
        result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "21"}
        again = litellm.completion(messages=[*messages, answer, result], tools=[TOOL], **options)
        assert again.choices[0].message.content in ANSWERS
        for long in (
            {"messages": LONG},
            {"messages": messages, "max_tokens": 5000},
            {"messages": LONG, "stream": True},
        ):
            try:
                litellm.completion(**options, **long)
            except litellm.ContextWindowExceededError:
                continue
            raise AssertionError(long)
    found = litellm.responses(model="openai/tiny", input="Hello", api_base=url, api_key="key")
    assert found.output[0].content[0].text in ANSWERS


main(sys.argv[1])
