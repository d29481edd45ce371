"""The HTTP server's routes: OpenAI's API, health, metrics and a page that shows speculation at work."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware

from d2sd.bundle.serving import offer_choices
from d2sd.errors import RequestError
from d2sd.runtime.thought import Markers
from d2sd.serve.async_engine import AsyncEngine
from d2sd.serve.errors import DeadlineExceeded
from d2sd.serve.openai import errors
from d2sd.serve.openai.bounds import Bounds, bounded_route
from d2sd.serve.openai.formats import ChatFormat, CompletionFormat, Format
from d2sd.serve.openai.generation import Generation
from d2sd.serve.openai.grammars import Grammars
from d2sd.serve.openai.metrics import Metrics
from d2sd.serve.openai.middleware import Entrance
from d2sd.serve.openai.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    StreamOptions,
    TokenizeBody,
)
from d2sd.serve.openai.requests import RequestMaker
from d2sd.serve.openai.responses import Disconnected, EventStream, while_connected
from d2sd.serve.openai.responses_api.events import ResponseFormat
from d2sd.serve.openai.responses_api.protocol import ResponsesBody
from d2sd.serve.openai.spans import Spans
from d2sd.serve.openai.trace import make_recording, page, page_file, trace_events
from d2sd.serve.turns import Turns
from d2sd.viz.nodes import token_text

if TYPE_CHECKING:
    from d2sd.bundle.load import Bundle
    from d2sd.runtime.engine import Engine
    from d2sd.runtime.request import Request as EngineRequest
    from d2sd.serve.openai.settings import ServerSettings
    from d2sd.serve.stream import Watch

T = TypeVar("T")

#: Log-probabilities of a response from which on it is made outside the event loop; making as many takes milliseconds.
_LARGE = 2000


class Server:
    """State that the routes share: the bundle, its engine, and the threads of its tokenizer and its grammars."""

    def __init__(self, bundle: Bundle, engine: Engine, settings: ServerSettings) -> None:
        self.bundle, self.settings = bundle, settings
        offer_choices(bundle, engine)
        self.engine = AsyncEngine(engine, max_waiting=settings.max_waiting)
        self.metrics = Metrics(engine, settings.model, settings.metrics_prefix)
        self.created = int(time.time())
        files = ",".join(f"{name}={digest}" for name, digest in sorted(bundle.manifest.files.items()))
        self.fingerprint = f"d2sd-{version('d2sd')}-{hashlib.sha256(files.encode()).hexdigest()[:12]}"
        self.requests = RequestMaker(bundle, settings.max_choices)
        self.show_token, self.markers = token_text(bundle.tokenizer.decode), Markers.of(bundle.tokenizer)
        self.bounds = Bounds(bundle.tokenizer, engine.limits.max_context, settings)
        room = engine.limits.max_batch + settings.max_waiting
        self._text = Turns("d2sd-tokenizer", max_waiting=room)
        self._grammars = Grammars(self.requests.grammars, Turns("d2sd-grammar", max_waiting=room))

    async def tokenizing(self, http: Request, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that uses the tokenizer, outside the event loop. Raises Disconnected when the client goes."""
        return await while_connected(http.receive, self._text.run(http.scope["state"]["client"], function, *arguments))

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFound unless the name is this server's model, or none."""
        if name not in (None, self.settings.model):
            raise errors.ModelNotFound(
                "The model does not exist.", where="model", found=name, expected=self.settings.model
            )

    async def answer(
        self,
        http: Request,
        body: GenerationBody,
        encode: Callable[..., list[EngineRequest]],
        make_format: Callable[..., Format],
    ) -> Response:
        """Generate the answers to a body, streamed or whole."""
        if body.stream_options is not None and not body.stream:
            raise RequestError("stream_options needs stream.", where="stream_options", fix="set stream to true")
        generation = await self._start(http, body, encode)
        try:
            shape = make_format(self.settings.model, self.fingerprint, body, self.show_token)
            if isinstance(shape, CompletionFormat) and shape.echo:
                await self.tokenizing(http, shape.read_prompts)
        except BaseException:
            generation.close()
            raise
        if body.stream:
            options = body.stream_options or StreamOptions()
            return shape.stream(_events(generation, shape, options), generation.close)
        try:
            await while_connected(http.receive, generation.run())
        finally:
            generation.close()
        if generation.entries > _LARGE:
            return await self.tokenizing(http, lambda: JSONResponse(shape.whole(generation)))
        return JSONResponse(shape.whole(generation))

    async def trace(self, http: Request, body: ChatBody) -> Response:
        """Stream the steps of an answer; see `d2sd.serve.openai.trace`."""
        if body.n not in (None, 1):
            raise RequestError("A trace has one answer.", where="n", found=body.n, expected=1)
        recording = make_recording(self.bundle)
        generation = await self._start(http, body, self.requests.chat, recording.add)
        return EventStream(trace_events(generation, recording), generation.close)

    async def _start(
        self,
        http: Request,
        body: GenerationBody,
        encode: Callable[..., list[EngineRequest]],
        watch: Watch | None = None,
    ) -> Generation:
        """Submit the requests of a body."""
        self.check_model(body.model)
        self.bounds.check(body)
        facts = http.scope["state"]["facts"]
        facts |= {"model": self.settings.model, "stream": body.stream or watch is not None}
        deadline, begun = body.deadline or self.settings.request_timeout, time.monotonic()
        try:
            with anyio.fail_after(deadline):
                prepared = await self._prepared(http, body, encode)
        except TimeoutError:
            raise DeadlineExceeded("The request did not begin within its deadline.", where="deadline") from None
        if deadline is not None:
            deadline = max(deadline - (time.monotonic() - begun), 0.001)
        prompt_only = isinstance(body, CompletionBody) and body.echo and body.max_tokens == 0
        # An answer whose form is demanded is said as a whole: its grammar leaves no room for a thought.
        markers = self.markers if isinstance(body, ChatBody) and self.requests.form(body)[1] is None else None
        streams = self.engine.submit(prepared, deadline=deadline, watch=watch)
        return Generation(streams, self.metrics, facts, prompt_only, markers)

    async def _prepared(
        self, http: Request, body: GenerationBody, encode: Callable[..., list[EngineRequest]]
    ) -> list[EngineRequest]:
        """The requests of a body, with their grammars; the client's turns come first."""
        _, form = self.requests.form(body)
        if form is not None:
            await while_connected(http.receive, self._grammars.prepare(http.scope["state"]["client"], form))
        client = http.scope["state"]["client"]
        if isinstance(body, CompletionBody):
            body = await self._encoded(http, body)
        prepared = [replace(request, client=client) for request in await self.tokenizing(http, encode, body)]
        self.bounds.check_requests(prepared)
        return prepared

    async def _encoded(self, http: Request, body: CompletionBody) -> CompletionBody:
        """The same body with the token ids of its prompts, each in a turn of its own: many take seconds together."""
        if isinstance(body.prompt, str) or not any(isinstance(prompt, str) for prompt in body.prompt):
            return body
        prompts = [await self.tokenizing(http, self.requests.encode_prompt, prompt) for prompt in body.prompt]
        encoded: CompletionBody = body.model_copy(update={"prompt": prompts})
        return encoded


