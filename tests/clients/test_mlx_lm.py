"""mlx-lm's own programs, on what a run exports."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

import mlx.core as mx
import mlx_lm
import pytest
from processes import free_ports

TOKENS = mx.random.randint(3, 300, (2, 12), key=mx.random.key(0))
SECONDS = 60


@pytest.fixture
def program(monkeypatch, capsys):
    """A function that runs a program of mlx-lm here, and gives what it prints."""

    def run(main, *arguments):
        monkeypatch.setattr(sys, "argv", ["program", *map(str, arguments)])
        main()
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("folder", ["model", "hf"])
def test_generate(run, program, folder):
    from mlx_lm.generate import main

    arguments = ["--model", run / folder, "--prompt", "hello", "--max-tokens", 2]
    assert "Generation: 2 tokens" in program(main, *arguments, "--temp", 0)


def test_fuse(run, base, program, tmp_path):
    from mlx_lm.fuse import main

    fused = tmp_path / "fused"
    arguments = ["--model", base, "--adapter-path", run / "adapters"]
    program(main, *arguments, "--save-path", fused)
    found = mlx_lm.load(str(fused))[0](TOKENS)
    ours = mlx_lm.load(str(run / "stages/1-train/dense"))[0](TOKENS)
    plain = mlx_lm.load(str(base))[0](TOKENS)
    near, far = (mx.abs(found - other).max().item() for other in (ours, plain))
    assert near < 0.02
    assert far > 10 * near


def test_perplexity(run):
    from mlx_lm.perplexity import eval_ppl

    found = [
        eval_ppl(mlx_lm.load(str(run / folder))[0], TOKENS)[0]
        for folder in ("model", "hf")
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-2)
    assert found[0] > 1


def test_evaluate_s_wrapper(run):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from mlx_lm.evaluate import MLXLM

    model = MLXLM(str(run / "model"))
    request = Instance("loglikelihood", {}, ("Count to 3.", " 1 2 3"), 0)
    [(score, greedy)] = model.loglikelihood([request])
    assert score < 0
    assert greedy in (True, False)


def test_server(run):
    [port] = free_ports(1)
    address = f"http://127.0.0.1:{port}"
    options = ["--model", run / "model", "--host", "127.0.0.1", "--port", port]
    server = subprocess.Popen(
        [sys.executable, "-m", "mlx_lm", "server", *map(str, options)],
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(f"{address}/health", server)
        asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        answer = request(f"{address}/v1/chat/completions", asked)
    finally:
        server.kill()
        server.communicate()
    assert answer["usage"]["completion_tokens"] == 2
    assert isinstance(answer["choices"][0]["message"]["content"], str)


def wait_for(address, server):
    end = time.monotonic() + SECONDS
    while server.poll() is None and time.monotonic() < end:
        try:
            return request(address)
        except urllib.error.URLError:
            time.sleep(0.1)
    server.kill()
    return pytest.fail(server.communicate()[1])


def request(address, body=None):
    data = json.dumps(body).encode() if body else None
    sent = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    # No proxy between this machine and itself.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(sent, timeout=SECONDS) as answer:
        return json.loads(answer.read())
