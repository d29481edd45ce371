"""A model that thinks, as the OpenAI SDK, LiteLLM and LangChain show it."""

from __future__ import annotations

import sys
from typing import Any

import litellm
import openai
from langchain_openai import ChatOpenAI

SAID = ("Is it?", "It is cold.")
USER: Any = [{"role": "user", "content": "Weather?"}]


def added_up(chunks: Any) -> tuple[str, str]:
    deltas = [chunk.choices[0].delta for chunk in chunks]
    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    return thought, "".join(delta.content or "" for delta in deltas)


def main(url: str) -> None:
    client: Any = openai.OpenAI(base_url=url, max_retries=0)
    message = client.chat.completions.create(model="tiny", messages=USER).choices[0].message
    assert (message.reasoning_content, message.content) == SAID, message
    assert added_up(client.chat.completions.create(model="tiny", messages=USER, stream=True)) == SAID
    with client.responses.stream(model="tiny", input="Weather?") as stream:
        thought, answer = stream.get_final_response().output
    assert (thought.content[0].text, answer.content[0].text) == SAID
    again = client.responses.create(model="tiny", input=[*USER, thought, answer, *USER])
    assert again.output_text == SAID[1]

    options: Any = {"model": "hosted_vllm/tiny", "api_base": url, "api_key": "key", "messages": USER}
    message = litellm.completion(**options).choices[0].message
    assert (message.reasoning_content, message.content) == SAID, message
    assert added_up(litellm.completion(stream=True, **options)) == SAID

    model: Any = ChatOpenAI(model="tiny", base_url=url, max_retries=0, use_responses_api=True)
    found = model.invoke("Weather?")
    kinds = [block["type"] for block in found.content_blocks]
    assert (kinds, found.text) == (["reasoning", "text"], SAID[1]), found.content_blocks


main(sys.argv[1])
