"""LangChain: an agent's loop over chats and over responses, structured output, and the error for a full context."""

from __future__ import annotations

import sys
from typing import Any, Literal

from langchain.agents import create_agent
from langchain_core.exceptions import ContextOverflowError
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class City(BaseModel):
    """A city."""

    capital: bool


def weather(city: Literal["Oslo", "Rome"]) -> str:
    """Look at the sky."""
    return "21"


def main(url: str) -> None:
    for responses in (False, True):
        model: Any = ChatOpenAI(model="tiny", base_url=url, temperature=1.0, max_retries=0, use_responses_api=responses)
        agent = create_agent(model, [tool(weather)], system_prompt="Be brief.")
        found = agent.invoke({"messages": [{"role": "user", "content": "Weather?"}]})["messages"]
        assert [message.type for message in found] == ["human", "ai", "tool", "ai"]
        assert found[-1].text in ("It is 21 degrees.", "It is cold."), found
        names = [key for part in agent.stream({"messages": [{"role": "user", "content": "Weather?"}]}) for key in part]
        assert names == ["model", "tools", "model"], names
        streamed = "".join(chunk.text for chunk in model.stream("Hello"))
        assert streamed in ("It is 21 degrees.", "It is cold."), streamed
        for ask in (model.invoke, lambda text, model=model: list(model.stream(text))):
            try:
                ask("Weather? " * 4000)
            except ContextOverflowError:
                continue
            raise AssertionError(ask)
        structured = model.with_structured_output(City, method="json_schema")
        assert isinstance(structured.invoke("How many?"), City)
    calling = model.with_structured_output(City, method="function_calling", tool_choice="City")
    assert isinstance(calling.invoke("How many?"), City)


main(sys.argv[1])
