"""Reward functions that return, raise, print, hang or end anything: a number or a clear
error, in limited time, and the next call is right."""

import random
import time
from functools import partial
from pathlib import Path

import pytest
from lmx.errors import UserError
from lmx.training import rewards
from lmx.training.rewards import Reward, RewardSample, RewardWorker, resolve_reward

# The completion is the program; its last value is the reward.
FILE = """
import asyncio, ctypes, decimal, fractions, os, re, signal, subprocess, sys, threading
import time

def evaluate(prompt, completion, answer):
    scope = dict(globals())
    exec(completion, scope)
    return scope["reward"]
"""
# No number comes of these, and the process goes on.
ERRORS = """
reward = None
reward = "1.0"
reward = b"1"
reward = 1j
reward = decimal.Decimal(1)
reward = (n for n in range(3))
reward = asyncio.sleep(1)
reward = lambda: 1
reward = object
reward = float("nan")
reward = float("inf")
reward = -float("inf")
reward = 10**400
reward = -10**5000
reward = -1e308
reward = 1e9 + 1
reward = fractions.Fraction(10**50, 3)
reward = "x" * 10**7
reward = "\\ud800\\x1b[2J\\n" * 50
reward = threading.Lock()
reward = []; reward.append(reward)
reward = None\nfor _ in range(10**5): reward = [reward]
reward = type("", (), {"__repr__": lambda self: 1 / 0})()
reward = type("", (), {"__repr__": lambda self: sys.exit(0)})()
reward = type("", (), {"__repr__": lambda self: 5})()
reward = type("F", (float,), {"__abs__": lambda self: 1 / 0})(1)
reward = type("F", (float,), {"__abs__": lambda self: "a"})(1)
reward = type("F", (float,), {"__class__": property(lambda self: sys.exit())})(1)
reward = type("F", (float,), {"__abs__": lambda self: 0})("inf")
reward = type("F", (float,), {"__abs__": lambda self: 0})("nan")
reward = type("F", (float,), {"__abs__": lambda self: 0, "__float__": len})(1)
raise ValueError
raise ValueError("\\ud800" * 500)
raise type("E", (Exception,), {"__str__": lambda self: 1 / 0})
raise KeyboardInterrupt
raise GeneratorExit
raise BaseException("base")
raise TimeoutError("mine")
raise ExceptionGroup("many", [ValueError(1), OSError(2)])
sys.exit()
sys.exit(0)
sys.exit("text")
reward = missing
reward = (
def f(): return f()\nf()
assert False
sys.stdin.read(); reward = input()
"""
# Correct numbers, whatever else happens.
NUMBERS = """
print("noise", flush=True); reward = {}
sys.stderr.write("noise"); reward = {}
os.write(1, b"noise" * 10**5); os.write(2, b"noise"); reward = {}
sys.stdout.close(); sys.stdout = open(os.devnull, "w"); reward = {}
sys.stderr = open(os.devnull, "w"); sys.stdin = None; reward = {}
os.system("echo noise; cat"); reward = {}
os.dup2(1, 0); reward = {}
os.chdir("/"); reward = {}
signal.signal(signal.SIGALRM, lambda *_: None); signal.alarm(1); reward = {}
signal.signal(signal.SIGALRM, signal.SIG_IGN); reward = {}
signal.signal(signal.SIGTERM, signal.SIG_IGN); reward = {}
threading.Thread(target=time.sleep, args=(60,)).start(); reward = {}
subprocess.Popen(["sleep", "60"]); reward = {}
os.fork(); reward = {}
sys.setrecursionlimit(200); reward = {}
time.sleep(0.02); reward = {}
reward = fractions.Fraction({})
reward = type("F", (float,), {{"__repr__": lambda self: 1 / 0}})({})
reward = {} if re.match("(a|b)+", "ab" * 9) else None
"""
# The process is lost.
ENDS = """
os._exit(0)
os._exit(7)
os.abort()
os.kill(os.getpid(), signal.SIGKILL)
ctypes.string_at(0)
os.closerange(0, 999); reward = 1.0
time.sleep(60)
while True: pass
re.match("(a+)+$", "a" * 40 + "b")
reward = type("", (), {"__repr__": lambda self: time.sleep(60)})()
signal.signal(signal.SIGALRM, signal.SIG_IGN); time.sleep(60)
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32)); time.sleep(60)
"""
SECONDS = 10


