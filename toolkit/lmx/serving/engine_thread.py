"""The engine on a thread of its own, and the event loop's view of it.

Only this thread touches MLX: it loads the model, and runs a step after the other while
there are requests. Tokens go to the event loop once a step.
"""

import asyncio
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..cpu import malloc
from ..errors import UserError
from ..generation.engine import Engine
from ..generation.generator import Generator
from ..generation.sampling import Sampling
from ..generation.sequence import GenerationRequest, TokenOutput
from ..run import terminal

MAX_FAILURES = 3
"""Exceptions in a row without a step between them, after which the server ends."""

PUBLISH_SECONDS = 0.1
TRIM_SECONDS = 1.0
"""Without a request, after which freed memory goes back to the system."""


@dataclass(frozen=True)
class ServedModel:
    """A model that is served.

    Attributes:
        sampling: settings of generation_config.json; see `sampling_defaults`.
        load_adapter: loads the model with the adapter of a folder, weights unread; see
            `MultiLoRA.add`. None = adapters cannot be loaded later.
    """

    generator: Generator
    sampling: Sampling = field(default_factory=Sampling)
    load_adapter: Callable[[str], Any] | None = None


class EngineFailed(Exception):
    """The engine has raised an exception; its requests are lost."""


@dataclass(frozen=True)
class EngineState:
    """What the engine is doing, after a step.

    Attributes:
        running, waiting: requests.
        kv_bytes: of all caches, the prefix cache too.
        kv_memory: bytes that the requests may have.
        preemptions: see `Scheduler`.
        draft_tokens, accepted_tokens, draft_rounds: since the start.
    """

    running: int = 0
    waiting: int = 0
    kv_bytes: int = 0
    kv_memory: int = 0
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    draft_rounds: int = 0


@dataclass(eq=False)
class Subscription:
    """The tokens of some requests, as they come.

    Attributes:
        outputs: of a step each; an exception ends them.
    """

    requests: Sequence[GenerationRequest]
    outputs: asyncio.Queue[list[TokenOutput] | Exception] = field(
        default_factory=asyncio.Queue
    )


