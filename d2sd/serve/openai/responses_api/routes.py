"""The routes of /v1/responses."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.responses import Response

from d2sd.errors import RequestError
from d2sd.serve.openai import errors
from d2sd.serve.openai.responses_api.events import ResponseFormat
from d2sd.serve.openai.responses_api.protocol import ResponsesBody

if TYPE_CHECKING:
    from d2sd.serve.openai.app import Server

#: Parameters of a chat -> those of a response.
_NAMES = {
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
}


def add_responses(app: FastAPI, server: Server) -> None:
    """Add the routes to the app of a server."""

    @app.post("/v1/responses")
    async def create(body: ResponsesBody, http: Request) -> Response:
        try:
            return await server.answer(http, body.chat(), server.requests.chat, partial(ResponseFormat, body))
        except RequestError as error:
            raise _renamed(error) from None

    @app.api_route("/v1/responses/{name:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    async def stored(name: str) -> Response:
        text = "Responses are not stored: keep the items of a conversation, and send them in `input`."
        return errors.respond(404, text, "not_stored")


def _renamed(error: RequestError) -> RequestError:
    """The error with the parameter as a response names it."""
    where = str(error.where)
    chat = next((name for name in _NAMES if where == name or where.startswith((f"{name}.", f"{name}["))), None)
    return error if chat is None else error.at(_NAMES[chat] + where.removeprefix(chat))
