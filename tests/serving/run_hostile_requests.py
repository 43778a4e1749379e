"""Send hostile requests to a running server, beside clients that behave.

    lmx serve MODEL --port 8080 --prefix-cache 0.02 &
    python tests/serving/run_hostile_requests.py --port 8080 --pid $! --requests 10000
    python tests/serving/run_hostile_requests.py --port 8080 --pid $! --minutes 30

The server must answer or close every connection in time, give the clients that behave
the tokens that they got before, and be idle at the end with the memory (Linux) and the
files that it had after a warm-up. The prefix cache has to be full by then: it is small.
"""

import argparse
import json
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / "fuzz"), str(TESTS / "serving")]

import httpx  # noqa: E402
from hostile_requests import CASES, CHAT, COMPLETIONS  # noqa: E402
from raw_http import connect  # noqa: E402

LIMIT = 60.0
"""Seconds in which a request must be answered, or its connection closed."""
GOOD = [
    (
        COMPLETIONS,
        {"prompt": "Once upon", "temperature": 1.0, "seed": 7, "n": 2},
    ),
    (CHAT, {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0}),
    (
        CHAT,
        {
            "messages": [{"role": "user", "content": "Count"}],
            "temperature": 0.8,
            "seed": 3,
            "frequency_penalty": 0.5,
        },
    ),
]
"""Requests of clients that behave."""


@dataclass
class Outcome:
    """What happened.

    Attributes:
        statuses: answers by case and status; "closed" = without one, "left" = by us.
        hangs: seeds of cases that were not answered in time.
        wrong: seeds of cases or texts of clients with something else wrong.
        good: answers of the clients that behave.
        slowest: seconds, with the seed.
    """

    statuses: Counter = field(default_factory=Counter)
    hangs: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    good: int = 0
    busy: int = 0
    slowest: tuple[float, str] = (0.0, "")


class Attack:
    """Hostile requests against a port.

    Args:
        threads: hostile connections at a time.
    """

    def __init__(self, port: int, *, seed: int = 0, threads: int = 12):
        self.port, self.seed, self.threads = port, seed, threads
        self.outcome = Outcome()
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._expected = [_texts(self._good_client(), *good) for good in GOOD]

    def run(self, requests: int | None = None, minutes: float = 0.0) -> Outcome:
        """Send so many requests, or as many as the time allows."""
        numbers = iter(range(requests or sys.maxsize))
        deadline = time.monotonic() + minutes * 60

        def attack() -> None:
            while requests or time.monotonic() < deadline:
                with self._lock:
                    number = next(numbers, None)
                if number is None:
                    return
                self._send(number)

        attackers = [threading.Thread(target=attack) for _ in range(self.threads)]
        clients = [threading.Thread(target=self._behave, args=[i]) for i in range(3)]
        for thread in (*attackers, *clients):
            thread.start()
        for thread in attackers:
            thread.join()
        self._end.set()
        for thread in clients:
            thread.join()
        return self.outcome

    def _send(self, number: int) -> None:
        rng = random.Random(f"{self.seed} {number}")
        (case,) = rng.choices([*CASES], [*CASES.values()])
        name, status, start = f"{case.__name__} {number}", "closed", time.monotonic()
        try:
            with connect(self.port, timeout=LIMIT) as connection:
                answer = case(rng, connection)
            if answer is None:
                status = "left"
            elif answer:
                status = answer[9:12].decode("latin-1")
        except TimeoutError:
            self._add(self.outcome.hangs, name)
        except ConnectionError:
            status = "closed"
        except Exception as error:
            self._add(self.outcome.wrong, f"{name}: {error!r}"[:500])
        seconds = time.monotonic() - start
        with self._lock:
            self.outcome.statuses[case.__name__, status] += 1
            self.outcome.slowest = max(self.outcome.slowest, (seconds, name))
            if status.startswith("5"):
                self.outcome.wrong.append(f"{name}: {answer[:300]!r}")

    def _add(self, found: list[str], text: str) -> None:
        with self._lock:
            found.append(text)

    # Clients that behave

    def _good_client(self) -> httpx.Client:
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=LIMIT)

    def _behave(self, number: int) -> None:
        path, body = GOOD[number]
        with self._good_client() as client:
            while not self._end.is_set():
                try:
                    texts = _texts(client, path, body)
                except Exception as error:
                    self._add(self.outcome.wrong, f"client {number}: {error!r}")
                    continue
                with self._lock:
                    if texts is None:
                        self.outcome.busy += 1
                    elif texts != self._expected[number]:
                        self.outcome.wrong.append(f"client {number}: {texts}")
                    else:
                        self.outcome.good += 1
                time.sleep(0.05)


