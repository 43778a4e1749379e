"""TrackerThread sends every record in order, and never ends or blocks a run."""

import threading
import time

import pytest
from lmx.config.trackers import TrackerConfig
from lmx.run import trackers
from lmx.run.logger import RunLogger
from lmx.run.trackers import TrackerThread, finish_all
from pydantic import ValidationError

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

    def log(self, stage, step, values):
        self._note("log", stage, step, values)

    def finish(self, summary, code):
        self._note("finish", summary, code)


def reported(folder, start):
    """Report three records to a tracker."""
    logger = RunLogger(folder, quiet=True)
    logger.stage = "1-train"
    logger.trackers = [TrackerThread("one", start, logger.warning)]
    for record in RECORDS:
        logger.metrics(record | {"norm": float("nan")})
    finish_all(logger.trackers, {"base/loss": 2.0}, 0)
    return [x for x in (folder / "log.txt").read_text().splitlines() if "tracker" in x]


def test_tracker_gets_every_record(tmp_path):
    recorder = Recorder()
    (tmp_path / "log.txt").touch()
    assert reported(tmp_path, lambda: recorder) == []
    # The norm is not a number.
    logged = [
        ("log", "1-train", record["step"], {"train/loss": record["loss"]})
        for record in RECORDS
    ]
    assert recorder.calls == [("start",), *logged, ("finish", {"base/loss": 2.0}, 0)]


@pytest.mark.parametrize("error", [OSError, ImportError, SystemExit])
@pytest.mark.parametrize("place", ["start", "log", "finish"])
def test_tracker_error_is_logged_once(tmp_path, capsys, place, error):
    [line] = reported(tmp_path, lambda: Recorder(place, error))
    reason = f"{error.__name__}: no such host"
    assert line.endswith(f"the tracker one failed, continuing without it: {reason}")
    assert capsys.readouterr().err.count("tracker") == 1
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == len(RECORDS)


def test_tracker_error_redacts_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")

    def start():
        raise ValueError("bad key 0123456789abcdef")

    [line] = reported(tmp_path, start)
    assert line.endswith("ValueError: bad key REDACTED")


def test_tracker_error_redacts_passwords_of_urls(tmp_path):
    def start():
        raise OSError("no answer of https://me:word@host/api")

    [line] = reported(tmp_path, start)
    assert line.endswith("OSError: no answer of https://me:REDACTED@host/api")


def test_broken_tracker_leaves_the_others(tmp_path):
    logger = RunLogger(tmp_path, quiet=True)
    logger.stage = "1-train"
    recorder = Recorder()
    starts = {"broken": lambda: Recorder("log"), "whole": lambda: recorder}
    logger.trackers = [
        TrackerThread(name, start, logger.warning) for name, start in starts.items()
    ]
    for record in RECORDS:
        logger.metrics(record)
    finish_all(logger.trackers, {}, 1)
    assert len(recorder.calls) == 1 + len(RECORDS) + 1
    log = (tmp_path / "log.txt").read_text()
    assert "the tracker broken failed, continuing without it: OSError" in log
    assert "whole" not in log


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


@pytest.mark.parametrize(
    ("kind", "key"),
    [("mlflow", "mode"), ("wandb", "space_id"), ("trackio", "tracking_uri")],
)
def test_key_of_another_tracker_is_refused(kind, key):
    with pytest.raises(ValidationError, match=f"{key} is a key of .*, not of {kind}"):
        TrackerConfig(type=kind, **{key: "online"})
