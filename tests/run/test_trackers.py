"""Trackers get every record in order, and never end or block a run.

Trackio and MLflow are large, and are not installed for the tests. Their fakes have the
calls that lmx makes; they fail for other ones.
"""

import os
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest
from lmx.config.trackers import TrackerConfig
from lmx.run import mlflow_tracker, tensorboard_tracker, trackers, trackio_tracker
from lmx.run.logger import RunLogger
from lmx.run.trackers import TrackerThread, finish_all, is_installed
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


@pytest.mark.parametrize(
    ("place", "error"),
    [("start", ImportError), ("log", OSError), ("finish", SystemExit)],
)
def test_tracker_error_is_logged_once(tmp_path, capsys, place, error):
    [line] = reported(tmp_path, lambda: Recorder(place, error))
    reason = f"{error.__name__}: no such host"
    assert line.endswith(f"the tracker one failed, continuing without it: {reason}")
    assert capsys.readouterr().err.count("tracker") == 1
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == len(RECORDS)


def test_tracker_error_redacts_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")

    def start():
        raise ValueError("bad key 0123456789abcdef at https://me:word@host/api")

    [line] = reported(tmp_path, start)
    assert line.endswith("ValueError: bad key REDACTED at https://me:REDACTED@host/api")


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


def test_folder_without_code_is_no_installed_package(monkeypatch, tmp_path):
    """wandb writes a folder `wandb` where it runs."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "only_data").mkdir()
    for package in ("only_data", "nothing", "json"):
        monkeypatch.setattr(trackio_tracker, "PACKAGE", package)
        assert is_installed("trackio") is (package == "json")


RECIPE = {"model": {"path": "a"}, "stages": [{"train": {"steps": 3}}]}
RECORD = {"stage": "1-train", "kind": "train", "step": 2, "loss": 0.5, "norm": None}


def fake_module(monkeypatch, name, **attributes):
    module = ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)
    if "." in name:
        parent, _, child = name.rpartition(".")
        setattr(sys.modules[parent], child, module)
    return module


def track(module, config, folder):
    """Track one record of a run; returns the warnings."""
    warnings = []

    def start():
        return module.start(config, folder=folder, name="try", recipe=RECIPE)

    tracker = TrackerThread(config.type, start, warnings.append)
    tracker.log(RECORD)
    finish_all([tracker], {"base/perplexity": 3.0}, 1)
    return warnings


@pytest.fixture
def trackio(monkeypatch):
    calls = []

    def init(*, project, name, space_id, private, config, resume, embed, **auto):
        calls.append(("init", project, name, space_id, private, config, resume))
        assert not embed
        assert auto == {"auto_log_gpu": False, "auto_log_cpu": False}
        module.print("* Trackio project initialized")
        return SimpleNamespace(
            log=lambda values, step=None: calls.append(("log", values, step)),
            finish=lambda: calls.append(("finish",)),
        )

    module = fake_module(monkeypatch, "trackio", init=init, print=print)
    for part in ("deploy", "run", "utils"):
        fake_module(monkeypatch, f"trackio.{part}")
    return calls


def test_trackio_gets_the_values_and_stays_local(
    trackio, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("TRACKIO_SPACE_ID", "someone/space")
    assert track(trackio_tracker, TrackerConfig(type="trackio"), tmp_path) == []
    [init, *calls] = trackio
    name = f"try-{(tmp_path / 'trackio/run-id').read_text()}"
    assert init == ("init", "lmx", name, None, None, RECIPE, "allow")
    assert calls == [
        ("log", {"1-train/train/loss": 0.5}, 2),
        ("log", {"base/perplexity": 3.0}, None),
        ("finish",),
    ]
    assert capsys.readouterr().out == ""
    assert "TRACKIO_SPACE_ID" not in os.environ
    # A resumed run has the same name.
    track(trackio_tracker, TrackerConfig(type="trackio"), tmp_path)
    assert trackio[4] == init


@pytest.fixture
def mlflow(monkeypatch):
    calls = []

    class Client:
        def __init__(self, tracking_uri):
            calls.append(("client", tracking_uri))

        def get_experiment_by_name(self, name):
            return None

        def create_experiment(self, name):
            return f"id of {name}"

        def create_run(self, experiment_id, *, run_name):
            calls.append(("create", experiment_id, run_name))
            return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

        def update_run(self, run_id, *, status):
            calls.append(("update", run_id, status))

        def log_batch(self, run_id, *, metrics=(), params=()):
            calls.append(("log", run_id, [*metrics, *params]))

        def set_terminated(self, run_id, status):
            calls.append(("end", run_id, status))

    fake_module(monkeypatch, "mlflow", MlflowClient=Client)
    fake_module(
        monkeypatch,
        "mlflow.entities",
        Metric=lambda key, value, timestamp, step: (key, value, step),
        Param=lambda key, value: (key, value),
    )
    return calls


def test_mlflow_gets_the_values_and_resumes_its_run(mlflow, tmp_path):
    config = TrackerConfig(type="mlflow", tracking_uri="http://localhost:5000")
    assert track(mlflow_tracker, config, tmp_path) == []
    logged = [
        ("log", "r1", [("1-train/train/loss", 0.5, 2)]),
        ("log", "r1", [("summary/base/perplexity", 3.0, 0)]),
        ("end", "r1", "FAILED"),
    ]
    assert mlflow == [
        ("client", "http://localhost:5000"),
        ("create", "id of lmx", "try"),
        ("log", "r1", [("model.path", "a"), ("stages.1.train.steps", "3")]),
        *logged,
    ]
    mlflow.clear()
    assert track(mlflow_tracker, config, tmp_path) == []
    assert mlflow[1:] == [("update", "r1", "RUNNING"), *logged]


needs_tensorboard = pytest.mark.skipif(
    not is_installed("tensorboard"), reason="needs tensorboardX"
)


def board_events(path):
    """What TensorBoard's own reader reads."""
    name = "tensorboard.backend.event_processing.event_accumulator"
    return pytest.importorskip(name).EventAccumulator(str(path)).Reload()


