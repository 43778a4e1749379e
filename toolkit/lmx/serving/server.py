"""The process: a socket, signals, and the engine beside the event loop."""

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import FAILED, INTERRUPTED, UserError
from .app import Endpoint, HTTPSettings, log
from .engine_thread import EngineThread, ServedModel
from .metrics import Metrics
from .service import CompletionService, ServiceSettings

HEADER_SECONDS = 30.0
"""In which the head of a request must come."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class HTTPProtocol(H11Protocol):
    """HTTP/1.1, where a connection that sends no whole request is closed."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer:
            self._timer.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        waits = self.cycle is None or self.cycle.response_complete
        if waits and self._timer is None:
            self._timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)
        elif not waits and self._timer:
            self._timer.cancel()
            self._timer = None


class HTTPServer(uvicorn.Server):
    """A server that a first SIGTERM or SIGINT drains, and a second one ends."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while it runs."""
        kinds = (signal.SIGINT, signal.SIGTERM)
        before = {kind: signal.signal(kind, self.handle_exit) for kind in kinds}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """End after the open requests, or at once."""
        if self.should_exit:
            os._exit(INTERRUPTED)
        self.should_exit = True


def open_socket(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 = a free one.

    Raises:
        UserError: the address is not free, or none of this machine.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        opened = socket.socket(family)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((host, port))
        opened.listen(2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"cannot listen on {host}:{port}: {reason.lower()}", hint="use --port"
        ) from error
    return opened


def serve(
    load: Callable[[], ServedModel],
    *,
    host: str,
    port: int,
    service: ServiceSettings,
    http: HTTPSettings,
) -> int:
    """Serve until a signal comes; returns the exit code.

    Raises:
        UserError: the model does not load, or the address is not free.
    """
    # Before the model is loaded, which takes longer.
    opened = open_socket(host, port)
    config = uvicorn.Config(
        None,
        http=HTTPProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
    )
    server = HTTPServer(config)

    def end() -> None:
        log("the engine failed several times in a row: the server ends")
        server.should_exit = True

    thread = EngineThread(load, on_end=end)
    served = thread.start()
    metrics = Metrics(service.model, lambda: thread.state)
    completions = CompletionService(thread, served, service, metrics)
    config.app = Endpoint(completions, thread, metrics, http).app()
    address, actual = opened.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    log(f"{service.model} is served on http://{shown}:{actual}")
    if host not in LOOPBACK and http.api_key is None:
        log("warning: everyone who reaches this address can use it; see --api-key")
    server.run(sockets=[opened])
    failed = not thread.alive
    thread.stop()
    return FAILED if failed else 0
