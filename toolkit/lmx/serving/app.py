"""The routes of the endpoint: bodies in, answers or streams out."""

import asyncio
import hmac
import ipaddress
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..errors import shorten
from ..run import terminal
from ..version import __version__
from .choice import Piece
from .engine_thread import EngineThread
from .errors import SERVER, ApiError, no_model
from .markdown import markdown_nodes
from .metrics import CONTENT_TYPE, Metrics
from .page import page_response
from .protocol import AdapterParameters, MarkdownParameters, parse_body
from .service import CompletionService, Job

T = TypeVar("T")
JSON = "application/json"
MAX_LINE = 1000
"""Characters of a line of the log; a client's text may be long."""
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
CLIENT_GONE = 499
"""nginx's status for a client that left; it is only logged."""


@dataclass(frozen=True)
class HTTPSettings:
    """What the server lets in.

    Attributes:
        api_key: None = everyone.
        max_body: bytes of a request.
        body_timeout: seconds in which a body must come.
        allowed_origins: web pages of other origins that may ask.
        local_only: see `LocalNames`.
        adapter_loading: clients may load adapters from the server's disk, and drop
            them.
        log_requests: write bodies and answers to the log.
    """

    api_key: str | None = None
    max_body: int = 8 << 20
    body_timeout: float = 30.0
    allowed_origins: tuple[str, ...] = ()
    local_only: bool = False
    adapter_loading: bool = False
    log_requests: bool = False


class ClientGone(Exception):
    """The client has closed its connection."""