def programs(text: str) -> list[str]:
    return [line.replace("\\n", "\n") for line in text.strip().splitlines()]


def number(rng: random.Random) -> float:
    draw = rng.random()
    if draw < 0.2:
        return rng.choice([0.0, -0.0, 5e-324, 1e9, -1e9, 0.1, True])
    return rng.choice([-1, 1]) * 10 ** rng.uniform(-30, 9)


def make_case(rng: random.Random) -> tuple[str, float | None]:
    """A program, and its number; None = an error."""
    draw = rng.random()
    if draw < 0.45:
        value = number(rng)
        return rng.choice(programs(NUMBERS)).format(repr(value)), float(value)
    return rng.choice(programs(ERRORS if draw < 0.96 else ENDS)), None


def reward_of(folder: Path, worker: RewardWorker) -> Reward:
    return resolve_reward("rewards.py:evaluate", folder.joinpath, worker)


def outcome(call, case: str) -> tuple[float | None, UserError | None]:
    """What a call returns or refuses, in limited time."""
    start, value, refusal = time.monotonic(), None, None
    try:
        value = call()
    except UserError as error:
        refusal = error
        lines = str(error).splitlines()
        assert max(map(len, lines)) <= 1000, case
        assert len(lines) <= 40, case
        assert "".join(lines).encode(), case
    except Exception as error:
        pytest.fail(f"{case}: {error!r}")
    assert time.monotonic() - start < SECONDS, case
    return value, refusal


def test_results_of_reward_functions(num_cases, fuzz_random, tmp_path, capfd):
    (tmp_path / "rewards.py").write_text(FILE)
    worker, count = RewardWorker(1.0), num_cases(200)
    reward, answered = reward_of(tmp_path, worker), 0
    for number_of_case in range(count):
        program, expected = make_case(fuzz_random)
        case = f"case {number_of_case}: {program!r}"
        sample = RewardSample("p", program, "a", "f:1")
        value, refusal = outcome(partial(reward, sample), case)
        assert value == expected, f"{case}: {refusal}"
        assert refusal is None or refusal.code == 1, case
        answered += value is not None
    worker.close()
    assert 0 < answered < count
    assert capfd.readouterr() == ("", "")


def damaged_file(rng: random.Random) -> bytes:
    """A file that ends or fails in its import, or with a few other bytes."""
    data = bytearray(FILE.encode())
    if rng.random() < 0.5:
        line = rng.choice(programs(ENDS + ERRORS))
        data[:0] = f"import os, signal, sys, time\n{line}\n".encode()
    for _ in range(rng.choice([0, 1, 3])):
        place = rng.randrange(len(data))
        damages = [b"", b"\0", b"\xff", b"\n", b"(", b"reward", b"\t"]
        data[place : place + 1] = rng.choice(damages)
    return bytes(data)


def test_damaged_reward_files(num_cases, fuzz_random, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(rewards, "LOAD_SECONDS", 0.5)
    sample = RewardSample("p", "reward = 0.5", "a", "f:1")
    for number_of_case in range(num_cases(20)):
        data, worker = damaged_file(fuzz_random), RewardWorker(0.5)
        (tmp_path / "rewards.py").write_bytes(data)
        case = f"case {number_of_case}: {data!r}"
        value, _ = outcome(lambda w=worker: reward_of(tmp_path, w)(sample), case)
        assert value in (None, 0.5), case
        worker.close()
    assert capfd.readouterr() == ("", "")
