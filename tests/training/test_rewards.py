"""Reward functions: built in, of a Python file, and broken ones."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from lmx.errors import UserError
from lmx.training import rewards
from lmx.training.rewards import (
    RewardSample,
    RewardWorker,
    check_reward,
    resolve_reward,
)

SLOW = pytest.mark.slow
SAMPLE = RewardSample("Add 2 and 3.", " The sum is 5. ", "5", "train.jsonl:7")
FUNCTIONS = """
import os
import re
import subprocess
import sys
import time

def length(prompt, completion, answer):
    return len(completion)

def fails(**sample):
    raise ValueError("no idea")

def hangs(**sample):
    time.sleep(60)

def nan(**sample):
    return float("nan")

def text(**sample):
    return "good"

def holds_the_interpreter(**sample):
    re.match("(a+)+$", "a" * 40 + "b")

def huge(**sample):
    return 10**400

class Shy:
    def __repr__(self):
        raise RuntimeError("no repr")

def shy(**sample):
    return Shy()

def liar(**sample):
    return type("Liar", (float,), {"__abs__": lambda self: 0})("inf")

def quits(**sample):
    os._exit(0)

def crashes(**sample):
    os.kill(os.getpid(), 11)

def noisy(**sample):
    print("noise")
    os.system("echo noise; echo noise >&2; cat")
    assert sys.stdin.read() == ""
    return 0.5

def forks(prompt, completion, answer):
    os.fork()
    return len(completion)

def starts_a_program(**sample):
    return subprocess.Popen(["sleep", "60"]).pid

def leaves():
    return subprocess.Popen(["sleep", "60"], start_new_session=True).pid
