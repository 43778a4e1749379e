"""mlx-lm programs run on the exports of a run."""

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
    """A function that runs an mlx-lm program in process and returns its output."""

    def run(main, *arguments):
        monkeypatch.setattr(sys, "argv", ["program", *map(str, arguments)])
        main()
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("folder", ["model", "hf"])
def test_generate_prints_two_tokens(run, program, folder):
    from mlx_lm.generate import main

    arguments = ["--model", run / folder, "--prompt", "hello", "--max-tokens", 2]
    assert "Generation: 2 tokens" in program(main, *arguments, "--temp", 0)


def test_fuse_equals_our_fused_model(run, base, program, tmp_path):
    from mlx_lm.fuse import main

    fused = tmp_path / "fused"
    arguments = ["--model", base, "--adapter-path", run / "adapters"]
    program(main, *arguments, "--save-path", fused)
    logits = mlx_lm.load(str(fused))[0](TOKENS)
    expected = mlx_lm.load(str(run / "stages/1-train/dense"))[0](TOKENS)
    base_logits = mlx_lm.load(str(base))[0](TOKENS)
    distance, base_distance = (
        mx.abs(logits - reference).max().item() for reference in (expected, base_logits)
    )
    assert distance < 0.02
    assert base_distance > 10 * distance


def test_perplexity_equals_that_of_the_dense_export(run):
    from mlx_lm.perplexity import eval_ppl

    perplexities = [
        eval_ppl(mlx_lm.load(str(run / folder))[0], TOKENS)[0]
        for folder in ("model", "hf")
    ]
    assert perplexities[0] == pytest.approx(perplexities[1], rel=1e-2)
    assert perplexities[0] > 1


def test_evaluate_scores_a_completion(run):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from mlx_lm.evaluate import MLXLM

    model = MLXLM(str(run / "model"))
    request = Instance("loglikelihood", {}, ("Count to 3.", " 1 2 3"), 0)
    [(score, greedy)] = model.loglikelihood([request])
    assert score < 0
    assert greedy in (True, False)


def test_server_answers_a_chat(run):
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
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        response = request(f"{address}/v1/chat/completions", body)
    finally:
        server.kill()
        server.communicate()
    assert response["usage"]["completion_tokens"] == 2
    assert isinstance(response["choices"][0]["message"]["content"], str)


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
    http_request = urllib.request.Request(
        address, data, {"Content-Type": "application/json"}
    )
    # Loopback requests must not use a proxy.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(http_request, timeout=SECONDS) as response:
        return json.loads(response.read())
