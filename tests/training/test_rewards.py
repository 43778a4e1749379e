"""Reward functions: built in, of a Python file, and broken ones."""

import os
import time

import pytest
from lmx.errors import UserError
from lmx.training.rewards import RewardSample, check_reward, resolve_rewards

SAMPLE = RewardSample("Add 2 and 3.", " The sum is 5. ", "5", "train.jsonl:7")
FUNCTIONS = """
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

def nothing(**sample):
    pass
"""


def resolve(*names, allow_python=True, timeout=5.0, folder=None):
    return resolve_rewards(
        names,
        find=lambda name: path if (path := folder / name).is_file() else None,
        allow_python=allow_python,
        timeout=timeout,
    )


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
        ("nothing", "returned None, not a number"),
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


def test_hanging_reward_ends_at_its_limit(folder):
    [reward] = resolve("rewards.py:hangs", timeout=0.2, folder=folder)
    start = time.monotonic()
    with pytest.raises(UserError, match=r"took longer than 0\.2 s"):
        reward(SAMPLE)
    assert time.monotonic() - start < 5


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