class Endpoint:
    """The handlers of the routes."""

    def __init__(
        self,
        service: CompletionService,
        thread: EngineThread,
        metrics: Metrics,
        settings: HTTPSettings,
    ):
        self._service, self._thread = service, thread
        self._metrics, self._settings = metrics, settings
        self._created = int(time.time())
        self._markdown_reader = ThreadPoolExecutor(1, "markdown")

    def app(self) -> Starlette:
        """The application."""
        post = partial(Route, methods=["POST"])
        complete = partial(self._complete, self._service.complete)
        chat = partial(self._complete, self._service.chat)
        # Some clients are given the address without /v1.
        routes = [
            route
            for start in ("/v1", "")
            for route in (
                post(f"{start}/chat/completions", chat),
                post(f"{start}/completions", complete),
                post(f"{start}/load_lora_adapter", self._load_adapter),
                post(f"{start}/unload_lora_adapter", self._unload_adapter),
                Route(f"{start}/models", self._models),
                Route(f"{start}/models/{{name:path}}", self._model),
            )
        ]
        routes += [
            post("/tokenize", self._tokenize),
            post("/detokenize", self._detokenize),
            post("/markdown", self._markdown),
            Route("/version", self._version),
            Route("/health", self._health),
            Route("/metrics", self._prometheus),
            Route("/", self._page),
        ]
        middleware = []
        if self._settings.local_only:
            middleware.append(
                Middleware(LocalNames, origins=self._settings.allowed_origins)
            )
        if origins := self._settings.allowed_origins:
            options = {"allow_methods": ["*"], "allow_headers": ["*"]}
            cors = Middleware(CORSMiddleware, allow_origins=origins, **options)
            middleware.append(cors)
        handlers: dict[Any, Callable] = {
            ApiError: self._on_error,
            HTTPException: self._on_http_error,
            Exception: self._on_fault,
        }
        return Starlette(
            routes=routes, middleware=middleware, exception_handlers=handlers
        )

    # Completions

    async def _complete(
        self, prepare: Callable[[Any], Awaitable[Job]], request: Request
    ) -> Response:
        self._authorize(request)
        body = await self._body(request)
        job = await self._while_asked(request, prepare(body))
        if job.parameters.stream:
            log_end = partial(self._log, request, body)
            keep = self._settings.log_requests
            return EventStream(self._service, job, log_end, keep=keep)
        try:
            await while_connected(request.receive, self._service.finish(job))
        except ClientGone:
            self._log(request, body, job, CLIENT_GONE)
            return Response(status_code=CLIENT_GONE)
        self._log(request, body, job, 200)
        return JSONResponse(job.answer.whole())

    async def _while_asked(self, request: Request, work: Awaitable[T]) -> T:
        """What some work returns, which ends when the client leaves."""
        try:
            return await while_connected(request.receive, work)
        except ClientGone:
            raise ApiError(CLIENT_GONE, "the client has left") from None

    async def _body(self, request: Request) -> Any:
        """The JSON value of a request.

        Raises:
            ApiError: it is too large or too slow, or no JSON.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        if kind.lower() != JSON:
            # Web pages may send other types to any server without asking it.
            raise ApiError(415, f"the Content-Type is {kind or 'missing'}, not {JSON}")
        limit = self._settings.max_body
        too_large = ApiError(413, f"the body has more than {limit:,} bytes")
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > limit:
            raise too_large
        data = bytearray()
        try:
            async with asyncio.timeout(self._settings.body_timeout):
                async for part in request.stream():
                    data += part
                    if len(data) > limit:
                        raise too_large
        except TimeoutError:
            seconds = self._settings.body_timeout
            message = f"the body did not come within {seconds:g} seconds"
            raise ApiError(408, message) from None
        except ClientDisconnect:
            raise ApiError(CLIENT_GONE, "the client has left") from None
        # A large body does not stop the event loop.
        return await asyncio.to_thread(parse_body, bytes(data))

    def _authorize(self, request: Request) -> None:
        key = self._settings.api_key
        if key is None:
            return
        given = request.headers.get("authorization", "")
        kind, _, value = given.partition(" ")
        # In constant time, so that no time tells how much of it is right.
        sent = value.strip().encode("latin-1")  # as Starlette has decoded it
        is_right = hmac.compare_digest(sent, os.fsencode(key))
        if kind.lower() != "bearer" or not is_right:
            headers = {"WWW-Authenticate": "Bearer"}
            message = "Incorrect API key provided"
            raise ApiError(401, message, code="invalid_api_key", headers=headers)

    def _log(self, request: Request, body: Any, job: Job, status: int) -> None:
        """One line for a request, without its text unless the user asked for it."""
        choices, usage = job.choices, job.answer.usage()
        first = min((c.first for c in choices if c.first), default=None)
        parts = {
            "prompt": usage["prompt_tokens"],
            "cached": usage["prompt_tokens_details"]["cached_tokens"],
            "completion": usage["completion_tokens"],
            "ttft": None if first is None else f"{first - job.arrival:.3f}",
            "total": f"{time.monotonic() - job.arrival:.3f}",
            "finish": ",".join(c.finish_reason or "abort" for c in choices),
        }
        text = " ".join(f"{name}={value}" for name, value in parts.items())
        log(f"{request.method} {request.url.path} {status} {job.answer.id} {text}")
        if self._settings.log_requests:
            answer = job.answer.whole()
            record = {"id": job.answer.id, "request": body, "answer": answer}
            terminal.write_err(terminal.json_text(record) + "\n")

    # Adapters

    async def _load_adapter(self, request: Request) -> Response:
        parameters = await self._adapter_parameters(request)
        if parameters.lora_path is None:
            raise ApiError(400, "lora_path is missing", param="lora_path")
        await self._service.add_adapter(parameters.lora_name, parameters.lora_path)
        log(f"adapter {parameters.lora_name} loaded from {parameters.lora_path}")
        return JSONResponse({"status": "loaded"})

    async def _unload_adapter(self, request: Request) -> Response:
        parameters = await self._adapter_parameters(request)
        await self._service.remove_adapter(parameters.lora_name)
        log(f"adapter {parameters.lora_name} dropped")
        return JSONResponse({"status": "dropped"})

    async def _adapter_parameters(self, request: Request) -> AdapterParameters:
        self._authorize(request)
        if not self._settings.adapter_loading:
            message = "this server does not load adapters: start it with "
            raise ApiError(403, message + "--allow-adapter-loading")
        return AdapterParameters.parse(await self._body(request))

    # Other routes

    async def _tokenize(self, request: Request) -> Response:
        self._authorize(request)
        work = self._service.tokenize(await self._body(request))
        tokens = await self._while_asked(request, work)
        record = {"count": len(tokens), "max_model_len": self._service.max_positions}
        return JSONResponse(record | {"tokens": tokens})

    async def _detokenize(self, request: Request) -> Response:
        self._authorize(request)
        work = self._service.detokenize(await self._body(request))
        return JSONResponse({"prompt": await self._while_asked(request, work)})

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def _models(self, request: Request) -> Response:
        self._authorize(request)
        data = [self._model_record(name) for name in self._service.models]
        return JSONResponse({"object": "list", "data": data})

    async def _model(self, request: Request) -> Response:
        self._authorize(request)
        name = request.path_params["name"]
        if name not in self._service.models:
            raise no_model(name)
        return JSONResponse(self._model_record(name))

    def _model_record(self, name: str) -> dict:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "lmx",
            "parent": self._service.models[name],
            "max_model_len": self._service.max_positions,
        }

    async def _health(self, request: Request) -> Response:
        alive = self._thread.alive
        status = {"status": "ok" if alive else "unavailable"}
        return JSONResponse(status, 200 if alive else 503)

    async def _prometheus(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)

    async def _page(self, request: Request) -> Response:
        return page_response()

    async def _markdown(self, request: Request) -> Response:
        """Elements of a text, for the page. One text at a time takes Python's lock."""
        self._authorize(request)
        text = MarkdownParameters.parse(await self._body(request)).text
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._markdown_reader, markdown_nodes, text)
        return JSONResponse({"nodes": await self._while_asked(request, work)})

    # Errors

    async def _on_error(self, request: Request, error: ApiError) -> Response:
        self._metrics.record_error(error.status)
        log(f"{request.method} {request.url.path} {error.status} {error.message}")
        return JSONResponse(error.to_json(), error.status, error.headers)

    async def _on_http_error(self, request: Request, error: HTTPException) -> Response:
        converted = ApiError(error.status_code, error.detail)
        converted.headers = dict(error.headers or {})
        return await self._on_error(request, converted)

    async def _on_fault(self, request: Request, error: Exception) -> Response:
        message = "the server has made a mistake; see its log"
        return await self._on_error(request, ApiError(500, message, kind=SERVER))