def open_logger(folder):
    logger = RunLogger(folder, quiet=True)

    def start():
        config = TrackerConfig(type="tensorboard")
        return tensorboard_tracker.start(
            config, folder=folder, name="try", recipe=RECIPE
        )

    logger.trackers = [TrackerThread("tensorboard", start, logger.warning)]
    return logger


def train(logger, steps, *, loss=10.0):
    logger.stage = "1-train"
    for step in steps:
        record = {"kind": "train", "step": step, "loss": loss - step, "norm": 0.5}
        logger.metrics(record | {"speed": float("inf")})


def read(folder):
    """Steps and values by tag, as TensorBoard shows them."""
    events = board_events(folder)
    tags = events.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags}


@needs_tensorboard
def test_tensorboard_reads_the_metrics_of_every_stage(tmp_path):
    logger = open_logger(tmp_path)
    train(logger, [1, 2])
    logger.stage = "2-train, fp_baseline"
    logger.metrics({"kind": "valid", "step": 0, "loss": 1.5})
    finish_all(logger.trackers, {"quantized/perplexity": 3.25}, 0)
    # No tracker failed.
    assert not (tmp_path / "log.txt").exists()
    folder = tmp_path / "tensorboard"
    assert read(folder / "1-train") == {
        "train/loss": [(1, 9.0), (2, 8.0)],
        "train/norm": [(1, 0.5), (2, 0.5)],
    }
    assert read(folder / "2-train-fp_baseline") == {"valid/loss": [(0, 1.5)]}
    [summary] = [f for f in folder.iterdir() if f.is_file()]
    assert read(summary) == {"quantized/perplexity": [(0, 3.25)]}
    [text] = board_events(summary).Tensors("recipe/text_summary")
    assert b"stages.1.train.steps: 3" in text.tensor_proto.string_val[0]


@needs_tensorboard
def test_tensorboard_drops_the_steps_that_a_resumed_run_repeats(tmp_path):
    killed = open_logger(tmp_path)
    train(killed, [1, 2, 3, 4])
    finish_all(killed.trackers, {}, 1)
    resumed = open_logger(tmp_path)
    train(resumed, [3, 4, 5], loss=20.0)
    finish_all(resumed.trackers, {}, 0)
    assert read(tmp_path / "tensorboard/1-train")["train/loss"] == [
        (1, 9.0),
        (2, 8.0),
        (3, 17.0),
        (4, 16.0),
        (5, 15.0),
    ]