async def _events(generation: Generation, shape: Format, options: StreamOptions) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a stream."""
    continuous = options.include_usage and options.continuous_usage_stats
    for choice in generation.choices:
        for event in shape.first(choice):
            yield event
    async for choice, output in generation.outputs():
        for event in shape.deltas(choice, output):
            yield event | {"usage": generation.usage()} if continuous else event
    if options.include_usage:
        yield shape.chunk(usage=generation.usage())


def create_app(bundle: Bundle, engine: Engine, settings: ServerSettings) -> FastAPI:
    """Make the ASGI app of one bundle; its lifespan starts and stops the engine's thread.

    `app.state.server.engine` is the `AsyncEngine`: drain it before the app is shut down.
    """
    server = Server(bundle, engine, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await server.engine.start()
        yield
        await server.engine.stop()

    app = FastAPI(
        title="d2sd",
        version=version("d2sd"),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses={"4XX": {"description": "A refusal, as OpenAI's error body."}},
    )
    app.state.server = server
    app.router.route_class = bounded_route(engine.limits.max_context)
    errors.install(app)
    app.add_exception_handler(Disconnected, lambda request, error: Response(status_code=499))
    app.add_middleware(Entrance, settings=settings, spans=Spans())
    if settings.origins:  # in front of the keys: browsers ask without one
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )

    _add_generation(app, server)
    _add_page(app, engine)
    _add_models(app, server, engine.limits.max_context)
    _add_tokens(app, server, engine)
    _add_state(app, server)
    return app


def _add_generation(app: FastAPI, server: Server) -> None:
    """Add the routes that generate text."""

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, http: Request) -> Response:
        return await server.answer(http, body, server.requests.chat, ChatFormat)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, http: Request) -> Response:
        return await server.answer(http, body, server.requests.completion, CompletionFormat)

    @app.post("/v1/responses")
    async def create(body: ResponsesBody, http: Request) -> Response:
        return await server.answer(http, body.chat(), server.requests.chat, partial(ResponseFormat, body))

    @app.api_route("/v1/responses/{name:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    async def stored(name: str) -> Response:
        text = "Responses are not stored: keep the items of a conversation, and send them in `input`."
        return errors.respond(404, text, "not_stored")

    @app.post("/trace")
    async def trace(body: ChatBody, http: Request) -> Response:
        return await server.trace(http, body)


def _add_page(app: FastAPI, engine: Engine) -> None:
    """Add the page that shows speculation at work."""
    shown = page(engine.choices, "auto" if engine.selector else engine.policy.name)
    app.add_api_route("/", lambda: shown, include_in_schema=False)
    for path, name in (("/page.css", "page.css"), ("/page.js", "page.js"), ("/favicon.ico", "favicon.svg")):
        app.add_api_route(path, partial(page_file, name), include_in_schema=False)


def _add_models(app: FastAPI, server: Server, max_context: int) -> None:
    """Add the routes that describe the model."""
    model = {"id": server.settings.model, "object": "model", "created": server.created, "owned_by": "d2sd"}
    model["max_model_len"] = max_context

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        server.check_model(name)
        return model


def _add_tokens(app: FastAPI, server: Server, engine: Engine) -> None:
    """Add the routes of the tokenizer."""

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody, http: Request) -> dict[str, Any]:
        server.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("Give either a prompt or messages.", where="prompt")
        server.bounds.check(body)
        tokens = await server.tokenizing(http, server.requests.encode, body)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": engine.limits.max_context}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody, http: Request) -> dict[str, Any]:
        server.check_model(body.model)
        server.bounds.check(body)
        if bad := [token for token in body.tokens if token >= engine.runner.vocab_size]:
            raise RequestError("There is a token outside the vocabulary.", where="tokens", found=bad[0])
        return {"prompt": await server.tokenizing(http, server.bundle.tokenizer.decode, body.tokens)}


def _add_state(app: FastAPI, server: Server) -> None:
    """Add the routes of probes and scrapers."""

    @app.get("/health")
    @app.get("/live")
    async def health() -> Response:
        reason = server.engine.health
        return JSONResponse(
            {"status": "ok"} if reason is None else {"status": "failed", "reason": reason},
            200 if reason is None else 503,
        )

    @app.get("/ready")
    async def ready() -> Response:
        ok = server.engine.accepting
        return JSONResponse({"status": "ready" if ok else "not ready"}, 200 if ok else 503)

    @app.get("/version")
    async def show_version() -> dict[str, str]:
        return {"version": version("d2sd"), "model": server.settings.model, "system_fingerprint": server.fingerprint}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(server.metrics.text(), media_type=CONTENT_TYPE_LATEST)
