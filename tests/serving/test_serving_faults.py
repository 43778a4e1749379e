"""Clients that leave, an engine that fails, a server that ends."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from lmx.errors import FAILED
from lmx.serving.engine_thread import MAX_FAILURES
from lmx.serving.service import CompletionService
from raw_http import connect, request
from test_limits_of_requests import Hold
from tiny_server import CHAT, COMPLETIONS, load

pytestmark = pytest.mark.fused

LONG = {"prompt": "Hello", "max_tokens": 390, "ignore_eos": True}
CHATTING = {"messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True}


def _fail_steps(server, count):
    """Make the next steps of an engine fail in their middle."""
    engine, step, left = server.engine, server.engine._step, [count]

    def failing():
        if left[0]:
            left[0] -= 1
            step()
            raise RuntimeError("a fault of the test")
        return step()

    engine._step = failing


# Clients


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_closed_connection_aborts_its_request(server, path, stream):
    steps, step = [], server.engine.step
    slow = threading.Event()

    def counted():
        steps.append(1)
        slow.wait(0.01)
        return step()

    server.engine.step = counted
    body = (LONG if path == COMPLETIONS else CHATTING | {"max_tokens": 300}) | {"n": 2}
    aborted = server.metrics().get(ABORTED, 0)
    connection = connect(server.port)
    connection.sendall(request(path, body | {"stream": stream}))
    while len(steps) < 5:
        time.sleep(0.001)
    connection.close()
    count = len(steps)
    server.until_idle()
    server.engine.step = step
    # Of 300 steps that the request had.
    assert len(steps) - count < 40
    while server.metrics().get(ABORTED, 0) < aborted + 2:
        time.sleep(0.01)
    metrics = server.metrics()
    assert metrics["lmx:num_requests_running{}"] == 0
    assert metrics["lmx:num_requests_waiting{}"] == 0


ABORTED = 'lmx:request_success_total{finished_reason="abort",}'


def test_neighbours_of_an_aborted_request_keep_their_tokens(server):
    body = {"prompt": "Tokens", "max_tokens": 60, "seed": 4, "temperature": 1.0}
    alone = server.complete(**body)["choices"]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.complete, **body)
        for _ in range(6):
            connection = connect(server.port)
            connection.sendall(request(COMPLETIONS, LONG | {"stream": True}))
            assert connection.recv(10)
            connection.close()
        assert answer.result()["choices"] == alone
    server.until_idle()


# The engine


def test_a_failed_step_fails_its_requests_only(start, capfd):
    server = start()
    body = {"prompt": "Tokens", "max_tokens": 20}
    alone = server.complete(**body)["choices"]
    for stream in (False, True):
        hold = Hold(server)
        _fail_steps(server, 1)
        with ThreadPoolExecutor(3) as pool:
            posts = [
                pool.submit(server.post, COMPLETIONS, LONG | {"stream": stream, "n": 2})
                for _ in range(3)
            ]
            hold.until(lambda: server.thread.open_requests == 6)
            hold.release()
            answers = [post.result() for post in posts]
        codes = [answer.status_code for answer in answers]
        # One that came too late for the step has its tokens.
        assert codes.count(500) >= 1
        assert {*codes} <= {200, 500}
        for answer in answers:
            if answer.status_code == 500:
                assert answer.json()["error"]["type"] == "server_error"
                assert "test" not in answer.text, "a fault is for the log"
        assert server.complete(**body)["choices"] == alone
        assert server.client.get("/health").status_code == 200
    server.until_idle()
    assert "a fault of the test" in capfd.readouterr().err


def test_an_error_in_a_stream_is_its_last_event_but_the_end(start):
    server = start()
    with server.client.stream(
        "POST", COMPLETIONS, json=LONG | {"stream": True}
    ) as response:
        lines = response.iter_lines()
        next(lines)
        _fail_steps(server, 1)
        lines = [line for line in lines if line]
    assert '"type": "server_error"' in lines[-2]
    assert lines[-1] == "data: [DONE]"
    assert server.complete()


def test_failures_in_a_row_end_the_server(start):
    server = start()
    _fail_steps(server, MAX_FAILURES)
    for _ in range(MAX_FAILURES):
        assert server.refused(COMPLETIONS, LONG)[0] == 500
    assert server.wait() == FAILED
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


def test_failures_between_steps_do_not_add_up(start):
    server = start()
    for _ in range(MAX_FAILURES + 1):
        _fail_steps(server, 1)
        assert server.refused(COMPLETIONS, LONG)[0] == 500
        assert server.complete()
    assert server.stop() == 0


def test_a_request_that_comes_with_the_last_failure_is_answered(start):
    """It waited for a thread that had ended."""
    server = start()
    engine, entered, go = server.engine, threading.Event(), threading.Event()

    def failing():
        entered.set()
        go.wait(20)
        raise RuntimeError("a fault of the test")

    with ThreadPoolExecutor(4) as pool:
        engine._step = failing
        for _ in range(MAX_FAILURES):
            entered.clear(), go.clear()
            first = pool.submit(server.post, COMPLETIONS, LONG)
            entered.wait(20)
            late = pool.submit(server.post, COMPLETIONS, LONG)
            while server.thread.open_requests < 2:
                time.sleep(0.001)
            go.set()
            assert first.result().status_code == 500
            # The late one fails in the next step, or with the thread.
            entered.wait(5), go.set()
            assert late.result().status_code == 500
            if not server.thread.alive:
                break
    assert server.wait() == FAILED


def test_an_exception_between_two_steps(start):
    """The thread ended, and its port lived on."""
    server = start()
    body = {"prompt": "Tokens", "max_tokens": 20}
    alone = server.complete(**body)["choices"]
    require = server.engine.require_memory

    def failing(request):
        server.engine.require_memory = require
        raise RuntimeError("a fault of the test")

    server.engine.require_memory = failing
    assert server.refused(COMPLETIONS, body)[0] == 500
    assert server.complete(**body)["choices"] == alone
    # An abort that fails ends the server.
    hold = Hold(server)
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(server.post, COMPLETIONS, body)
        hold.until(lambda: server.thread.open_requests == 1)
        server.engine.abort = server.engine._step = None
        hold.release()
        assert answer.result().status_code == 500
    assert server.wait() == FAILED


def test_a_row_without_numbers_leaves_its_neighbours(start):
    def make():
        import mlx.core as mx
        from lmx.generation.generator import Generator
        from tiny_generators import byte_tokenizer, tiny

        model = tiny("qwen3")
        weight = model.model.embed_tokens.weight
        weight[7] = mx.nan
        mx.eval(weight)
        return Generator(model, byte_tokenizer())

    server = start(load(make))
    sound = {"prompt": [5, 6, 8], "max_tokens": 24}
    alone = server.complete(**sound)["choices"]
    hold = Hold(server)
    with ThreadPoolExecutor(3) as pool:
        prompts = ([5, 6, 8], [5, 7, 8], [5, 6, 8])
        answers = [
            pool.submit(server.post, COMPLETIONS, sound | {"prompt": prompt})
            for prompt in prompts
        ]
        hold.until(lambda: server.thread.open_requests == 3)
        hold.release()
        first, broken, last = [answer.result() for answer in answers]
    assert first.json()["choices"] == last.json()["choices"] == alone
    assert broken.status_code >= 400
    assert "NaN" in broken.text


# The end


def test_a_drain_ends_open_streams_whole(start):
    server = start()
    whole = server.complete(**LONG)["choices"][0]["text"]
    with server.client.stream(
        "POST", COMPLETIONS, json=LONG | {"stream": True}
    ) as response:
        lines = response.iter_lines()
        seen = [next(lines)]
        server.server.stop()
        end = time.monotonic() + 10
        while _is_open(server) and time.monotonic() < end:
            time.sleep(0.01)
        assert server.thread.open_requests == 1, "the stream is over too early"
        seen += lines
    import json

    events = [line[6:] for line in seen if line.startswith("data: {")]
    texts = [c["text"] for e in events for c in json.loads(e)["choices"]]
    assert "".join(texts) == whole
    assert seen[-2:] == ["data: [DONE]", ""]
    assert server.wait() == 0


def _is_open(server):
    try:
        connect(server.port).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize("turns", [0, 1])
def test_a_client_may_leave_while_a_token_comes(turns):
    """In this turn of the event loop or in the one before."""

    async def is_cancelled():
        queue = asyncio.Queue()
        outputs = CompletionService._next(None, queue, time.monotonic() + 60)
        task = asyncio.create_task(outputs)
        await asyncio.sleep(0.01)
        queue.put_nowait([])
        for _ in range(turns):
            await asyncio.sleep(0)
        if task.done():
            return True
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(is_cancelled())
