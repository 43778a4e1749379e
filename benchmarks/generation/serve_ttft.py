"""Time to the first token of `lmx serve`: beside huge prompts, and after a restart.

    python benchmarks/generation/serve_ttft.py MODEL

Short requests, alone and beside clients that send huge prompts and hang up. Then a long
prompt, as agents send it, and another question behind it after a restart of the server
with `--prefix-cache-dir`.
"""

import argparse
import json
import socket
import statistics
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from serve_load import served

UNITS = ["a", "hello ", "é{", "\n"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="folder of an MLX checkpoint")
    parser.add_argument("--requests", type=int, default=20, help="short ones")
    parser.add_argument("--clients", type=int, default=20, help="with huge prompts")
    parser.add_argument("--characters", type=int, default=7_900_000, help="of them")
    parser.add_argument("--pause", type=float, default=0.5, help="of a client, seconds")
    parser.add_argument("--text", type=Path, help="of the agent's system message")
    parser.add_argument("--words", type=int, default=5_000, help="of that text")
    parser.add_argument(
        "--seconds", type=int, default=5, help="before the clients' end"
    )
    arguments = parser.parse_args()
    arguments.options = ""
    with served("lmx", arguments.model, arguments) as (url, _):
        show("short requests alone", [first(url, n) for n in range(arguments.requests)])
        with_clients(url, arguments)
        show("short requests after", [first(url, n) for n in range(arguments.requests)])
    if arguments.text:
        text = " ".join(arguments.text.read_text().split(" ")[: arguments.words])
        restart(text, arguments)


def first(url: str, number: int, system: str = "Be brief.", limit: int = 4) -> float:
    """Seconds to the first token of a chat."""
    turns = [{"role": "system", "content": system}]
    turns.append({"role": "user", "content": f"Question {number}: what is it?"})
    body = {"messages": turns, "stream": True, "max_tokens": limit, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), headers
    )
    start = time.monotonic()
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                if choice["delta"].get("content") or choice["finish_reason"]:
                    seconds = time.monotonic() - start
                    break
        answer.read()
    return seconds


def with_clients(url: str, arguments: argparse.Namespace) -> None:
    """Short requests beside clients that send a huge prompt, hang up, and again."""
    end, sent = threading.Event(), []
    address = urlsplit(url)

    def send(number: int) -> None:
        unit = UNITS[number % len(UNITS)]
        # Most are refused before they are read as tokens, some after it.
        size = arguments.characters // (1 if number % 2 else 20) // len(unit.encode())
        body = json.dumps({"prompt": unit * size}, ensure_ascii=False).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
        head += "Content-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        while not end.wait(arguments.pause):
            try:
                with socket.create_connection((address.hostname, address.port)) as peer:
                    peer.sendall(head.encode() + body)
            except OSError:
                continue
            sent.append(number)

    threads = [
        threading.Thread(target=send, args=[n]) for n in range(arguments.clients)
    ]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    time.sleep(arguments.seconds)
    times = [first(url, n) for n in range(arguments.requests)]
    end.set()
    for thread in threads:
        thread.join()
    rate = len(sent) / (time.monotonic() - start)
    show(f"beside {arguments.clients} clients, {rate:.1f} prompts/s", times)


def restart(text: str, arguments: argparse.Namespace) -> None:
    """An agent's first question, and another one after a restart."""
    with tempfile.TemporaryDirectory() as folder:
        arguments.options = f"--prefix-cache-dir {folder}"
        for number, when in enumerate(("no prefixes kept", "after a restart")):
            with served("lmx", arguments.model, arguments) as (url, _):
                show(f"agent's prompt, {when}", [first(url, number, text, 1)])


def show(name: str, times: list[float]) -> None:
    """Print a line."""
    median, most = statistics.median(times), max(times)
    print(f"{name:50} TTFT median {median:.3f} s, most {most:.3f} s", flush=True)


if __name__ == "__main__":
    main()