"""
# Files that never become functions: what they do, and what is said of it.
IMPORTS = {
    "import sys; sys.exit(0)": r"failed with SystemExit: 0 \(line 1\)",
    "import os; os._exit(0)": "ended its process with exit code 0",
    "import os; os.abort()": "ended its process with exit code -6",
    "import re; re.match('(a+)+$', 'a' * 40 + 'b')": "took longer than 1 s",
    "def length(:": "failed with SyntaxError",
    "length = 5": "has no function length",
    "raise KeyboardInterrupt": "failed with KeyboardInterrupt",
}


def resolve(*names, allow_python=True, timeout=5.0, folder=None):
    worker = RewardWorker(timeout) if allow_python else None

    def find(name):
        return path if (path := folder / name).is_file() else None

    return [resolve_reward(name, find, worker) for name in names]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    return tmp_path


def test_exact_match_and_last_number(folder):
    exact, number = resolve(
        "exact_match", "exact_match:flexible-extract", folder=folder
    )
    assert (exact(SAMPLE), number(SAMPLE)) == (0.0, 1.0)
    right = RewardSample("", " 5\n", "5", "")
    assert exact(right) == 1.0
    no_number = RewardSample("", "five", "5", "")
    assert number(no_number) == 0.0


def test_function_of_a_file(folder):
    [reward] = resolve("rewards.py:length", folder=folder)
    assert reward(SAMPLE) == len(SAMPLE.completion)
    digest = reward.digest
    (folder / "rewards.py").write_text(FUNCTIONS.replace("len(completion)", "1"))
    [changed] = resolve("rewards.py:length", folder=folder)
    assert changed.digest != digest


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fails", "failed with ValueError: no idea"),
        ("nan", "returned nan, not a number"),
        ("text", "returned 'good', not a number"),
        ("huge", "returned 1000.*, not a number from"),
        ("shy", "returned something without a text, not a number"),
        ("liar", "returned inf, not a number from"),
        ("quits", "ended its process with exit code 0"),
        ("crashes", "ended its process with exit code -11"),
    ],
)
def test_broken_reward_names_itself_and_the_sample(folder, name, message):
    [reward] = resolve(f"rewards.py:{name}", folder=folder)
    with pytest.raises(UserError, match=message) as error:
        reward(SAMPLE)
    text = str(error.value)
    assert f"rewards.py:{name}" in text
    assert "train.jsonl:7" in text
    assert "The sum is 5." in text
    assert error.value.code == 1


@pytest.mark.parametrize("name", ["hangs", "holds_the_interpreter"])
def test_hanging_reward_ends_at_its_limit_and_others_go_on(folder, name):
    names = [f"rewards.py:{each}" for each in (name, "length")]
    hanging, length = resolve(*names, timeout=0.7, folder=folder)
    assert length(SAMPLE) == 15
    start = time.monotonic()
    with pytest.raises(UserError, match=r"took longer than 0\.7 s"):
        hanging(SAMPLE)
    assert time.monotonic() - start < 5
    assert length(SAMPLE) == 15


@pytest.mark.parametrize(("text", "message"), IMPORTS.items(), ids=range(len(IMPORTS)))
def test_file_that_cannot_be_imported_is_refused(tmp_path, monkeypatch, text, message):
    if "took longer" in message:
        monkeypatch.setattr(rewards, "LOAD_SECONDS", 1.0)
    (tmp_path / "rewards.py").write_text(text)
    with pytest.raises(UserError, match=message) as error:
        resolve("rewards.py:length", folder=tmp_path, timeout=0.1)
    assert error.value.place == "rewards: rewards.py:length"


def test_output_of_a_function_does_not_reach_the_run(folder, capfd):
    [noisy] = resolve("rewards.py:noisy", folder=folder)
    assert [noisy(SAMPLE), noisy(SAMPLE)] == [0.5, 0.5]
    assert capfd.readouterr() == ("", "")


def test_fork_that_returns_answers_no_other_call(folder):
    forks, length = resolve("rewards.py:forks", "rewards.py:length", folder=folder)
    other = RewardSample("", "four", "", "")
    for _ in range(5):
        assert (forks(SAMPLE), length(other)) == (15, 4)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    # A container may have nobody who waits for a program that has lost its parent.
    return not (state.exists() and state.read_text().rpartition(")")[2][1] == "Z")


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_a_function_has_started_ends_with_the_worker(folder):
    worker = RewardWorker(5.0)
    program = int(worker.call(folder / "rewards.py", "starts_a_program"))
    process = worker._process.pid
    assert is_running(program)
    assert worker.close() == 0
    wait_for_end(program)
    assert not is_running(process)


def test_what_leaves_the_session_ends_with_the_worker(folder):
    worker = RewardWorker(5.0)
    programs = [int(worker.call(folder / "rewards.py", "leaves")) for _ in range(2)]
    assert all(map(is_running, programs))
    worker.close()
    for program in programs:
        wait_for_end(program)


NEIGHBOURS = {
    "helpers.py": "def half(text):\n    return len(text) / 2",
    "neighbour.py": """
import multiprocessing, pickle
from helpers import half

def imported(completion, **sample):
    return half(completion)

def pickled(completion, **sample):
    return pickle.loads(pickle.dumps(half_of))(completion)

def half_of(completion):
    return half(completion)

def pooled(completion, method="fork", **sample):
    with multiprocessing.get_context(method).Pool(2) as pool:
        return sum(pool.map(half_of, [completion] * 2)) / 2

def spawned(**sample):
    return pooled(method="spawn", **sample)
""",
    # The same name in another folder is another module.
    "other/neighbour.py": "def imported(**sample):\n    return 3.0",
}


@pytest.mark.parametrize(
    "name", ["imported", "pickled", "pooled", pytest.param("spawned", marks=SLOW)]
)
def test_neighbours_pickle_and_pools_work(tmp_path, name):
    for file, text in NEIGHBOURS.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    names = [f"neighbour.py:{name}", "other/neighbour.py:imported"]
    reward, other = resolve(*names, timeout=60.0, folder=tmp_path)
    for _ in range(2):
        assert (reward(SAMPLE), other(SAMPLE)) == (7.5, 3.0)


# What a function writes to every socket of its process.
FORGED = {
    "number": b"1.0\n",
    "answer": b"[1.0]\n",
    "bytes": b"\xff\n",
    "no line": b"1.0",
    "long": b"1" * 100_000,
}
FORGER = """
import os, stat

