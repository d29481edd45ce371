"""Every refusal as OpenAI's error body: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from d2sd.errors import (
    CLIENT,
    ContextLengthExceeded,
    D2SDError,
    GenerationError,
    RequestError,
    UnexpectedError,
    shortened,
    spelled,
)
from d2sd.serve.errors import Busy, DeadlineExceeded, EngineFailed, QueueFull, ShuttingDown

logger = logging.getLogger(__name__)


class ModelNotFound(RequestError):
    """The request names a model that this server does not have."""


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "server_error",
    503: "server_error",
    504: "timeout_error",
}
#: Error class -> status and code; the first that fits. No request leads to a 5xx but those of a machine that is busy,
#: shuts down or lacks something; a 500 is a bug.
_STATUS: tuple[tuple[type[D2SDError], int, str], ...] = (
    (Busy, 503, "busy"),
    (QueueFull, 429, "queue_full"),
    (DeadlineExceeded, 504, "deadline_exceeded"),
    (ShuttingDown, 503, "shutting_down"),
    (EngineFailed, 503, "engine_failed"),
    (UnexpectedError, 500, "internal_error"),
    (GenerationError, 400, "generation_failed"),
    (ModelNotFound, 404, "model_not_found"),
    (ContextLengthExceeded, 400, "context_length_exceeded"),
    (RequestError, 400, "invalid_request"),
    (D2SDError, 501, "not_supported"),  # such as a package that is not installed
)
#: The words of clients, where a route has its own, also for parameters that errors name as chats do.
_WORDS: Mapping[str, Mapping[str, str]] = {
    "/v1/chat/completions": {**CLIENT, "prompt": "messages"},
    "/trace": {**CLIENT, "prompt": "messages"},
    "/v1/responses": {
        **CLIENT,
        **dict.fromkeys(("prompt", "messages"), "input"),
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_output_tokens"),
        "response_format": "text.format",
    },
}
#: Validation errors of pydantic that have a clearer text for a client.
_MESSAGES = {
    "missing": "Missing required parameter: '{name}'.",
    "not_text": "Invalid value for '{name}': {message}.",  # without a picture's data
}


def body_of(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an error."""
    kind = _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": _encodable(message), "type": kind, "param": param, "code": code}}


def describe(error: BaseException, path: str = "") -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers for an error raised by a request to the route `path`."""
    words = _WORDS.get(path, CLIENT)
    if isinstance(error, RequestError) and error.where:
        error = error.at(re.sub(r"^\w+", lambda name: words.get(name[0], name[0]), spelled(str(error.where), words)))
    for kind, status, code in _STATUS:
        if isinstance(error, kind):
            if status == 500:
                logger.error("a request failed: %s", error)
            where = str(error.where) if isinstance(error, RequestError) and error.where else None
            headers = {"retry-after": str(QueueFull.retry_after)} if status in (429, 503) else {}
            return status, body_of(status, error.told(words), where and _encodable(where[:200]), code), headers
    logger.error("a request failed", exc_info=error)
    return 500, body_of(500, "The server failed to process the request.", None, "internal_error"), {}


def respond(status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error response."""
    return JSONResponse(body_of(status, message, None, code), status, headers)


def install(app: FastAPI) -> None:
    """Make every error of `app` an OpenAI error body."""

    def known(request: Request, error: Exception) -> JSONResponse:
        status, body, headers = describe(error, request.url.path)
        return JSONResponse(body, status, headers)

    def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        message, param = _validation(error.errors())
        return JSONResponse(body_of(400, message, param, "invalid_request"), 400)

    def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        status = error.status_code
        what = {404: f"There is nothing at {request.url.path}.", 405: f"{request.method} is not allowed here."}
        message = what.get(status, str(error.detail or HTTPStatus(status).phrase))
        return JSONResponse(body_of(status, message, None, _CODES.get(status)), status, error.headers)

    app.add_exception_handler(D2SDError, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)


_CODES = {400: "invalid_request", 404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}


def _validation(errors: Sequence[Any]) -> tuple[str, str | None]:
    """Message and parameter of the first validation error; unknown parameters are named together."""
    first = errors[0]
    if unknown := [_name(error) for error in errors if error["type"] == "extra_forbidden"]:
        return f"Unsupported parameter(s): {shortened(', '.join(f'`{name}`' for name in unknown))}.", unknown[0]
    if first["type"] == "json_invalid":
        return f"The body is not valid JSON: {first['ctx']['error']}.", None
    name = _name(first)
    if not name:
        return "The body must be a JSON object, with the header content-type: application/json.", None
    if first["type"] in _MESSAGES:
        return _MESSAGES[first["type"]].format(name=name, message=first["msg"]), name
    return f"Invalid value for '{name}': {first['msg']}; found {shortened(repr(first.get('input')), 80)}.", name


def _name(error: Any) -> str:
    """Dotted path of the parameter; names of union branches are left out."""
    parts = [str(part) for part in error["loc"][1:]]
    return shortened(".".join(p for p in parts if "[" not in p and p not in ("str", "int", "float", "bool")), 120)


def _encodable(text: str) -> str:
    """Text without lone surrogates, which JSON in UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode("utf-8")
