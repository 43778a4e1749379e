"""A token in a recipe or an argument is in no file, no output and no tracker."""

import json
from types import SimpleNamespace

import pytest
import yaml
from lmx.cli import main
from lmx.config.redaction import REDACTED
from lmx.run.trackers import TRACKERS
from tiny_runs import SCRATCH_CONFIG, TRAIN, Run

SECRETS = {
    "comment": "hf_aB3dEfGhIjKlMnOpQrStUvWxYz0123456789",
    "value": "sk-proj-aB3dEfGhIjKlMnOpQrStUvWx",
    "argument": "ghp_aB3dEfGhIjKlMnOpQrStUvWxYz0123456789",
    "password": "correct-horse",
}
SHORT = TRAIN | {"steps": 2, "eval_steps": 2, "logging_steps": 1}


class Tracked:
    """A tracker that notes what it gets."""

    def __init__(self, received, config, **settings):
        self.received = received
        received += [config.name, settings["name"], settings["recipe"]]

    def log(self, *record):
        self.received.append(record)

    def finish(self, summary, code):
        self.received.append((summary, code))


@pytest.fixture
def secret_run(tmp_path):
    """A run whose recipe has all secrets but that of an argument."""
    train = SHORT | {"sample_prompts": [f"use {SECRETS['value']}."]}
    model = {"from_scratch": SCRATCH_CONFIG}
    run = Run(tmp_path, {"train": train}, "export", model=model)
    recipe = yaml.safe_load(run.recipe.read_text())
    recipe["model"] = model
    run.recipe.write_text(
        f"# Mine: {SECRETS['comment']}\n"
        + yaml.safe_dump(recipe, sort_keys=False)
        + f"tracker: {{type: wandb}}  # password: {SECRETS['password']}\n"
    )
    return run


def leaks(text: str) -> list[str]:
    return [name for name, secret in SECRETS.items() if secret in text]


def start(run, monkeypatch, capfd, *arguments, recipe=None) -> tuple[str, list]:
    """Run with more arguments; returns what it printed, and what the tracker got."""
    received = []

    def track(config, **settings):
        return Tracked(received, config, **settings)

    tracker = SimpleNamespace(start=track, PACKAGE="wandb", EXTRA="")
    monkeypatch.setitem(TRACKERS, "wandb", tracker)
    recipe = str(recipe or run.recipe)
    assert main.train([recipe, f"output={run.output}", *arguments]) == 0
    printed = capfd.readouterr()
    return printed.out + printed.err, received


def test_secrets_are_in_no_output_and_redacted_recipes_resume(
    secret_run, monkeypatch, capfd
):
    name = f"tracker.name={SECRETS['argument']}"
    printed, received = start(secret_run, monkeypatch, capfd, name)
    files = [path for path in secret_run.output.rglob("*") if path.is_file()]
    assert len(files) > 15
    for path in files:
        assert not leaks(path.read_bytes().decode(errors="replace")), path
    assert not leaks(printed)
    [warning] = [line for line in printed.splitlines() if line.startswith("warning")]
    assert "line 1, " in warning
    assert ", the argument tracker.name: this looks like a token" in warning
    # The run itself and its tracker's settings have the real values.
    assert received[0] == SECRETS["argument"]
    assert not leaks(json.dumps(received[2:]))
    assert received[2]["tracker"][0]["name"] == REDACTED
    assert f"# Mine: {REDACTED}" in (secret_run.output / "recipe.yaml").read_text()
    assert f"tracker.name={REDACTED}" in secret_run.json("manifest.json")["command"]
    assert f"# Mine: {REDACTED}" in (secret_run.output / "model/README.md").read_text()
    assert f"use {REDACTED}." in (secret_run.output / "samples.jsonl").read_text()
    recipes = [secret_run.output / file for file in ("recipe.yaml", "resolved.yaml")]
    for recipe in (secret_run.recipe, *recipes):
        printed, _ = start(secret_run, monkeypatch, capfd, recipe=recipe)
        assert printed.count("already complete, skipping") == 2
    # Nothing is left to redact.
    assert "warning" not in printed
    manifest = secret_run.json("manifest.json")
    assert REDACTED not in json.dumps(manifest["stages"])
    assert len(manifest["recipe_hash"]) == 64
