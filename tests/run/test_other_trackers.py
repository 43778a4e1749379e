"""Trackio and MLflow get the same values as the other trackers, from small fakes.

The packages are large and are not installed for the tests. The fakes have the calls
that lmx makes; they fail for other ones.
"""

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
from lmx.config.trackers import TrackerConfig
from lmx.run import mlflow_tracker, trackio_tracker
from lmx.run.trackers import TrackerThread, finish_all, is_installed

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


def test_folder_without_code_is_no_installed_package(monkeypatch, tmp_path):
    """wandb writes a folder `wandb` where it runs."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "only_data").mkdir()
    for package, installed in {
        "only_data": False,
        "nothing": False,
        "json": True,
    }.items():
        monkeypatch.setattr(trackio_tracker, "PACKAGE", package)
        assert is_installed("trackio") is installed