class EventStream(Response):
    """Server-sent events of an answer.

    Args:
        keep: the whole answer is kept, for the log.
    """

    def __init__(
        self,
        service: CompletionService,
        job: Job,
        log_end: Callable[[Job, int], None],
        *,
        keep: bool,
    ):
        self.background = None
        self._service, self._job, self._log_end = service, job, log_end
        self._keep = keep

    async def __call__(self, scope, receive, send) -> None:
        """Send the events. An error before the first one has its own status."""
        pieces = self._service.pieces(self._job)
        try:
            await while_connected(receive, self._send(pieces, send))
        except ClientGone:
            self._log_end(self._job, CLIENT_GONE)
        finally:
            await pieces.aclose()

    async def _send(self, pieces: AsyncIterator[Piece | None], send) -> None:
        status = 200
        first = await anext(pieces)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        await send(start)
        try:
            for choice in self._job.choices:
                for chunk in self._job.answer.start(choice):
                    await self._write(send, event(chunk | self._usage()))
            await self._write(send, self._events(first))
            async for piece in pieces:
                await self._write(send, self._events(piece))
            options = self._job.parameters.stream_options
            if options and options.include_usage:
                await self._write(send, event(self._job.answer.usage_chunk()))
        except ApiError as error:
            # The client has another status already.
            status = error.status
            self._service.metrics.record_error(status)
            await self._write(send, event(error.to_json()))
        await self._write(send, DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self._log_end(self._job, status)

    def _events(self, piece: Piece | None) -> bytes:
        if piece is None:
            return KEEP_ALIVE
        if self._keep:
            self._job.answer.add_piece(piece)
        chunks = self._job.answer.chunks(piece)
        return b"".join(event(chunk | self._usage()) for chunk in chunks)

    def _usage(self) -> dict:
        """The key of all chunks but the last, if wanted: null, or counts so far."""
        if self._job.splits_steps:
            return {"usage": self._job.answer.usage()}
        options = self._job.parameters.stream_options
        return {"usage": None} if options and options.include_usage else {}

    async def _write(self, send, data: bytes) -> None:
        if data:
            body = {"type": "http.response.body", "body": data, "more_body": True}
            await send(body)


class LocalNames:
    """ASGI middleware: answers requests to names of this machine, from its pages.

    No other name may come to mean this machine in a browser (DNS rebinding).

    Args:
        origins: that are allowed too, with their hosts; "*" = all.
    """

    def __init__(self, app: Callable, origins: Collection[str]):
        self._app = app
        self._names = {urlsplit(origin).hostname or origin for origin in origins}

    async def __call__(self, scope, receive, send) -> None:
        headers = Request(scope).headers
        host, origin = headers.get("host"), headers.get("origin")
        if self._allows(host and f"//{host}") and self._allows(origin):
            return await self._app(scope, receive, send)
        message = f"Host {host}, Origin {origin}: use --allowed-origins, or an API key"
        error = ApiError(403, shorten(message), code="forbidden")
        await JSONResponse(error.to_json(), 403)(scope, receive, send)

    def _allows(self, url: str | None) -> bool:
        if url is None or "*" in self._names:
            return True
        with suppress(ValueError):
            name = urlsplit(url).hostname or ""
            if name in self._names or f".{name}".endswith(".localhost"):
                return True
            # No page has the address of another machine as its name.
            return bool(ipaddress.ip_address(name))
        return False


async def while_connected(receive: Callable, work: Awaitable[T]) -> T:
    """Do the work of a request; end it when the client leaves.

    Raises:
        ClientGone: it has left.
    """

    async def wait_for_end() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_end())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait({task, gone})


def event(value: dict) -> bytes:
    """A JSON value as a server-sent event."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


def log(text: str) -> None:
    """Write a line to the log, with the time. A client's text does not end it."""
    text = shorten("\\n".join(terminal.visible(text).splitlines()), MAX_LINE)
    terminal.write_err(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
