"""The OpenAI SDK of the environment: chat, tool loop, streams, parsing and responses."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
from pydantic import BaseModel

ANSWERS = ("It is 21 degrees.", "It is cold.")
CITY: Any = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": CITY | {"additionalProperties": False}}}


class City(BaseModel):
    capital: bool


def main(url: str) -> None:
    client: Any = openai.OpenAI(base_url=url, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    chat: Any = {"model": "tiny", "temperature": 1.0, "tools": [TOOL]}
    answer = client.chat.completions.create(messages=messages, **chat).choices[0].message
    (call,) = answer.tool_calls
    messages += [answer, {"role": "tool", "tool_call_id": call.id, "content": "21"}]
    assert client.chat.completions.create(messages=messages, **chat).choices[0].message.content in ANSWERS
    with client.chat.completions.stream(messages=messages[:1], **chat) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    parsed = client.chat.completions.parse(
        model="tiny", messages=messages[:1], response_format=City, temperature=1.0, seed=1
    )
    assert isinstance(parsed.choices[0].message.parsed, City)

    tool = openai.pydantic_function_tool(City)["function"]
    tools = [{"type": "function", **tool}]
    first = client.responses.create(model="tiny", input="How many?", tools=tools, extra_body={"seed": 1})
    items = [{"role": "user", "content": "How many?"}, *first.output]
    items.append({"type": "function_call_output", "call_id": first.output[0].call_id, "output": "700000"})
    with client.responses.stream(model="tiny", input=items, tools=tools) as stream:
        assert stream.get_final_response().output_text in ANSWERS
    found = client.responses.parse(model="tiny", input="How many?", text_format=City, extra_body={"seed": 1})
    assert isinstance(found.output_parsed, City)


main(sys.argv[1])
