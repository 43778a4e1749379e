"""Every kind of stage, disturbed at any moment: signals, lost output, full disks.

The same command resumes, and leaves the files of a run that was not disturbed. The
resumed run is disturbed in its turn, up to four times.

A case copies a run directory whose earlier stages are done. A forked process with all
modules imported runs the last stage, in a second or two.
"""

import json
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from kill_cases import CASES, make_run
from lmx.files.hashes import hash_file
from lmx.models.safetensors_io import read_header
from tiny_runs import TIMING_KEYS, TRAIN, Run
from warm import Process

PROGRAM = """
import os, resource, signal, sys, threading
from lmx.cli.main import train

how, amount = sys.argv[1:3]
# A shell lets its background jobs ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
if how == "closed pipe":
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(writer)
    timer = threading.Timer(float(amount), os.close, [reader])
    timer.daemon = True
    timer.start()
if how == "full disk":
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(amount), -1))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.exit(train(["--ignore-limits", *sys.argv[3:]]))
"""
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT")
# SIGKILL, which no program notices, as often as all others together.
DISTURBANCES = (*SIGNALS, "SIGKILL", "SIGKILL", "SIGKILL", "closed pipe", "full disk")
MOST_IN_A_ROW = 4
# Of Python itself, if a signal comes after the program.
SHUTDOWN = re.compile(
    r"Exception ignored in(?:: <module 'threading'| atexit callback: ).*\n"
    r"Traceback.*\n(?: .*\n)+"
    r"KeyboardInterrupt:? ?\n"
)
# Seconds of one run.
LONGEST = 120
# Files that name moments, durations or processes.
UNSTABLE = {".lock", "log.txt", "manifest.json", "report.html"}
# Keys of measured times, and of what depends on them.
TIMINGS = {
    *TIMING_KEYS,
    "generation",
    "speculation",
    "benchmark",
    "costs",
    "speedup",
    "predicted_speedup",
    "num_draft_tokens",
    "recommendation",
}
UNSTABLE |= {"draft/README.md", "draft/draft.json"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of a trained model."""
    run = Run(tmp_path_factory.mktemp("base"), {"train": TRAIN})
    assert Process(PROGRAM, "", "", *run.arguments()).wait(LONGEST) == 0
    return run.output / "stages/1-train/dense"


class DisturbedStage:
    """A run whose last stage is run again and again, with a cache of its own.

    Attributes:
        expected: the files of a run that was not disturbed.
        seconds: it took.
    """

    def __init__(self, folder: Path, name: str, model: Path):
        self.run = make_run(folder, name, model)
        self.cache, self.prepared = folder / "cache", folder / "prepared"
        self.environment = os.environ | {"LMX_CACHE": str(self.cache)}
        self.prepared.mkdir()
        stages = self.run.stages
        if stages[:-1]:
            self.run.stages = stages[:-1]
            self.run.write()
            assert self.start().wait(LONGEST) == 0
            self.run.output.rename(self.prepared / "out")
            self.run.stages = stages
            self.run.write()
        self.reset()
        start = time.monotonic()
        self.finish()
        self.seconds = time.monotonic() - start
        self.expected = files(self.run.output)

    def reset(self) -> None:
        """The state before the last stage; nothing is in the cache."""
        for folder in (self.run.output, self.cache):
            shutil.rmtree(folder, ignore_errors=True)
        if (self.prepared / "out").exists():
            shutil.copytree(self.prepared / "out", self.run.output)

    def start(self, how: str = "", amount: float = 0) -> Process:
        """Run the command in a process of its own."""
        words = (how, str(amount), *self.run.arguments())
        return Process(PROGRAM, *words, env=self.environment)

    def finish(self) -> None:
        """Run the command to its end."""
        result = self.start().result(LONGEST)
        assert result.returncode == 0, result.stderr[-2000:]

    def manifest(self) -> bytes:
        """The bytes of the manifest; empty if there is none."""
        file = self.run.output / "manifest.json"
        return file.read_bytes() if file.exists() else b""

    def disturb(self, how: str, rng: random.Random) -> str | None:
        """Run the command and disturb it at a random moment.

        Returns:
            How the run was ended; None if it came to its end.
        """
        seconds, before = rng.uniform(0, self.seconds), self.manifest()
        if how in SIGNALS:
            process = self.start()
            time.sleep(seconds)
            if process.poll() is None:
                os.kill(process.pid, signal.Signals[how])
        elif how == "closed pipe":
            process = self.start(how, seconds)
        else:
            # The limit is also that of stderr, which must hold the message.
            process = self.start(how, int(10 ** rng.uniform(3, 5.5)))
        result = process.result(LONGEST)
        text = result.stderr
        if result.returncode == 0:
            text = SHUTDOWN.sub("", text)
        assert "Traceback" not in text, text
        assert len(result.stderr) < 5000
        self._check_end(how, result, before)
        return how if result.returncode else None

    def _check_end(self, how: str, result, before: bytes) -> None:
        code = result.returncode
        manifest = json.loads(self.manifest() or "{}")
        if code == 0:
            assert manifest["status"] == "done"
        elif how == "SIGKILL":
            assert code == -signal.SIGKILL
        elif how == "full disk":
            assert (code, "cannot write" in result.stderr) == (1, True), result.stderr
        else:
            assert how in SIGNALS, (how, code, result.stderr)
            assert code == 130 or self._is_outside(manifest, before), (how, code)
            assert manifest.get("status") != "running" or self.manifest() == before

    def _is_outside(self, manifest: dict, before: bytes) -> bool:
        """Whether a signal came while Python started or ended the process."""
        return manifest.get("status") == "done" or self.manifest() == before


def files(output: Path) -> dict:
    """What a run has made by the name of the file, without moments and durations."""
    names = {str(p.relative_to(output)): p for p in output.rglob("*") if p.is_file()}
    return {name: content(file, name) for name, file in names.items()}


def content(file: Path, name: str):
    if name in UNSTABLE:
        return None
    if "checkpoints" in file.parts:
        # The index has the seconds of the training.
        is_state = file.suffix == ".safetensors"
        return (read_header(file), tensor_bytes(file)) if is_state else None
    if file.suffix == ".jsonl":
        return [without_timings(json.loads(line)) for line in file.open()]
    if file.name == "report.json":
        return without_timings(json.loads(file.read_text()))
    return hash_file(file)


def tensor_bytes(file: Path) -> bytes:
    data = file.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


def without_timings(value):
    if isinstance(value, list):
        return [without_timings(item) for item in value]
    if not isinstance(value, dict):
        return value
    stable = {k: v for k, v in value.items() if k not in TIMINGS}
    # The draft length with the best speed-up decides it.
    if "machine" in stable:
        del stable["acceptance_rate"]
    return {k: without_timings(v) for k, v in stable.items()}


@pytest.mark.parametrize("name", CASES)
def test_disturbed_stages_resume(tmp_path, base, num_cases, fuzz_random, name):
    stage = DisturbedStage(tmp_path / "run", name, base)
    ends: Counter = Counter()
    while ends.total() < num_cases(1):
        stage.reset()
        in_a_row = fuzz_random.randint(1, MOST_IN_A_ROW)
        for _ in range(in_a_row):
            how = fuzz_random.choice(DISTURBANCES)
            end = stage.disturb(how, fuzz_random)
            ends[end] += 1
        # Runs that came to their end do not count.
        del ends[None]
        stage.finish()
        assert_same_files(stage)
    print(f"{name}: {stage.seconds:.1f} s, {dict(ends)}")


def assert_same_files(stage: DisturbedStage) -> None:
    """Compare by name first: a difference of bytes is not readable."""
    actual, expected = files(stage.run.output), stage.expected
    assert actual.keys() == expected.keys()
    assert [k for k in actual if actual[k] != expected[k]] == []
    assert not [*stage.run.folder.rglob("*.partial")]
