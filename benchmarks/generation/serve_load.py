"""Servers of one model under load: `lmx serve`, mlx_lm.server and llama.cpp.

    python benchmarks/generation/serve_load.py MODEL --gguf MODEL.gguf \\
        --llama-python venv/bin/python

inference-perf sends the same requests to one server after the other: Poisson arrivals
at parts of the rate that saturates `lmx serve`, then requests that share a long prompt.
Both MLX servers have the same BLAS, and a model whose numbers are float32, because
16-bit products are slow on CPUs. llama.cpp's server is that of llama-cpp-python.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from lmx.evaluation.server_load import COLUMNS, LoadPlan, cells, measure_load

MLX_LM = "from lmx import cpu; cpu.enable(); from mlx_lm.server import main; main()"
LMX = "import sys; from lmx.cli.main import main; sys.exit(main(sys.argv[1:]))"
SECONDS_TO_START = 600
CLIENTS = 16
ROW = "{:10}{:>12}{:>9}{:>7}{:>26}{:>26}{:>12}{:>10}{:>9}{:>13}"


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        with_float32_scales(arguments.model, model)
        servers = [name for name in arguments.servers.split(",") if name]
        with served("lmx", model, arguments) as (url, name):
            rate = saturation(plan(url, name, model, arguments))
        rates = [share * rate for share in arguments.shares]
        print(f"lmx serve is saturated at {rate:.2f} requests a second")
        print(ROW.format("server", *COLUMNS))
        for server in servers:
            with served(server, model, arguments) as (url, name):
                wanted = plan(url, name, model, arguments)
                wanted = replace(wanted, rates=rates, concurrencies=[])
                for row in measure_load(wanted):
                    show(server, row)
                shared = replace(
                    wanted,
                    rates=[],
                    concurrencies=[CLIENTS],
                    requests=-(-arguments.shared_requests // CLIENTS),
                    shared_prefix=arguments.shared_prefix,
                )
                for row in measure_load(shared) if shared.requests else []:
                    show(server, row)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="folder of an MLX checkpoint")
    parser.add_argument("--servers", default="lmx,mlx-lm,llama.cpp")
    parser.add_argument("--gguf", type=Path, help="the model for llama.cpp")
    parser.add_argument("--llama-python", default=sys.executable)
    parser.add_argument("--context", type=int, default=2048, help="of llama.cpp")
    parser.add_argument("--shares", type=_numbers, default=[0.5, 1.0, 2.0])
    parser.add_argument("--duration", type=int, default=30, help="of every rate")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--shared-prefix", type=int, default=500)
    parser.add_argument("--shared-requests", type=int, default=200, help="0 = none")
    parser.add_argument("--options", default="", help="further ones of lmx serve")
    return parser.parse_args()


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def with_float32_scales(source: Path, target: Path) -> None:
    """A copy of a checkpoint whose floating-point tensors are float32."""
    import mlx.core as mx

    target.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, target)
            continue
        tensors = {
            name: value.astype(mx.float32)
            if mx.issubdtype(value.dtype, mx.floating)
            else value
            for name, value in mx.load(str(file)).items()
        }
        mx.save_safetensors(str(target / file.name), tensors, {"format": "mlx"})
    config = json.loads((target / "config.json").read_text())
    config |= {"torch_dtype": "float32", "dtype": "float32"}
    (target / "config.json").write_text(json.dumps(config))


def command(server: str, model: Path, port: int, arguments) -> tuple[list[str], str]:
    """The program of a server, and the name of the model there."""
    if server == "lmx":
        options = arguments.options.split()
        options = ["--served-model-name", "bench", "--port", str(port), *options]
        return [sys.executable, "-c", LMX, "serve", str(model), *options], "bench"
    if server == "mlx-lm":
        options = ["--model", str(model), "--port", str(port), "--log-level", "ERROR"]
        return [sys.executable, "-c", MLX_LM, *options], str(model)
    options = ["--model", str(arguments.gguf), "--model_alias", "bench"]
    options += [
        "--port",
        str(port),
        "--n_ctx",
        str(arguments.context),
        "--cache",
        "true",
    ]
    # Otherwise a new request ends the stream of another.
    options += ["--interrupt_requests", "false"]
    return [arguments.llama_python, "-m", "llama_cpp.server", *options], "bench"


@contextmanager
def served(server: str, model: Path, arguments) -> Iterator[tuple[str, str]]:
    """The URL of a running server, and the name of its model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program, name = command(server, model, port, arguments)
    process = subprocess.Popen(
        program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(process, url)
        _complete(url, name)
        yield url, name
    finally:
        process.terminate()  # `lmx serve` keeps its prefixes then
        process.wait()


def _wait(process: subprocess.Popen, url: str) -> None:
    end = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/v1/models", timeout=5).read()
            return
        except OSError:
            time.sleep(0.5)
    sys.exit(f"the server at {url} does not start")


def _complete(url: str, name: str) -> None:
    """A first completion, with which a server may compile its kernels."""
    body = {"model": name, "prompt": "Hello", "max_tokens": 8}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), headers
    )
    urllib.request.urlopen(request, timeout=SECONDS_TO_START).read()


def plan(url: str, name: str, model: Path, arguments) -> LoadPlan:
    """What a server gets, without its loads."""
    return LoadPlan(
        url=url,
        model=name,
        tokenizer=str(model),
        rates=[],
        concurrencies=[],
        seconds=arguments.duration,
        requests=4,
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
    )


def saturation(wanted: LoadPlan) -> float:
    """Requests a second that a server answers to many clients."""
    (row,) = measure_load(replace(wanted, concurrencies=[CLIENTS]))
    return row["requests_per_second"]


def show(server: str, row: dict) -> None:
    """Print a line of the table."""
    print(ROW.format(server, *cells(row)), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
