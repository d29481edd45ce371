"""Instructor: models from tools and from JSON schemas, with objects that the server is asked to close."""

from __future__ import annotations

import sys
from typing import Any, Literal

import instructor
import openai
from pydantic import BaseModel


class City(BaseModel):
    capital: bool
    country: Literal["Norway", "Italy"]


def main(url: str) -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client: Any = instructor.from_openai(openai.OpenAI(base_url=url, max_retries=0), mode=mode)
        found, raw = client.chat.completions.create_with_completion(
            model="tiny",
            messages=[{"role": "user", "content": "How many?"}],
            response_model=City,
            temperature=1.0,
            seed=1,
            max_retries=0,
            extra_body={"structured_outputs": {"disable_additional_properties": True}},
        )
        assert isinstance(found, City), raw


main(sys.argv[1])