def forges(**sample):
    for fd in range(100):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.write(fd, TEXT)
        except OSError:
            pass
    return 0.25

def changes_json(**sample):
    import json
    json.dumps = lambda value: TEXT
    return 0.25

def fine(**sample):
    return 0.5
"""


@pytest.mark.parametrize("name", FORGED)
def test_function_cannot_forge_an_answer(tmp_path, name):
    text = FORGER.replace("TEXT", repr(FORGED[name]))
    (tmp_path / "rewards.py").write_text(text)
    names = ["rewards.py:forges", "rewards.py:fine"]
    forges, fine = resolve(*names, timeout=2.0, folder=tmp_path)
    for _ in range(2):
        with pytest.raises(UserError, match=r"changed the answer|took longer"):
            forges(SAMPLE)
        assert fine(SAMPLE) == 0.5


@pytest.mark.parametrize("text", ["{", "true", "[" * 3000, "[0.5]", ""])
def test_answer_of_another_type_is_refused(tmp_path, text):
    (tmp_path / "rewards.py").write_text(FORGER.replace("TEXT", repr(text)))
    [reward] = resolve("rewards.py:changes_json", folder=tmp_path)
    assert reward(SAMPLE) == 0.25
    with pytest.raises(UserError, match="has changed the answer of its process"):
        reward(SAMPLE)


@contextmanager
def interrupted(seconds: float):
    """Ctrl-C after some time, as in a run that it does not only ask to stop."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


def test_ctrl_c_ends_a_function_that_holds_the_interpreter(folder):
    names = ("rewards.py:length", "rewards.py:holds_the_interpreter")
    length, holding = resolve(*names, timeout=60.0, folder=folder)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), interrupted(0.2):
        holding(SAMPLE)
    assert time.monotonic() - start < 5
    assert length(SAMPLE) == 15


PARENT = """
import sys
from pathlib import Path
from lmx.training.rewards import RewardWorker
worker = RewardWorker(0.5)
worker.load(Path(sys.argv[1]), "length")
print(worker._process.pid, flush=True)
if sys.argv[2] == "busy":
    # Nobody waits for the answer, as after SIGKILL.
    worker._channel.sendall(b'["", 0.5, "%s", "holds_the_interpreter", {}]\\n'
                            % sys.argv[1].encode())
sys.stdin.read()
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_worker_ends_with_a_run_that_is_killed(folder, state):
    command = [sys.executable, "-c", PARENT, str(folder / "rewards.py"), state]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = os.environ | {"PYTHONPATH": str(Path(rewards.__file__).parents[2])}
    with subprocess.Popen(command, **pipes, env=environment, text=True) as parent:
        worker = int(parent.stdout.readline())
        assert is_running(worker)
        time.sleep(0.1)
        parent.kill()
    wait_for_end(worker)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact", "there is no reward 'exact'"),
        ("exact_match:first", "there is no reward"),
        ("other.py:length", "there is no file other.py"),
        ("rewards.py:missing", "has no function missing"),
    ],
)
def test_unknown_reward_is_refused(folder, name, message):
    with pytest.raises(UserError, match=message):
        resolve(name, folder=folder)


def test_pipe_is_no_reward_file(folder):
    os.mkfifo(folder / "pipe.py")
    with pytest.raises(UserError, match="this is a named pipe, not a file"):
        check_reward("pipe.py:length", lambda name: folder / name)


def test_python_needs_the_users_word(folder):
    (folder / "rewards.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(UserError, match="--allow-python"):
        resolve("rewards.py:length", allow_python=False, folder=folder)
