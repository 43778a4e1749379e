"""Runs of all stage kinds that are killed, interrupted or out of disk at any moment.

The same command resumes, and ends with the weights of a run that was not disturbed.
"""

import os
import resource
import signal
import time

import pytest
from lmx.run.fs import hash_file
from tiny_runs import METRICS_ONLY, SCRATCH_CONFIG, TRAIN, Run
from warm import Process

PROGRAM = "import sys; from lmx.cli.main import train; sys.exit(train(sys.argv[1:]))"
SMALL = SCRATCH_CONFIG | {"hidden_size": 32, "num_hidden_layers": 2}
DRAFT = {
    "draft_model": {"num_layers": 1},
    "data_generation": {"num_prompts": 4, "num_eval_prompts": 2, "max_tokens": 8},
    "benchmark": {"num_prompts": 2, "max_tokens": 8},
    "steps": 4,
    "save_steps": 1,
    "eval_steps": 2,
}
CALIBRATION = {"dataset": "builtin:stdlib", "num_tokens": 512, "max_seq_length": 64}
STAGES = (
    {"train": TRAIN | {"steps": 6, "batch_size": 4, "save_steps": 1, "eval_steps": 3}},
    {"quantize": {"method": "gptq", "bits": 4, "group_size": 32}},
    {"draft": DRAFT},
    {"evaluate": METRICS_ONLY | {"num_tokens": 50}},
    {"export": {"formats": ["mlx", "hf"]}},
)
STAGES[1]["quantize"]["calibration"] = CALIBRATION
# Seconds of one run.
LONGEST = 120


def tiny_run(folder):
    folder.mkdir()
    run = Run(folder, *STAGES)
    run.model = {"from_scratch": SMALL}
    run.write()
    return run


def weights(run):
    """The hashes of all final weights of a finished run."""
    published = [run.output / name for name in ("model", "hf", "draft")]
    folders = [*published, *(run.output / "stages").glob("*/*")]
    return {
        str(file.relative_to(run.output)): hash_file(file)
        for folder in folders
        if folder.name != "checkpoints"
        for file in folder.glob("*.safetensors")
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The final weights, and the seconds of the run."""
    run = tiny_run(tmp_path_factory.mktemp("undisturbed") / "run")
    assert run() == 0
    expected = weights(run)
    assert {name.split("/")[0] for name in expected} > {"model", "hf", "draft"}
    again, start = tiny_run(run.folder / "again"), time.monotonic()
    assert Process(PROGRAM, *again.arguments("--quiet")).wait(LONGEST) == 0
    assert weights(again) == expected
    return expected, time.monotonic() - start


def disturb(run, number, seconds, rng):
    """Send a signal at a random moment; returns the exit code."""
    process = Process(PROGRAM, *run.arguments("--quiet"))
    deadline = time.monotonic() + rng.uniform(0, seconds)
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    if process.poll() is None:
        os.kill(process.pid, number)
    result = process.result(LONGEST)
    assert "Traceback" not in result.stderr, result.stderr
    return result.returncode


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_disturbed_runs_resume(tmp_path, undisturbed, num_cases, fuzz_random, name):
    expected, seconds = undisturbed
    number, stopped, finished = signal.Signals[name], 0, 0
    run = tiny_run(tmp_path / "0")
    stages = set()
    while stopped < num_cases(2):
        # Mostly short, so that a run needs many attempts.
        limit = seconds * fuzz_random.choice([0.2, 0.5, 1.0])
        code = disturb(run, number, limit, fuzz_random)
        if code == 0:
            assert weights(run) == expected
            finished += 1
            run = tiny_run(tmp_path / str(finished))
            continue
        allowed = (-number,) if number == signal.SIGKILL else (130, -number)
        assert code in allowed, (code, stopped)
        stopped += 1
        if (run.output / "manifest.json").exists():
            stages.add(run.json("manifest.json")["current_stage"])
            if code == 130:
                assert run.json("manifest.json")["status"] == "interrupted"
    assert run() == 0
    assert weights(run) == expected
    print(f"{stopped} x {name}, {finished} runs ended before it, stages {stages}")


def test_full_disks(tmp_path, undisturbed, num_cases, fuzz_random, capsys):
    """A file-size limit, as a full disk, at a random size."""
    expected, _ = undisturbed
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    run = tiny_run(tmp_path / "run")
    for _ in range(num_cases(2)):
        size = int(10 ** fuzz_random.uniform(2, 5.5))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            code = run("--quiet", "--ignore-limits")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        error = capsys.readouterr().err
        assert code in (0, 1), (size, error)
        assert code == 0 or "cannot write" in error, (size, error)
        assert not run.partial_files(), size
    assert run() == 0
    assert weights(run) == expected
