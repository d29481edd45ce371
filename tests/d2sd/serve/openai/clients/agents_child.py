"""OpenAI's Agents SDK: a run with a tool, over responses and over chats, whole and streamed."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Literal

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from openai import AsyncOpenAI
from pydantic import BaseModel

ANSWERS = ("It is 21 degrees.", "It is cold.")


class City(BaseModel):
    capital: bool


def weather(city: Literal["Oslo", "Rome"]) -> str:
    """Look at the sky."""
    return "21"


async def main(url: str) -> None:
    client = AsyncOpenAI(base_url=url, max_retries=0)
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model: Any = kind("tiny", client)
        agent: Any = Agent(name="a", instructions="Be brief.", model=model, tools=[function_tool(weather)])
        found = await Runner.run(agent, "Weather?")
        assert found.final_output in ANSWERS
        kinds = [item.type for item in found.new_items]
        assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"], kinds
        streamed = Runner.run_streamed(agent, "Weather?")
        names = [event.type async for event in streamed.stream_events()]
        assert "raw_response_event" in names
        assert streamed.final_output in ANSWERS
        again = await Runner.run(agent, [*found.to_input_list(), {"role": "user", "content": "And now?"}])
        assert again.final_output in ANSWERS
        typed: Any = Agent(name="b", model=model, output_type=City)
        assert isinstance((await Runner.run(typed, "How many?")).final_output, City)


asyncio.run(main(sys.argv[1]))