def _texts(client: httpx.Client, path: str, body: dict) -> list[str] | None:
    """The texts of a stream; None = the server has no room."""
    texts: dict[int, str] = {}
    body = {"max_tokens": 24, "stream": True} | body
    with client.stream("POST", path, json=body) as response:
        if response.status_code == 429:
            return None
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            for choice in chunk["choices"]:
                text = choice.get("text") or choice.get("delta", {}).get("content")
                texts[choice["index"]] = texts.get(choice["index"], "") + (text or "")
    return [texts[index] for index in sorted(texts)]


def wait_until_idle(port: int, seconds: float = 30.0) -> bool:
    """Whether no request runs or waits, soon."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        lines = httpx.get(f"http://127.0.0.1:{port}/metrics").text.splitlines()
        values = [line for line in lines if line.startswith("lmx:num_requests_")]
        if len(values) == 2 and all(line.endswith(" 0.0") for line in values):
            return True
        time.sleep(0.1)
    return False


def resident_bytes(pid: int) -> int:
    """Memory of a process (Linux)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmRSS")]
    return int(line.split()[1]) * 1024


def open_files(pid: int) -> int:
    """Files and sockets of a process (Linux)."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def main() -> int:
    """Run and print a table; 1 = something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--warm-up", type=int, default=1000, metavar="REQUESTS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=12)
    args = parser.parse_args()
    port, threads = args.port, args.threads
    Attack(port, seed=args.seed + 10**6, threads=threads).run(args.warm_up)
    wait_until_idle(port)
    memory, files = resident_bytes(args.pid), open_files(args.pid)
    start = time.monotonic()
    attack = Attack(port, seed=args.seed, threads=threads)
    sampled = threading.Event()
    sampler = threading.Thread(target=_sample, args=[args.pid, sampled])
    sampler.start()
    outcome = attack.run(args.requests, args.minutes)
    seconds = time.monotonic() - start
    sampled.set(), sampler.join()
    is_idle = wait_until_idle(port)
    time.sleep(6)  # connections that are kept alive
    after, files_after = resident_bytes(args.pid), open_files(args.pid)
    growth = after / memory - 1
    for (case, status), count in sorted(outcome.statuses.items()):
        print(f"{case:20} {status:8} {count:6}")
    print(f"requests {sum(outcome.statuses.values())} in {seconds:.0f} s")
    print(f"clients that behave: {outcome.good} answers, {outcome.busy} times no room")
    print(f"slowest: {outcome.slowest[0]:.1f} s, {outcome.slowest[1]}")
    print(f"hangs: {outcome.hangs}")
    print(f"wrong: {len(outcome.wrong)}", *outcome.wrong[:20], sep="\n  ")
    print(f"memory: {memory / 1e6:.0f} MB, then {after / 1e6:.0f} MB ({growth:+.1%})")
    print(f"files: {files}, then {files_after}; idle: {is_idle}")
    is_good = not outcome.hangs and not outcome.wrong and is_idle and growth < 0.05
    return 0 if is_good and files_after <= files else 1


def _sample(pid: int, end: threading.Event) -> None:
    """Print the memory every half a minute."""
    start = time.monotonic()
    while not end.wait(30):
        seconds = time.monotonic() - start
        memory, files = resident_bytes(pid) / 1e6, open_files(pid)
        print(f"{seconds:6.0f} s {memory:8.1f} MB {files:4} files", flush=True)


if __name__ == "__main__":
    sys.exit(main())
