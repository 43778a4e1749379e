"""A run with a tracker: the tracked values, and an unchanged outcome."""

import os
from pathlib import Path

import pytest
import warm
import yaml
from lmx.installation import install_command
from tiny_runs import EVALUATE, TRAIN, Run

PROGRAM = "import sys; from lmx.cli.main import train; sys.exit(train(sys.argv[1:]))"
# The same, and fails if a module of wandb was imported.
WITHOUT_WANDB = """
import sys
import lmx
from lmx.cli.main import train

code = train(sys.argv[1:])
imported = [name for name in sys.modules if name.partition(".")[0] == "wandb"]
sys.exit(f"imported: {imported}" if imported else code)
"""
# A wandb module that fails at the call FAILS_AT.
BROKEN = """
import os

def fail(place):
    if os.environ["FAILS_AT"] == place:
        raise ConnectionError(place + " refused")

fail("import")

class Settings:
    def __init__(self, **settings):
        pass

class Run:
    summary = {}
    def define_metric(self, *_, **__):
        pass
    def log(self, row):
        fail("log")
    def finish(self, exit_code):
        fail("finish")

def init(**_):
    fail("init")
    return Run()
"""


@pytest.fixture(scope="module")
def make(tmp_path_factory, base):
    def make(*stages, **tracker):
        run = Run(tmp_path_factory.mktemp("run"), *stages, model=base)
        if tracker:
            recipe = yaml.safe_load(run.recipe.read_text())
            run.recipe.write_text(yaml.safe_dump(recipe | {"tracker": tracker}))
        return run

    return make


@pytest.fixture(scope="module")
def expected(make):
    """The outcome of a run without a tracker."""
    run = make({"train": TRAIN})
    assert run() == 0
    assert not (run.output / "wandb").exists()
    return run.outcome()


def launch(run, *more, **environment):
    """Run in a subprocess, because wandb starts threads and a service."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    return warm.run(PROGRAM, *run.arguments(*more), env=environ | environment)


def session_files(run):
    """The files of wandb: one per start of the run."""
    return sorted((run.output / "wandb").glob("offline-run-*/*.wandb"))


def test_tracker_files_are_in_the_run_directory(make, expected):
    run = make({"train": TRAIN}, {"evaluate": EVALUATE}, type="wandb", name="a name")
    # The recipe overrides the environment.
    done = launch(run, WANDB_MODE="online", WANDB_API_KEY="0" * 40)
    assert done.returncode == 0, done.stderr
    assert "wandb" not in (done.stdout + done.stderr).lower()
    [file] = session_files(run)
    content = file.read_bytes()
    for name in ("train/loss", "train/learning_rate", "valid/loss", "step"):
        assert f"1-train/{name}".encode() in content
    for text in (b"tuned/perplexity", b"a name", b"save_steps"):
        assert text in content
    written = [path for path in (run.output / "wandb").rglob("*") if path.is_file()]
    assert not any(b"0" * 40 in path.read_bytes() for path in written)
    models, records = run.outcome()
    assert (models, [r for r in records if r["stage"] == "1-train"]) == expected


def test_resumed_run_keeps_tracker_id(make, expected):
    run = make({"train": TRAIN}, type="wandb")
    assert run.run_with_signal("SIGKILL", "step", 8).returncode < 0
    # The tracker settings are not part of the recipe hash.
    assert launch(run, "tracker.project=other").returncode == 0
    assert run.outcome() == expected
    run_id = (run.output / "wandb/run-id").read_text()
    assert {path.name for path in session_files(run)} == {f"run-{run_id}.wandb"}


@pytest.mark.parametrize(
    "place",
    [
        "import",
        "log",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("init", "finish")),
    ],
)
def test_broken_tracker_does_not_stop_the_run(make, expected, tmp_path, place):
    (tmp_path / "wandb.py").write_text(BROKEN)
    run = make({"train": TRAIN}, type="wandb")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    done = launch(run, FAILS_AT=place, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    reason = f"continuing without it: ConnectionError: {place} refused"
    assert done.stderr.splitlines() == [f"warning: the tracker wandb failed, {reason}"]
    assert run.outcome() == expected


def test_tracker_without_key_does_not_prompt(make, tmp_path):
    run = make({"train": TRAIN | {"steps": 1}}, type="wandb", mode="online")
    done = launch(run, HOME=str(tmp_path), NETRC=str(tmp_path / "none"))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1
    assert "there is no API key: see `wandb login`" in done.stderr


def test_several_trackers_get_the_same_run(make, expected):
    pytest.importorskip("tensorboardX")
    run = make({"train": TRAIN}, type="wandb")
    assert launch(run, "tracker=[wandb, tensorboard]").returncode == 0
    assert run.outcome() == expected
    assert session_files(run)
    [events] = (run.output / "tensorboard/1-train").iterdir()
    for name in (b"train/loss", b"valid/loss", b"train/learning_rate"):
        assert name in events.read_bytes()


def test_nothing_imports_wandb_before_a_recipe_names_it(make):
    run = make({"train": TRAIN}, {"evaluate": EVALUATE}, "export")
    done = warm.run(WITHOUT_WANDB, *run.arguments())
    assert done.returncode == 0, done.stderr
    named = run.arguments("tracker=wandb", f"output={run.folder / 'named'}")
    assert "imported: ['wandb" in warm.run(WITHOUT_WANDB, *named).stderr


def test_missing_tracker_is_refused_before_the_run(make, monkeypatch, capsys):
    """With the command that installs it."""
    run = make({"train": TRAIN}, type="wandb")
    monkeypatch.setattr("lmx.pipeline.plan.is_installed", lambda name: name == "wandb")
    for flags in ([], ["--dry-run"]):
        assert run("tracker=[wandb, trackio]", *flags) == 2
        error = capsys.readouterr().err
        assert "trackio is not installed" in error
        assert install_command("trackio") in error
    assert run("tracker={project: lmx}") == 2
    assert "type" in capsys.readouterr().err
    assert not run.output.exists()
