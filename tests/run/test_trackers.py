"""TrackerThread sends every record in order, and never ends or blocks a run."""

import threading
import time

import pytest
from lmx.run import trackers
from lmx.run.logger import RunLogger
from lmx.run.trackers import TrackerThread

RECORDS = [{"kind": "train", "step": step, "loss": 1 / step} for step in (1, 2, 3)]


class Recorder:
    """Fails at one of its calls, if requested."""

    def __init__(self, fails_at="", error=OSError):
        self.calls = []
        self.fails_at, self.error = fails_at, error
        self._note("start")

    def _note(self, name, *values):
        self.calls.append((name, *values))
        if name == self.fails_at:
            raise self.error("no such host\nand a trace")

    def log(self, record):
        self._note("log", record)

    def finish(self, summary, code):
        self._note("finish", summary, code)


def reported(folder, start):
    """Report three records to a tracker."""
    logger = RunLogger(folder, quiet=True)
    logger.stage = "1-train"
    logger.tracker = TrackerThread(start, logger.warning)
    for record in RECORDS:
        logger.metrics(record | {"norm": float("nan")})
    logger.tracker.finish({"base/loss": 2.0}, 0)
    return [x for x in (folder / "log.txt").read_text().splitlines() if "tracker" in x]


def test_tracker_gets_every_record(tmp_path):
    recorder = Recorder()
    (tmp_path / "log.txt").touch()
    assert reported(tmp_path, lambda: recorder) == []
    records = [{"stage": "1-train"} | record | {"norm": None} for record in RECORDS]
    logged = [("log", record) for record in records]
    assert recorder.calls == [("start",), *logged, ("finish", {"base/loss": 2.0}, 0)]


@pytest.mark.parametrize("error", [OSError, ImportError, SystemExit])
@pytest.mark.parametrize("place", ["start", "log", "finish"])
def test_tracker_error_is_logged_once(tmp_path, capsys, place, error):
    [line] = reported(tmp_path, lambda: Recorder(place, error))
    reason = f"{error.__name__}: no such host"
    assert line.endswith(f"the tracker failed, continuing without it: {reason}")
    assert capsys.readouterr().err.count("tracker") == 1
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == len(RECORDS)


def test_tracker_error_redacts_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")

    def start():
        raise ValueError("bad key 0123456789abcdef")

    [line] = reported(tmp_path, start)
    assert line.endswith("ValueError: bad key REDACTED")


def test_hanging_tracker_does_not_block_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "FINISH_TIMEOUT", 0.05)
    release = threading.Event()

    def start():
        release.wait()
        return Recorder()

    began = time.monotonic()
    [line] = reported(tmp_path, start)
    release.set()
    assert "it has not finished within 0.05 s" in line
    assert time.monotonic() - began < 30
