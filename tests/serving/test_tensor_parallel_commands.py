"""`lmx generate` and `lmx serve` answer with `--tensor-parallel` as without it."""

import json
import os
import signal
import time

import httpx
import pytest
from processes import free_ports, hostfile, in_ring, wait_for_listener
from tiny_generators import Generator, byte_tokenizer, tiny, write_folder
from tiny_server import TEMPLATE
from warm import Process, run, warm_up

PROGRAM = "import sys; from lmx.cli.main import main; sys.exit(main())"
TWO = "--tensor-parallel", "2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_folder(Generator(tiny("llama"), byte_tokenizer(template=TEMPLATE)), path)
    return path


def generate(folder, *options):
    """What one process prints."""
    result = run(PROGRAM, "generate", str(folder), *options)
    assert result.returncode == 0, result.stderr
    return result.stdout


def in_two(folder, *options):
    """The processes of `lmx generate`, after they end."""
    arguments = "generate", str(folder), *options, *TWO
    return in_ring(PROGRAM, *arguments, folder=folder)


def test_two_processes_answer_a_file_as_one_does(folder, tmp_path):
    requests = [{"prompt": f"{n} lamps and {n} rivers"} for n in range(5)]
    requests[1] |= {"temperature": 0.9, "seed": 7}
    regex = {"type": "regex", "regex": "(ab|c[0-9]{2}){1,6}!"}
    requests[3] |= {"response_format": regex}
    file = tmp_path / "requests.jsonl"
    file.write_text("\n".join(map(json.dumps, requests)))
    options = "--input-file", str(file), "--max-tokens", "20", "--stop", "x"
    first, second = in_two(folder, *options)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr
    assert first.stdout == generate(folder, *options)
    assert second.stdout == second.stderr == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "a", "--draft-model", "missing"], "missing"),
    ],
)
def test_an_error_ends_both_processes(folder, options, message):
    raw = "--ignore-chat-template"
    first, second = in_two(folder, *options, raw)
    assert first.returncode == 2, first.stderr
    # The process that raises first prints.
    assert message in first.stderr + second.stderr
    assert "Traceback" not in first.stderr + second.stderr


@pytest.mark.parametrize(
    ("verb", "options", "message"),
    [
        ("generate", ["--prompt", "a", *TWO], "this run has 1"),
        ("generate", ["--prompt", "a", "--tensor-parallel", "0"], "must be 1 or more"),
        ("generate", ["--prompt", "a", *TWO, "--check-parity"], "--check-parity"),
        ("generate", ["--chat", *TWO, "--save-prompt-cache", "x"], "does not work"),
        ("serve", [*TWO, "--adapter", "a=b"], "--adapter does not work"),
    ],
)
def test_what_does_not_work_is_refused(folder, verb, options, message):
    draft = ["--draft-model", "prompt-lookup"] if "--check-parity" in options else []
    result = run(PROGRAM, verb, str(folder), *options, *draft)
    assert result.returncode == 2
    assert message in result.stderr


class Served:
    """`lmx serve` in two processes."""

    def __init__(self, folder, scratch, *options):
        [port] = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        warm_up(2)
        hosts = hostfile(scratch)
        arguments = "serve", str(folder), "--port", str(port), *TWO, *options
        self.processes = []
        for rank in range(2):
            names = {"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)}
            process = Process(PROGRAM, *arguments, env=os.environ | names, server=rank)
            self.processes.append(process)
            if rank == 0:
                wait_for_listener(json.loads(hosts.read_text())[0][0], process)
        end = time.monotonic() + 60
        while not self.is_open():
            assert self.processes[0].poll() is None, self.processes[0].result(1)
            assert time.monotonic() < end
            time.sleep(0.05)

    def is_open(self):
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def post(self, **body):
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=30)

    def end(self):
        """The exit codes."""
        return [process.result(40).returncode for process in self.processes]

    def kill(self):
        for process in self.processes:
            process.kill()


BODY = {"prompt": "Hello there", "max_tokens": 24, "temperature": 0.8, "seed": 3}


def test_two_processes_serve_what_one_does(folder, tmp_path):
    options = "--temperature", "0.8", "--seed", "3", "--max-tokens", "24", "--json"
    raw = "--ignore-chat-template", "--prompt", "Hello there"
    expected = json.loads(generate(folder, *options, *raw))["text"]
    served = Served(folder, tmp_path)
    try:
        for _ in range(2):
            answer = served.post(**BODY).json()
            assert answer["choices"][0]["text"] == expected
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        with httpx.stream(
            "POST",
            f"{served.url}/v1/completions",
            json={"prompt": "a", "max_tokens": 300, "stream": True, "ignore_eos": True},
        ) as response:
            next(response.iter_lines())
        # The client has gone, and the server goes on.
        assert served.post(**BODY).json()["choices"][0]["text"] == expected
        # Both get the signal, as from a terminal.
        for process in served.processes:
            os.kill(process.pid, signal.SIGINT)
        assert served.end() == [0, 0]
    finally:
        served.kill()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_the_end_of_a_rank_ends_the_other(folder, tmp_path, rank):
    """Also without a request."""
    served = Served(folder, tmp_path)
    try:
        served.processes[rank].kill()
        assert served.end()[1 - rank] == 1
    finally:
        served.kill()