class EngineThread:
    """Runs an engine.

    Args:
        load: loads the model, on the thread.
        on_end: called from the thread when it ends by itself, after failures.

    Attributes:
        state: after the last step.
    """

    def __init__(
        self,
        load: Callable[[], ServedModel],
        *,
        on_end: Callable[[], None] = lambda: None,
    ):
        self.state = EngineState()
        self._load, self._on_end = load, on_end
        self._commands: queue.SimpleQueue[Callable[[Engine], None] | None]
        self._commands = queue.SimpleQueue()
        self._subscriptions: dict[GenerationRequest, Subscription] = {}
        self._calls: set[asyncio.Future] = set()
        self._has_failed = False
        self._ended = threading.Event()
        self._active: set[GenerationRequest] = set()  # of the thread
        self._published = 0.0
        self._is_trimmed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loaded: queue.SimpleQueue[ServedModel | BaseException]
        self._loaded = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self) -> ServedModel:
        """Load the model; returns it. The thread owns its engine.

        Raises:
            UserError: the model does not load.
        """
        self._thread.start()
        loaded = self._loaded.get()
        if isinstance(loaded, BaseException):
            raise loaded
        return loaded

    @property
    def alive(self) -> bool:
        """Whether requests are processed."""
        return not self._ended.is_set()

    @property
    def open_requests(self) -> int:
        """Requests that run or wait."""
        return len(self._subscriptions)

    def submit(self, requests: Sequence[GenerationRequest]) -> Subscription:
        """Start requests, on the event loop."""
        self._loop = asyncio.get_running_loop()
        subscription = Subscription(requests)
        if self._has_failed:
            subscription.outputs.put_nowait(EngineFailed())
            return subscription
        self._subscriptions |= dict.fromkeys(requests, subscription)

        def add(engine: Engine) -> None:
            self._active |= {*requests}
            for request in requests:
                try:
                    engine.require_memory(request)
                    engine.add_request(request)
                except UserError as error:
                    self._active.discard(request)
                    refusal = TokenOutput(request, -1, True, error=error)
                    self._notify(self._dispatch, [refusal])

        self._commands.put(add)
        return subscription

    def abort(self, request: GenerationRequest) -> None:
        """Drop a request before the next step, on the event loop."""

        def abort(engine: Engine) -> None:
            self._active.discard(request)
            engine.abort(request)

        if self._subscriptions.pop(request, None):
            self._commands.put(abort)

    async def run_on_engine(self, function: Callable[[Engine], Any]) -> Any:
        """What a function of the engine returns, between two steps.

        Raises:
            UserError: from the function.
            EngineFailed: the thread has ended.
        """
        self._loop = asyncio.get_running_loop()
        future: asyncio.Future = self._loop.create_future()
        if self._has_failed:
            raise EngineFailed

        def run(engine: Engine) -> None:
            try:
                result = function(engine)
            except Exception as error:
                self._notify(_fail, future, error)
            else:
                self._notify(_set, future, result)

        self._calls.add(future)
        self._commands.put(run)
        try:
            return await future
        finally:
            self._calls.discard(future)

    def stop(self) -> None:
        """End the thread after its present step. Open requests are dropped."""
        self._commands.put(None)
        self._ended.wait()

    # On the thread

    def _main(self) -> None:
        try:
            served = self._load()
        except BaseException as error:
            self._loaded.put(error)
        else:
            self._loaded.put(served)
            try:
                self._serve(served.generator.engine)
                served.generator.engine.close()
            except Exception:
                terminal.write_err(traceback.format_exc())
                self._ended.set()
                self._notify(self._dispatch_end)
                self._on_end()
        self._ended.set()
        # A process that ends just after a thread of MLX is aborted: this one stays.
        threading.Event().wait()

    def _serve(self, engine: Engine) -> None:
        """Run until `stop`.

        Raises:
            EngineFailed: several times in a row.
        """
        failures = 0
        while True:
            try:
                if not self._run_commands(engine):
                    return
                outputs = engine.step()
            except Exception as error:
                failures += 1
                if failures == MAX_FAILURES:
                    raise EngineFailed from error
                terminal.write_err(traceback.format_exc())
                # The exception may have left anything of the requests.
                failed, self._active = self._active, set()
                for request in failed:
                    engine.abort(request)
                self._notify(self._dispatch_failure, failed)
                continue
            failures = 0
            self._publish(engine)
            if outputs:
                self._active -= {o.request for o in outputs if o.is_last}
                self._notify(self._dispatch, outputs)

    def _run_commands(self, engine: Engine) -> bool:
        """Do what was asked for, and wait while there is no request."""
        start, beat = time.monotonic(), engine.beat_seconds
        while True:
            try:
                # Not for ever: memory is returned after a while without requests.
                seconds = beat or (None if self._is_trimmed else TRIM_SECONDS)
                command = self._commands.get(block=engine.idle, timeout=seconds)
            except queue.Empty:
                if not engine.idle:
                    return True
                if not self._is_trimmed and time.monotonic() - start >= TRIM_SECONDS:
                    # Return free memory to the system.
                    mx.clear_cache()
                    malloc.trim()
                    self._is_trimmed = True
                if beat:
                    engine.step()
                continue
            start, self._is_trimmed = time.monotonic(), False
            if command is None:
                return False
            command(engine)
            if engine.idle:
                self._publish(engine)

    def _publish(self, engine: Engine) -> None:
        now = time.monotonic()
        if now - self._published < PUBLISH_SECONDS and not engine.idle:
            return
        self._published = now
        stats, prefixes = engine.stats, engine.prefixes
        self.state = EngineState(
            running=engine.num_running,
            waiting=engine.num_waiting,
            kv_bytes=engine.nbytes + (prefixes.nbytes if prefixes else 0),
            kv_memory=engine.memory,
            preemptions=engine.preemptions,
            draft_rounds=stats.rounds,
            draft_tokens=stats.drafted,
            accepted_tokens=sum(stats.accepted),
        )

    def _notify(self, function: Callable, *arguments: Any) -> None:
        if self._loop is None:
            return  # no request has come
        # The loop may be closed, and then nobody waits.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    # On the event loop

    def _dispatch(self, outputs: Sequence[TokenOutput]) -> None:
        groups: dict[Subscription, list[TokenOutput]] = {}
        for output in outputs:
            if subscription := self._subscriptions.get(output.request):
                groups.setdefault(subscription, []).append(output)
                if output.is_last:
                    del self._subscriptions[output.request]
        for subscription, group in groups.items():
            subscription.outputs.put_nowait(group)

    def _dispatch_end(self) -> None:
        """Nothing that is open, or comes, will be answered."""
        self._has_failed = True
        self._dispatch_failure({*self._subscriptions})
        for future in self._calls:
            _fail(future, EngineFailed())

    def _dispatch_failure(self, requests: set[GenerationRequest]) -> None:
        subscriptions = {self._subscriptions.pop(r, None) for r in requests}
        for subscription in subscriptions - {None}:
            subscription.outputs.put_nowait(EngineFailed())


def _set(future: asyncio.Future, result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future, error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
