"""One request does not stop the others: large prompts, slow grammars, foreign pages."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
from lmx.errors import UserError
from lmx.serving import server as server_module
from lmx.serving import service
from raw_http import connect, head, read_all, request
from tiny_server import CHAT, COMPLETIONS

REGEX = {"structured_outputs": {"regex": "a+"}}


class Blocked:
    """A function whose calls wait where a condition on their first argument holds."""

    def __init__(self, function, condition):
        self._function, self._condition = function, condition
        self.waiting, self.go = [], threading.Event()

    def __call__(self, first, *arguments, **options):
        if self._condition(first):
            self.waiting.append(first)
            assert self.go.wait(20)
        return self._function(first, *arguments, **options)

    @contextmanager
    def by(self, server, body):
        """While a request waits here; gives a function that makes the client leave."""
        with connect(server.port) as connection:
            count = len(self.waiting)
            connection.sendall(request(COMPLETIONS, body))
            until(lambda: len(self.waiting) > count)
            yield connection.close
            self.go.set()
            with suppress(OSError):
                connection.close()


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_texts_that_cannot_fit_are_not_encoded(start):
    server = start()
    calls, encode = [], server.served.generator.tokenizer.encode

    def counted(text, **options):
        calls.append(text)
        return encode(text, **options)

    server.served.generator.tokenizer.encode = counted
    long = "a" * 100_000  # of 400 positions
    part = [{"type": "text", "text": long}]
    for path, body in (
        (COMPLETIONS, {"prompt": long}),
        (COMPLETIONS, {"prompt": ["x", long]}),
        (CHAT, {"messages": [{"role": "user", "content": long}]}),
        (CHAT, {"messages": [{"role": "user", "content": part}]}),
    ):
        status, error = server.refused(path, body)
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert error["param"] == next(iter(body))
    assert not calls
    server.complete("a" * 300)
    assert calls == ["a" * 300]


def test_short_texts_do_not_wait_for_long_ones_and_grammars(start, monkeypatch):
    monkeypatch.setattr(service, "LONG_TEXT", 100)
    server = start()
    generator = server.served.generator
    encode = Blocked(generator.tokenizer.encode, lambda text: len(text) > 100)
    compile_ = Blocked(generator.grammars.compile, lambda grammar: True)
    generator.tokenizer.encode, generator.grammars.compile = encode, compile_
    grammar = {"prompt": "a"} | REGEX
    with encode.by(server, {"prompt": "a" * 200}), compile_.by(server, grammar):
        assert server.complete("short")


@pytest.mark.parametrize("body", [{"prompt": "b" * 50}, {"prompt": "a"} | REGEX])
def test_requests_that_are_prepared_are_open_until_their_client_leaves(start, body):
    server = start(max_requests=3)
    generator = server.served.generator
    encode = Blocked(generator.tokenizer.encode, lambda text: "b" in text)
    compile_ = Blocked(generator.grammars.compile, lambda grammar: True)
    generator.tokenizer.encode, generator.grammars.compile = encode, compile_
    blocked = encode if len(body) == 1 else compile_
    with blocked.by(server, body) as leave, connect(server.port) as other:
        other.sendall(request(COMPLETIONS, body))
        until(
            lambda: server.post(COMPLETIONS, {"prompt": "b", "n": 2}).status_code == 429
        )
        # The second one waits for the first: it leaves, and never runs.
        other.close()
        leave()
        blocked_calls = len(blocked.waiting)
        metrics = 'lmx:request_errors_total{,status="499"}'
        until(lambda: server.metrics().get(metrics) == 2)
        blocked.go.set()
        assert server.complete("a", n=3)
    assert len(blocked.waiting) == blocked_calls == 1


def test_the_time_of_a_request_counts_while_it_is_prepared(start):
    server = start(timeout=0.2)
    compile_ = Blocked(server.served.generator.grammars.compile, lambda grammar: True)
    server.served.generator.grammars.compile = compile_
    status, error = server.refused(COMPLETIONS, {"prompt": "a"} | REGEX)
    assert (status, error["code"]) == (408, "timeout")
    compile_.go.set()


# Names


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:8080"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost:1"}, 200),
        ({"Host": "[::1]:8080"}, 200),
        ({"Host": "lmx.localhost"}, 200),
        ({"Host": "models.internal"}, 200),
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Origin": "https://app.example"}, 200),
    ],
)
@pytest.mark.parametrize("key", [None, "sk-secret"])
def test_other_names_than_this_machine(start, headers, status, key):
    allowed = ("https://app.example", "http://models.internal:80")
    http = {"api_key": key, "adapter_loading": True, "allowed_origins": allowed}
    server = start(http=http)
    headers = headers | {"Authorization": "Bearer sk-secret"}
    expected = 200 if key else status
    for path in ("/", "/health", "/metrics", "/v1/models"):
        assert server.client.get(path, headers=headers).status_code == expected
    response = server.post(COMPLETIONS, {"prompt": "x"}, headers=headers)
    assert response.status_code == expected
    if expected == 403:
        assert "--allowed" in response.json()["error"]["message"]


# Ends


def test_half_sent_requests_do_not_hold_a_drain(start, monkeypatch):
    monkeypatch.setattr(server_module, "DRAIN_SECONDS", 0.2)
    server = start()
    with connect(server.port) as connection:
        connection.sendall(head(COMPLETIONS, 1000) + b'{"pro')
        until(lambda: _waits_for_body(server))
        begin = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - begin < 5
        assert read_all(connection) == b""


def _waits_for_body(server):
    connections = server.server._server.server_state.connections
    return any(each.cycle and each.cycle.more_body for each in connections)


def test_a_stream_that_fails_is_logged_and_counted_as_that(start, capfd):
    server = start(max_tokens=390)
    step, count = server.engine.step, iter(range(1000))

    def failing():
        if next(count) > 5:
            raise UserError("broken")
        return step()

    server.engine.step = failing
    body = {"prompt": "x", "stream": True, "ignore_eos": True}
    with server.client.stream("POST", COMPLETIONS, json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    assert (
        json.loads(lines[-2].removeprefix("data: "))["error"]["type"] == "server_error"
    )
    assert lines[-1] == "data: [DONE]"
    assert server.metrics()['lmx:request_errors_total{,status="500"}'] == 1
    until(lambda: f"POST {COMPLETIONS} 500" in capfd.readouterr().err)


def test_a_record_of_the_log_is_one_line(start, capfd):
    server = start(http={"log_requests": True})
    server.complete("a\u2028b\u0085c\u202ed é")
    lines = capfd.readouterr().err.splitlines()
    record = next(line for line in lines if line.startswith("{"))
    assert json.loads(record)["request"] == {"prompt": "a\u2028b\u0085c\u202ed é"}
    assert "é" in record


def test_short_requests_beside_large_ones(start):
    """The slowest of some short requests, while clients send large ones and leave."""
    server, stop = start(), threading.Event()
    large = {"prompt": "a" * 3_000_000}

    def send():
        while not stop.is_set():
            server.post(COMPLETIONS, large)

    with ThreadPoolExecutor(3) as pool:
        tasks = [pool.submit(send) for _ in range(3)]
        seconds = []
        for _ in range(5):
            begin = time.monotonic()
            server.complete("short", max_tokens=1)
            seconds.append(time.monotonic() - begin)
        stop.set()
        [task.result() for task in tasks]
    assert sorted(seconds)[2] < 1, seconds
