"""`lmx serve` as a process: options, signals, exit codes."""

import json
import os
import signal
import socket
import time

import httpx
import pytest
from lmx.errors import UserError
from lmx.serving.server import ModelServer
from raw_http import connect, request
from tiny_generators import Generator, byte_tokenizer, tiny, write_folder
from tiny_server import COMPLETIONS, TEMPLATE
from warm import Process, run

PROGRAM = "import sys; from lmx.cli.main import main; sys.exit(main())"
LONG = {"prompt": "Hello", "max_tokens": 380, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint whose generation_config.json samples."""
    path = tmp_path_factory.mktemp("served")
    write_folder(Generator(tiny("llama"), byte_tokenizer(template=TEMPLATE)), path)
    settings = {"temperature": 0.9, "top_k": 30, "do_sample": True}
    (path / "generation_config.json").write_text(json.dumps(settings))
    return path


class Served:
    """A running `lmx serve`."""

    def __init__(self, folder, *options, **environment):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        arguments = ["serve", str(folder), "--port", str(self.port), *options]
        self.process = Process(PROGRAM, *arguments, env=os.environ | environment)
        end = time.monotonic() + 60
        while not self.is_open():
            assert self.process.poll() is None, self.process.result(1)
            assert time.monotonic() < end
            time.sleep(0.05)

    def is_open(self):
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def post(self, **body):
        return httpx.post(f"{self.url}{COMPLETIONS}", json=body, timeout=30)

    def signal(self, kind=signal.SIGTERM):
        os.kill(self.process.pid, kind)

    def end(self):
        """The exit code and the log."""
        result = self.process.result(30)
        return result.returncode, result.stderr


def test_a_signal_drains_and_a_second_one_ends(folder):
    for kind in (signal.SIGTERM, signal.SIGINT):
        served = Served(folder)
        with connect(served.port) as stream, connect(served.port) as idle:
            stream.sendall(request(COMPLETIONS, LONG))
            data = stream.recv(2000)
            served.signal(kind)
            while part := stream.recv(65536):
                data += part
            assert b"data: [DONE]" in data
            assert b'"finish_reason": "length"' in data
            # One without a request does not keep it.
            assert idle.recv(10) == b""
        code, log = served.end()
        assert code == 0, log
        assert "finish=length" in log
    served = Served(folder)
    with connect(served.port) as stream:
        stream.sendall(request(COMPLETIONS, LONG))
        stream.recv(2000)
        served.signal()
        time.sleep(0.05)
        served.signal()
        assert served.end()[0] in (130, 0)
        data = b"".join(iter(lambda: stream.recv(65536), b""))
        assert b"[DONE]" not in data


def test_options(folder):
    options = ["--served-model-name", "small", "--max-tokens", "5"]
    options += [
        "--max-body",
        "0.01",
        "--max-requests",
        "2",
        "--prefix-cache",
        "0.01",
    ]
    options += ["--draft-model", "prompt-lookup"]
    served = Served(folder, *options, LMX_API_KEY="from the environment")
    headers = {"Authorization": "Bearer from the environment"}

    def post(**body):
        url = f"{served.url}{COMPLETIONS}"
        return httpx.post(url, json=body, headers=headers, timeout=30)

    assert httpx.get(f"{served.url}/v1/models").status_code == 401
    models = httpx.get(f"{served.url}/v1/models", headers=headers).json()["data"]
    assert [model["id"] for model in models] == ["small"]
    assert post(prompt="x" * 11_000).status_code == 413
    assert post(prompt="x", n=3).status_code == 400
    # generation_config.json samples, a request may not.
    texts = {
        seed: post(prompt="ab" * 20, seed=seed, ignore_eos=True).json()
        for seed in (1, 2, 3)
    }
    assert len({t["choices"][0]["text"] for t in texts.values()}) > 1
    assert texts[1]["usage"]["completion_tokens"] == 5
    assert texts[1]["model"] == "small"
    greedy = {
        post(prompt="ab", seed=seed, temperature=0).json()["choices"][0]["text"]
        for seed in (1, 2)
    }
    assert len(greedy) == 1
    served.signal()
    assert served.end()[0] == 0


def test_prefixes_outlive_a_restart(folder, tmp_path):
    options = ["--prefix-cache-dir", str(tmp_path / "prefixes")]
    body = {"prompt": "A prompt. " * 12, "max_tokens": 8, "temperature": 0}
    answers = []
    for _ in range(2):
        served = Served(folder, *options)
        answers.append(served.post(**body).json())
        served.signal()
        assert served.end()[0] == 0
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
    length = answers[0]["usage"]["prompt_tokens"]
    assert cached == [0, length - 1]
    first, second = (answer["choices"][0]["text"] for answer in answers)
    assert first == second


def test_accepted_draft_tokens(folder):
    served = Served(folder, "--draft-model", "prompt-lookup", "--num-draft-tokens", "4")
    body = {"prompt": [70, 80, 90] * 20, "max_tokens": 60, "ignore_eos": True}
    body |= {"temperature": 0, "logit_bias": {"70": 50, "80": 49.9}}
    usage = served.post(**body).json()["usage"]
    accepted = usage["completion_tokens_details"]["accepted_prediction_tokens"]
    assert 0 < accepted < usage["completion_tokens"] == 60
    metrics = httpx.get(f"{served.url}/metrics").text
    (line,) = [
        line
        for line in metrics.splitlines()
        if line.startswith("lmx:spec_decode_num_accepted_tokens_total")
    ]
    assert float(line.rsplit(" ", 1)[1]) >= accepted
    served.signal()
    assert served.end()[0] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--port", "{used}"],
            "cannot listen on 127.0.0.1:{used}: address already in use",
        ),
        (["--port", "70000"], "cannot listen on 127.0.0.1:70000"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
        (["--max-requests", "0"], "--max-requests must be 1 or more"),
        (["--timeout", "nan"], "--timeout"),
        (["--kv-bits", "7"], "--kv-bits"),
        (["--max-kv-size", "0"], "--max-kv-size must be 64 or more, got 0"),
        (["--max-body", "nan"], "--max-body must be more than 0"),
        (["--kv-memory", "-1"], "--kv-memory must be more than 0"),
        (["--prefix-cache", "inf"], "--prefix-cache must be 0 or more"),
        (["--prefix-cache-disk", "1"], "--prefix-cache-disk needs --prefix-cache-dir"),
        (
            ["--prefix-cache-dir", "p", "--prefix-cache-disk", "0"],
            "--prefix-cache-disk must be more than 0",
        ),
        (
            ["--prefix-cache-dir", "p", "--tensor-parallel", "2"],
            "--prefix-cache-dir does not work with --tensor-parallel",
        ),
        (["--api-key", ""], "--api-key is empty"),
        (["--host", "x" * 80], "label too long"),
        (["--port", "0", "--draft-model", "nowhere"], "nowhere"),
        (["--port", "0", "--kv-bits", "8"], "no group size divides the head dimension"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_server_that_does_not_start(folder, options, words):
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        port = str(used.getsockname()[1])
        options = [option.replace("{used}", port) for option in options]
        result = run(PROGRAM, "serve", str(folder), *options)
    assert result.returncode == 2, result
    assert words.replace("{used}", port) in result.stderr
    assert "Traceback" not in result.stderr


def test_two_servers_share_no_port(monkeypatch):
    """On macOS SO_REUSEADDR lets a second one have it, as SO_REUSEPORT on Linux."""
    monkeypatch.setattr(socket, "SO_REUSEADDR", socket.SO_REUSEPORT)
    with socket.socket() as used:
        used.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        used.bind(("127.0.0.1", 0))
        used.listen()
        port = used.getsockname()[1]
        with pytest.raises(UserError, match="address already in use"):
            ModelServer(None, host="127.0.0.1", port=port, service=None, http=None)


def test_a_folder_that_is_no_model(tmp_path):
    result = run(PROGRAM, "serve", str(tmp_path), "--port", "0")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
