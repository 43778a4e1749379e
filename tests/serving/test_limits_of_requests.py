"""Keys, routes, sizes, times and numbers of requests."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from lmx.serving import app
from lmx.serving import server as server_module
from raw_http import connect, head, read_all, request
from tiny_server import CHAT, COMPLETIONS

KEY = "sk-secret"
BODY = {"prompt": "Hello"}


# Keys


def test_the_key(start, monkeypatch):
    compared = []
    original = app.hmac.compare_digest

    def compare(given, right):
        compared.append(given)
        return original(given, right)

    monkeypatch.setattr(app.hmac, "compare_digest", compare)
    server = start(http={"api_key": KEY})
    wrong = ("", KEY, f"Basic {KEY}", "Bearer", "Bearer sk-secre", f"Bearer {KEY}x")
    for value in wrong:
        response = server.post(COMPLETIONS, BODY, headers={"Authorization": value})
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"
    # A key is compared in constant time, also one of another length.
    assert compared[-1] == f"{KEY}x".encode()
    assert len(compared) == len(wrong)
    for value in (f"Bearer {KEY}", f"bearer {KEY}", f"Bearer  {KEY}"):
        response = server.post(COMPLETIONS, BODY, headers={"Authorization": value})
        assert response.status_code == 200
    for path in ("/v1/models", "/v1/models/tiny"):
        assert server.client.get(path).status_code == 401
    # What a load balancer and Prometheus ask has no secrets.
    for path in ("/health", "/metrics", "/"):
        assert server.client.get(path).status_code == 200


def test_bytes_in_a_key_that_are_no_ascii(start):
    server = start(http={"api_key": "schlüssel"})
    wire = "Bearer schlüssel".encode()
    for value, status in ((wire, 200), (b"Bearer schl\xfcssel", 401)):
        response = server.post(COMPLETIONS, BODY, headers={"Authorization": value})
        assert response.status_code == status


# Routes


def test_routes(server):
    models = server.client.get("/v1/models").json()
    assert models["object"] == "list"
    record = server.client.get("/v1/models/tiny").json()
    assert models["data"] == [record]
    assert record["id"] == "tiny"
    assert record["object"] == "model"
    assert record["max_model_len"] == 400
    messages = [{"role": "user", "content": "x"}]
    for path, body in ((CHAT, {"messages": messages}), (COMPLETIONS, BODY)):
        status, error = server.refused(path, body | {"model": "gpt-4"})
        assert (status, error["param"]) == (404, "model")
        assert error["code"] == "model_not_found"
    assert server.client.get("/v1/models/none/of/it").status_code == 404
    assert server.client.get("/health").json() == {"status": "ok"}
    for path, methods in (("/v1/nothing", "GET POST"), (CHAT, "GET PUT DELETE")):
        for method in methods.split():
            response = server.client.request(method, path)
            expected = 405 if path == CHAT else 404
            assert response.status_code == expected
            assert response.json()["error"]["type"] == "invalid_request_error"
    assert "POST" in server.client.get(CHAT).headers["allow"]
    assert server.client.post("/v1/models", json={}).status_code == 405


def test_metrics_have_the_names_of_vllm(server):
    server.complete(max_tokens=3)
    names = {name.split("{")[0] for name in server.metrics()}
    for name in (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
        *("prompt_tokens_total", "generation_tokens_total", "request_success_total"),
        *("prefix_cache_queries_total", "prefix_cache_hits_total"),
        *("num_preemptions_total", "spec_decode_num_drafts_total"),
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total",
        *("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_sum"),
        "e2e_request_latency_seconds_count",
    ):
        assert f"lmx:{name}" in names


def test_metrics_count(start):
    server = start()
    server.complete("Hello", n=2, max_tokens=5, ignore_eos=True)
    server.refused(COMPLETIONS, {})
    metrics = server.metrics()
    assert metrics["lmx:generation_tokens_total{}"] == 10
    assert metrics["lmx:prompt_tokens_total{}"] == 5
    assert metrics['lmx:request_success_total{finished_reason="length",}'] == 2
    assert metrics['lmx:request_errors_total{,status="400"}'] == 1
    assert metrics["lmx:time_to_first_token_seconds_count{}"] == 2
    assert metrics["lmx:inter_token_latency_seconds_count{}"] == 8
    assert metrics["lmx:num_requests_running{}"] == 0
    # From the request to the last token: to the first one, and between them.
    names = ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
    first, between, whole = (metrics[f"lmx:{n}_seconds_sum{{}}"] for n in names)
    assert first > 0
    assert whole == pytest.approx(first + between)


def test_web_pages_of_other_origins(start):
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    options = {"closed": start(), "open": start(http={"allowed_origins": ("*",)})}
    allowed = {
        name: each.client.options(CHAT, headers=headers).headers.get(
            "access-control-allow-origin"
        )
        for name, each in options.items()
    }
    assert allowed == {"closed": None, "open": "*"}


# Sizes and times


def test_small_packets_do_not_wait(start):
    """Each answer took 40 ms more, until the client had acknowledged its head."""
    server = start()
    with connect(server.port) as connection:
        connection.sendall(head("/health", 0, method="GET"))
        assert connection.recv(100)
        (protocol,) = server.server._server.server_state.connections
        accepted = protocol.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_other_content_types(server):
    # The last one is the negative control.
    kinds = "", "text/plain", "application/x-www-form-urlencoded", "application/jsonx"
    for kind in (*kinds, "Application/JSON; charset=utf-8"):
        response = server.client.post(
            COMPLETIONS, content=b'{"prompt": "x"}', headers={"Content-Type": kind}
        )
        assert response.status_code == (415 if kind in kinds else 200), kind


def test_large_bodies(start):
    server = start(http={"max_body": 1000})
    fits = {"prompt": "x", "user": "y" * 900}
    assert server.post(COMPLETIONS, fits).status_code == 200
    large = {"prompt": "x", "user": "y" * 1100}
    assert server.refused(COMPLETIONS, large)[0] == 413

    def chunks():
        yield b'{"user": "'
        yield from [b"x" * 100] * 20

    headers = {"Content-Type": "application/json"}
    response = server.client.post(COMPLETIONS, content=chunks(), headers=headers)
    assert response.status_code == 413
    # It is refused by its head, before it comes.
    with connect(server.port) as connection:
        connection.sendall(head(COMPLETIONS, 10**12))
        assert b" 413 " in connection.recv(1000)


def test_slow_bodies(start):
    server = start(http={"body_timeout": 0.2})
    with connect(server.port) as connection:
        connection.sendall(head(COMPLETIONS, 1000, "Connection: close") + b'{"pro')
        answer = read_all(connection)
    assert b" 408 " in answer
    assert b"0.2 seconds" in answer
    assert server.complete()


def test_connections_without_a_whole_request_are_closed(start, monkeypatch):
    monkeypatch.setattr(server_module, "STALL_SECONDS", 0.3)
    server = start()
    for sent in (b"", b"POST /v1/chat", b"GET / HTTP/1.1\r\nHost: x\r\nA"):
        with connect(server.port) as connection:
            connection.sendall(sent)
            begin = time.monotonic()
            assert read_all(connection) == b"", sent
            assert 0.2 < time.monotonic() - begin < 5


def test_clients_that_only_send_and_leave_do_not_fill_the_server(start):
    """2,000 connections were taken before the event loop went on with the first."""
    server = start()
    connections = server.server._server.server_state.connections
    data, most, end = request(COMPLETIONS, {"prompt": "a" * 200_000}), [], [False]

    def flood():
        while not end[0]:
            with suppress(OSError), connect(server.port) as connection:
                connection.setblocking(False)
                connection.send(data)

    with ThreadPoolExecutor(3) as pool:
        floods = [pool.submit(flood) for _ in range(3)]
        try:
            for _ in range(5):
                assert server.client.get("/health").status_code == 200
                most.append(len(connections))
        finally:
            end[0] = True
    assert not any(future.exception() for future in floods)
    # Those that wait, in each step from a connection to its end.
    assert max(most) < 512


def test_clients_that_do_not_read_are_closed(start, monkeypatch):
    """They kept their connections, and a server that was to end did not."""
    monkeypatch.setattr(server_module, "STALL_SECONDS", 0.3)
    server = start()
    # What is not read waits in the server, and not in the system.
    server.server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
    body = {"prompt": "x", "logprobs": 20, "n": 4, "max_tokens": 30, "ignore_eos": True}
    for options in ({"stream": True}, {}):
        connection = connect(server.port, buffer=2048)
        connection.sendall(request(COMPLETIONS, body | options))
        end = time.monotonic() + 20
        # Its tokens go on; then its connection goes.
        while len(server.server._server.server_state.connections) == 0:
            assert time.monotonic() < end
        while server.server._server.server_state.connections:
            assert time.monotonic() < end, "the connection is kept"
            time.sleep(0.02)
        server.until_idle()
        connection.close()


def test_the_time_of_a_request(start):
    server = start(timeout=0.3, max_tokens=390)
    step = server.engine.step

    def slow():
        time.sleep(0.05)
        return step()

    server.engine.step = slow
    status, error = server.refused(COMPLETIONS, BODY | {"ignore_eos": True})
    assert (status, error["code"]) == (408, "timeout")
    server.until_idle()
    # In a stream the status is sent, so the last event is the error.
    with server.client.stream(
        "POST", COMPLETIONS, json=BODY | {"ignore_eos": True, "stream": True}
    ) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.status_code == 200
    assert '"code": "timeout"' in lines[-2]
    server.until_idle()


# Numbers


def test_too_many_requests(start):
    server = start(max_requests=4)
    hold = Hold(server)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(server.post, COMPLETIONS, BODY) for _ in range(4)]
        hold.until(lambda: server.thread.open_requests == 4)
        response = server.post(COMPLETIONS, BODY)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] == "overloaded_error"
        hold.release()
        assert [a.result().status_code for a in answers] == [200] * 4
    assert server.post(COMPLETIONS, BODY | {"n": 4}).status_code == 200
    # No time will have room for five.
    for body in (BODY | {"n": 5}, {"prompt": ["a", "b", "c"], "n": 2}):
        status, error = server.refused(COMPLETIONS, body)
        assert (status, error["param"]) == (400, "n")


def test_requests_at_once_do_not_pass_the_limit(start):
    """All were counted before one of them was encoded."""
    server = start(max_requests=4)
    hold = Hold(server)
    encode = server.served.generator.tokenizer.encode

    def slow(*arguments, **options):
        time.sleep(0.01)
        return encode(*arguments, **options)

    server.served.generator.tokenizer.encode = slow
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(server.post, COMPLETIONS, BODY) for _ in range(12)]
        hold.until(lambda: sum(a.done() for a in answers) == 8)
        hold.until(lambda: server.thread.open_requests == 4)
        hold.release()
        codes = sorted(a.result().status_code for a in answers)
    assert codes == [200] * 4 + [429] * 8


class Hold:
    """Keeps an engine from its next step."""

    def __init__(self, server):
        import threading

        self._event, step = threading.Event(), server.engine.step

        def held():
            self._event.wait(20)
            return step()

        server.engine.step = held

    def release(self):
        self._event.set()

    def until(self, condition):
        end = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.005)


def test_a_request_that_does_not_fit_in_memory(start):
    from tiny_server import load

    server = start(load(kv_memory=1_000_000), max_tokens=8)
    server.engine.scheduler.kv_memory = 100_000
    server.served.generator.max_positions = None
    status, error = server.refused(COMPLETIONS, BODY | {"max_tokens": 100_000})
    assert status == 400
    assert "GB" in error["message"]
    assert "tokens fit" in error["message"]
    assert server.complete()


# The log


def test_a_line_of_the_log_has_no_text(start, capfd):
    server = start()
    server.complete("a secret prompt", seed=1)
    server.client.get("/v1/x%0a2026-01-01 forged%1b[31m%e2%80%a8forged")
    server.refused(COMPLETIONS, {"prompt": "x", "a\nforged": 1})
    lines = capfd.readouterr().err.splitlines()
    assert not any("secret" in line for line in lines)
    assert not any(line.startswith(("forged", "2026-01-01")) for line in lines)
    assert sum("\\n" in line for line in lines) == 3 - 1
    (line,) = [line for line in lines if " 200 " in line]
    for part in ("prompt=15", "completion=16", "ttft=", "finish=length", "cmpl-"):
        assert part in line


def test_requests_are_logged_on_word(start, capfd):
    server = start(http={"log_requests": True})
    server.complete("a secret prompt")
    record = capfd.readouterr().err.splitlines()[-1]
    assert '"request": {"prompt": "a secret prompt"}' in record
    assert '"answer": {' in record
    # A stream too, as the same request has it whole.
    body = {"prompt": "Hello", "logprobs": 2, "temperature": 0, "max_tokens": 6}
    whole = server.complete(**body)["choices"]
    server.stream(COMPLETIONS, body)
    # The client has the whole stream before it is logged.
    text, end = "", time.monotonic() + 20
    while not text.endswith("}\n") and time.monotonic() < end:
        text += capfd.readouterr().err
    logged = json.loads(text.splitlines()[-1])["answer"]["choices"]
    assert logged == whole
