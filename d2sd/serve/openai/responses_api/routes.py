"""The routes of /v1/responses."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.responses import Response

from d2sd.serve.openai import errors
from d2sd.serve.openai.responses_api.events import ResponseFormat
from d2sd.serve.openai.responses_api.protocol import ResponsesBody

if TYPE_CHECKING:
    from d2sd.serve.openai.app import Server


def add_responses(app: FastAPI, server: Server) -> None:
    """Add the routes to the app of a server."""

    @app.post("/v1/responses")
    async def create(body: ResponsesBody, http: Request) -> Response:
        return await server.answer(http, body.chat(), server.requests.chat, partial(ResponseFormat, body))

    @app.api_route("/v1/responses/{name:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    async def stored(name: str) -> Response:
        text = "Responses are not stored: keep the items of a conversation, and send them in `input`."
        return errors.respond(404, text, "not_stored")
