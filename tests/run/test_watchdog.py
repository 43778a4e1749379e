"""A process that ends, hangs or is cut off is named, and the others end."""

import signal
import socket
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest
from lmx.errors import Interrupted, UserError
from lmx.run import watchdog
from lmx.run.watchdog import End, Watchdog, _accept
from processes import in_ring

# All processes add numbers for ever. The first argument is the rank that gets a signal
# after a while, the second one the signal.
SUMS = """
import os, subprocess, sys, threading
import mlx.core as mx
from lmx.errors import UserError
from lmx.run import terminal, watchdog
from lmx.run.distributed import join

watchdog.BEAT_SECONDS, watchdog.SILENCE_SECONDS, watchdog.GRACE_SECONDS = 0.2, 1.5, 1
ranks = join()
ends = sys.argv[2] == "return"
if sys.argv[1] == str(ranks.rank) and not ends:
    # A stopped process does not end by itself.
    subprocess.Popen(["sh", "-c", f"sleep 6; kill -KILL {os.getpid()}"])
    timer = threading.Timer(0.5, os.kill, (os.getpid(), int(sys.argv[2])))
    timer.start()
try:
    with ranks.ends_together():
        for _ in range(20 if ends else 10**9):
            mx.eval(ranks.all_sum([mx.ones(1)]))
except UserError as error:
    if str(error):
        terminal.write_err(f"{error}\\n")
    sys.exit(error.code)
"""


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(watchdog, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(watchdog, "SILENCE_SECONDS", 0.5)
    # The process of the tests must not end.
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", 60)


@pytest.mark.parametrize(
    ("messages", "closes", "end"),
    [
        ([], False, End(1, 0, "process 1 has been silent for 0.5 s")),
        ([b"beat"], False, End(1, 0, "process 1 has been silent for 0.5 s")),
        ([b"beat"], True, End(1, 0, "process 1 ended")),
        ([b"beat", b'[3, 1, ""]'], True, End(3, 1)),
        ([b"beat", b"bye"], True, None),
    ],
)
def test_a_process_that_is_silent_or_gone_ends_the_run(fast, messages, closes, end):
    ours, theirs = Pipe()
    watching = Watchdog(0, {1: ours})
    for message in messages:
        theirs.send_bytes(message)
    if closes:
        theirs.close()
    assert watching.wait_for_end(1.5) == end
    watching.close()
    theirs.close()


def test_two_that_beat_are_well_and_part_without_a_failure(fast):
    ours, theirs = Pipe()
    first, second = Watchdog(0, {1: ours}), Watchdog(1, {0: theirs})
    assert first.wait_for_end(1) is second.wait_for_end(0.1) is None
    first.close()
    assert second.wait_for_end(0.7) is None
    second.close()


@pytest.mark.parametrize("first", [0, 1])
def test_the_process_that_raises_first_prints_its_error(fast, first):
    ours, theirs = Pipe()
    dogs = Watchdog(0, {1: ours}), Watchdog(1, {0: theirs})
    end = End(code=3, reporter=first)
    assert dogs[first].main_raised(3) == end
    assert dogs[1 - first].wait_for_end(5) == end
    assert dogs[1 - first].main_raised(1) == end
    assert str(end.error(1 - first)) == ""
    assert end.error(1 - first).code == 3
    for dog in dogs:
        dog.close()


@pytest.mark.parametrize(
    ("rank", "messages", "printed"),
    [
        (0, [], "process 1 ended; the others end too"),
        (1, [], "process 0 ended; the others end too"),
        (1, [b'[1, 0, "process 2 ended"]'], ""),
        (2, [], ""),
    ],
)
def test_the_lowest_rank_that_runs_prints_the_failure(fast, rank, messages, printed):
    ours, theirs = Pipe()
    watching = Watchdog(rank, {int(rank == 0): ours})
    for message in messages:
        theirs.send_bytes(message)
    theirs.close()
    assert watching.wait_for_end(5).error(rank).message == printed
    watching.close()


def test_an_interrupt_of_one_process_interrupts_all():
    assert isinstance(End(130, 1).error(0), Interrupted)


def test_a_stranger_is_no_process_and_one_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(watchdog, "CONNECT_SECONDS", 1)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as stranger,
        socket.create_connection(server.getsockname()) as known,
    ):
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        Connection(known.detach()).send_bytes(b"secret 1")
        with pytest.raises(UserError, match="process 2 has not reached process 0"):
            _accept(server, "secret", 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "kind", "reporter", "how"),
    [
        (2, signal.SIGKILL, 0, "ended"),
        (0, signal.SIGSTOP, 1, "has been silent"),
    ],
)
def test_the_others_end_with_one_message(tmp_path, rank, kind, reporter, how):
    results = in_ring(SUMS, str(rank), str(int(kind)), folder=tmp_path, count=3)
    for number, result in enumerate(results):
        if number != rank:
            assert result.returncode == 1, result.stderr
            named = f"process {rank} {how}" in result.stderr
            assert named == (number == reporter), result.stderr
            # MLX's ring has lines of its own.
            others = [
                line
                for line in result.stderr.splitlines()
                if not line.startswith("[ring]")
            ]
            assert bool(others) == named


RAISES = """
import sys, time
import mlx.core as mx
from lmx.errors import UserError
from lmx.run import signals, terminal
from lmx.run.distributed import join

ranks = join()
raising, computes = map(int, sys.argv[1:])
try:
    signals.before_exit.append(lambda code: terminal.write_err(f"exit {code}\\n"))
    with ranks.ends_together():
        if ranks.rank == raising:
            time.sleep(0.3)
            raise UserError(f"rank {raising} cannot go on", code=3)
        while computes:
            # Not in a collective, which would notice that a process is gone.
            time.sleep(0.01)
        for _ in range(10**9):
            mx.eval(ranks.all_sum([mx.ones(1)]))
except UserError as error:
    if str(error):
        terminal.write_err(f"{error}\\n")
    sys.exit(error.code)
"""


@pytest.mark.parametrize(
    ("rank", "computes", "count"),
    [
        (0, True, 2),
        (1, False, 2),
        *(pytest.param(r, r == 1, 3, marks=pytest.mark.slow) for r in (0, 1)),
    ],
)
def test_an_error_of_one_process_ends_all(tmp_path, count, rank, computes):
    arguments = str(rank), str(int(computes))
    results = in_ring(RAISES, *arguments, folder=tmp_path, count=count)
    assert [result.returncode for result in results] == [3] * count
    for number, result in enumerate(results):
        lines = [t for t in result.stderr.splitlines() if not t.startswith("[ring]")]
        if number == rank:
            assert lines == [f"rank {rank} cannot go on"]
        else:
            # A backend may raise an error of its own before the watchdog ends it.
            assert lines == ["exit 3"] or (lines == [] and not computes)


JOINS = """
import os, signal
from lmx.run import watchdog
from lmx.run.distributed import join

watchdog.JOIN_SECONDS = 3
if os.environ["MLX_RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
join()
"""


def test_a_process_that_never_connects_ends_the_others(tmp_path):
    first, _ = in_ring(JOINS, folder=tmp_path)
    assert first.returncode == -signal.SIGKILL
    assert first.stderr == "not all processes have connected within 3 s\n"


def test_processes_that_return_end_well(tmp_path):
    results = in_ring(SUMS, "0", "return", folder=tmp_path, count=3)
    assert [(r.returncode, r.stderr) for r in results] == [(0, "")] * 3
