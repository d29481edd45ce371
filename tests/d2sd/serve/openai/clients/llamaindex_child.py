"""LlamaIndex: chat, stream, structured output and an agent's loop."""

import asyncio
import sys
from typing import Any, Literal

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

ANSWERS = ("It is 21 degrees.", "It is cold.")


class City(BaseModel):
    """A city."""

    capital: bool


def weather(city: Literal["Oslo", "Rome"]) -> str:
    """Look at the sky."""
    return "21"


def make(url: str) -> Any:
    options: Any = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 4096}
    return OpenAILike(model="tiny", api_base=url, api_key="key", temperature=1.0, max_retries=0, **options)


async def loops(url: str) -> None:
    for streaming in (False, True):
        agent = FunctionAgent(tools=[weather], llm=make(url), system_prompt="Be brief.", streaming=streaming)
        found: Any = await agent.run("Weather?")
        assert str(found) in ANSWERS, found
        assert [call.tool_name for call in found.tool_calls] == ["weather"]


def main(url: str) -> None:
    model, hello = make(url), [ChatMessage(role="user", content="Hello")]
    assert model.chat(hello).message.content in ANSWERS
    assert "".join(chunk.delta or "" for chunk in model.stream_chat(hello)) in ANSWERS
    assert isinstance(model.as_structured_llm(City).chat(hello).raw, City)
    asyncio.run(loops(url))


main(sys.argv[1])
