"""`lmx sweep`: every combination once, failures and interruptions, and the table."""

import json
import signal
from pathlib import Path

import pytest
from lmx.cli import main, sweep
from lmx.cli.sweep import expand, folder_name
from lmx.errors import INTERRUPTED, UserError

RATE = "stages.train.learning_rate"


@pytest.mark.parametrize(
    ("arguments", "runs"),
    [
        (
            ["a.b=1e-4,3e-4", "seed=0,1,0"],
            [("1e-4", "0"), ("1e-4", "1"), ("3e-4", "0"), ("3e-4", "1")],
        ),
        # Commas in brackets and quotes belong to a value.
        (['data.train=[a, "b,c"]'], [('[a, "b,c"]',)]),
        (["a=[1, 2],{x: 1, y: 2},'p,q'"], [("[1, 2]",), ("{x: 1, y: 2}",), ("'p,q'",)]),
        (["a=https://b/c:d, x y"], [("https://b/c:d",), ("x y",)]),
        (["a="], [("",)]),
        (["a=[1,2"], [("[1,2",)]),
        ([], [()]),
    ],
)
def test_sweep_has_every_combination_once(arguments, runs):
    keys = [argument.partition("=")[0] for argument in arguments]
    assert expand(arguments) == [dict(zip(keys, run, strict=True)) for run in runs]


@pytest.mark.parametrize("words", ["a", "=1", "output=x", "a=1 a=2"])
def test_wrong_arguments_are_refused(words):
    with pytest.raises(UserError):
        expand(words.split())


def test_names_of_folders_are_short_safe_and_distinct():
    values = [
        {"stages.train.learning_rate": "1e-4", "seed": "0"},
        {"stages.train.learning_rate": "1e-4", "seed": "1"},
        {"model": "a/b"},
        {"model": "a-b"},
        {"data.train": "x" * 300},
        {"data.train": "x" * 301},
        {},
    ]
    names = [*map(folder_name, values)]
    assert names[0] == "train.learning_rate=1e-4_seed=0"
    assert len({*names}) == len(values)
    assert all("/" not in name and len(name) < 120 for name in names)


@pytest.fixture
def recipe(make_checkpoint, tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Add {n} and 1.", "completion": f"{n + 1}"} for n in range(16)]
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "tiny.yaml").write_text(
        f"model: {make_checkpoint()}\n"
        "data: {train: my.jsonl, valid: my.jsonl, max_seq_length: 64}\n"
        "stages:\n  - train: {steps: 2, batch_size: 2, logging_steps: 1}\n"
    )
    return "tiny.yaml"


@pytest.fixture
def in_process(monkeypatch) -> list[list[str]]:
    """Runs without a new process; the list gets their arguments."""
    calls: list[list[str]] = []

    def run(words: list[str]) -> int:
        calls.append(words)
        return main.train(words)

    monkeypatch.setattr(sweep, "_run", run)
    return calls


def test_sweep_runs_everything_once_and_goes_on_after_a_failure(
    recipe, in_process, tmp_path, capsys
):
    words = ["sweep", recipe, f"{RATE}=1e-3,3e-3", "seed=0,1", "--quiet"]
    folder = tmp_path / "exports/tiny-sweep"
    broken = folder / "train.learning_rate=1e-3_seed=1"
    broken.mkdir(parents=True)
    (broken / "foreign.txt").write_text("not of lmx")
    assert main.main(words) == 1
    assert len(in_process) == 4
    shown = capsys.readouterr()
    assert "1e-3 1 of 2" in " ".join(shown.out.split())
    assert "3e-3 2 of 2" in " ".join(shown.out.split())
    assert f"exit code 2: {Path('exports/tiny-sweep') / broken.name}" in (
        shown.out + shown.err
    )
    page = (folder / "compare.html").read_text()
    assert "standard errors over the seeds" in page
    assert "2 of 2" in page
    assert "<title>tiny-sweep</title>" in page
    # The same command runs only what is not finished.
    (broken / "foreign.txt").unlink()
    assert main.main(words) == 0
    assert [call[2] for call in in_process[4:]] == ["seed=1"]
    assert "1e-3 2 of 2" in " ".join(capsys.readouterr().out.split())
    # A run that has not ended well is not finished.
    manifest = broken / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"done"', '"failed"'))
    assert main.main([*words, "--dry-run"]) == 0
    assert capsys.readouterr().out.count("to run") == 1


def test_interrupted_run_ends_the_sweep(recipe, monkeypatch, capsys):
    calls: list[list[str]] = []
    monkeypatch.setattr(sweep, "_run", lambda w: calls.append(w) or INTERRUPTED)
    words = ["sweep", recipe, "seed=0,1", "--ignore-limits", "--allow-python"]
    assert main.main([*words, "--output", "here", "--quiet"]) == INTERRUPTED
    # Every run, and the command that resumes the sweep, has its flags.
    assert {*words[3:]} < {*calls[0]}
    command = f"lmx {' '.join(words)} --output here"
    assert f"to resume: {command}\n" in capsys.readouterr().err


def test_run_is_a_process_whose_exit_code_counts(tmp_path, capfd):
    assert sweep._run([str(tmp_path / "none.yaml")]) == 2
    assert "no such recipe" in capfd.readouterr().err


@pytest.fixture
def sigint_interrupts():
    """Ctrl-C raises KeyboardInterrupt also in tests that run in the background, where
    the shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_interruption_reaches_the_process(sigint_interrupts, monkeypatch):
    monkeypatch.setattr(
        sweep,
        "PROGRAM",
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "time.sleep(60)",
    )
    assert sweep._run([]) == INTERRUPTED


def test_invalid_combination_runs_nothing(recipe, in_process, capsys):
    assert main.main(["sweep", recipe, f"{RATE}=1e-3,-1"]) == 2
    assert RATE in capsys.readouterr().err
    assert not in_process


def test_dry_run_lists_the_runs(recipe, in_process, capsys):
    words = ["sweep", recipe, "seed=4,5", "--output", "here", "--dry-run"]
    assert main.main(words) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["to run  here/seed=4", "to run  here/seed=5", "2 runs"]
    assert not in_process
    assert not Path("here").exists()
