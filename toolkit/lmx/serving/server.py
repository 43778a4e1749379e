"""The process: a socket, signals, and the engine beside the event loop."""

import asyncio
import errno
import ipaddress
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import FAILED, INTERRUPTED, UserError
from .app import Endpoint, HTTPSettings, log
from .engine_thread import EngineThread, ServedModel
from .metrics import Metrics
from .service import CompletionService, ServiceSettings

STALL_SECONDS = 30.0
"""In which the head of a request must come, and an answer must be read."""
DRAIN_SECONDS = 1.0
"""In which the rest of a request must come when the server ends."""
BACKLOG = 64
"""Connections that wait, and that asyncio takes before it goes on with the others: more
let clients that only connect, send and leave keep all others waiting."""
PROBE_SECONDS = 1.0
"""In which another server on the same port must answer."""


class HTTPProtocol(H11Protocol):
    """HTTP/1.1, where a connection is closed that sends no whole request, or does not
    read its answer."""

    _timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._write_timer):
            if timer:
                timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def shutdown(self) -> None:
        super().shutdown()
        self.loop.call_later(DRAIN_SECONDS, self._drop_half_sent)

    def _drop_half_sent(self) -> None:
        if self.cycle and self.cycle.more_body and not self.cycle.response_started:
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self._abort_later()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer:
            self._write_timer.cancel()

    def _abort_later(self) -> asyncio.TimerHandle:
        # Closing would wait until the client has read what is written.
        return self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def _watch(self) -> None:
        waits = self.cycle is None or self.cycle.response_complete
        if waits and self._timer is None:
            self._timer = self._abort_later()
        elif not waits and self._timer:
            self._timer.cancel()
            self._timer = None


class HTTPServer(uvicorn.Server):
    """A server that a first SIGTERM or SIGINT drains, and a second one ends."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while it runs. Only the main thread can."""
        is_main = threading.current_thread() is threading.main_thread()
        kinds = (signal.SIGINT, signal.SIGTERM) if is_main else ()
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


def _require_free(family: int, address: tuple) -> None:
    """Raise OSError if a server answers: macOS gives its port to a second one, if one
    of both has all addresses of the machine."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_SECONDS)
        if address[1] and probe.connect_ex(address) == 0:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


class ModelServer:
    """A model behind a socket.

    Attributes:
        thread: the engine.
        url: where it is served.

    Raises:
        UserError: the model does not load, or the address is not free.
    """

    def __init__(
        self,
        load: Callable[[], ServedModel],
        *,
        host: str,
        port: int,
        service: ServiceSettings,
        http: HTTPSettings,
    ):
        # Before the model is loaded, which takes longer.
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            family = found[0]
            _require_free(family, found[4])
            # asyncio sends small packets at once only if it knows that this is TCP.
            kind = socket.SOCK_STREAM, socket.IPPROTO_TCP
            self._socket = socket.socket(family, *kind)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(BACKLOG)
        except (OSError, OverflowError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UserError(
                f"cannot listen on {host}:{port}: {reason.lower()}", hint="use --port"
            ) from error
        address, actual = self._socket.getsockname()[:2]
        is_local = ipaddress.ip_address(address.partition("%")[0]).is_loopback
        http = replace(http, local_only=is_local and http.api_key is None)
        log(f"loading {service.model}")
        self.thread = EngineThread(load, on_end=self._on_end)
        served = self.thread.start()
        metrics = Metrics(service.model, lambda: self.thread.state)
        completions = CompletionService(self.thread, served, service, metrics)
        config = uvicorn.Config(
            Endpoint(completions, self.thread, metrics, http).app(),
            http=HTTPProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
        )
        self._server = HTTPServer(config)
        shown = f"[{address}]" if ":" in address else address
        self.url = f"http://{shown}:{actual}"
        log(f"{service.model} is served on {self.url}")
        if not is_local and http.api_key is None:
            log("warning: everyone who reaches this address can use it; see --api-key")

    def run(self) -> int:
        """Serve until a signal comes, or `stop`; returns the exit code."""
        self._server.run(sockets=[self._socket])
        failed = not self.thread.alive
        self.thread.stop()
        return FAILED if failed else 0

    def stop(self) -> None:
        """End after the open requests; from any thread."""
        self._server.should_exit = True

    def _on_end(self) -> None:
        log("the engine failed several times in a row: the server ends")
        self.stop()
