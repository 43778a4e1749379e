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


@pytest.fixture(scope="module")
def secret_run(tmp_path_factory):
    """The finished run, its tracker, and what it printed."""
    train = SHORT | {"sample_prompts": [f"use {SECRETS['value']}."]}
    model = {"from_scratch": SCRATCH_CONFIG}
    run = Run(tmp_path_factory.mktemp("run"), {"train": train}, "export", model=model)
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


@pytest.fixture(scope="module")
def received(secret_run):
    return []


@pytest.fixture
def start(secret_run, received, monkeypatch, capfd):
    """Run with more arguments; returns what it printed."""

    def track(config, **settings):
        return Tracked(received, config, **settings)

    def start(*arguments, recipe=secret_run.recipe):
        tracker = SimpleNamespace(start=track, PACKAGE="wandb", INSTALL="")
        monkeypatch.setitem(TRACKERS, "wandb", tracker)
        output = f"output={secret_run.output}"
        assert main.train([str(recipe), output, *arguments]) == 0
        printed = capfd.readouterr()
        return printed.out + printed.err

    return start


def test_secrets_are_in_no_output_of_a_run(secret_run, received, start):
    name = f"tracker.name={SECRETS['argument']}"
    printed = start(name)
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


def test_redacted_recipes_resume_the_run(secret_run, start):
    for recipe in (
        secret_run.recipe,
        secret_run.output / "recipe.yaml",
        secret_run.output / "resolved.yaml",
    ):
        printed = start(recipe=recipe)
        assert printed.count("already complete, skipping") == 2
    # Nothing is left to redact.
    assert "warning" not in printed


def test_hashes_of_the_manifest_stay(secret_run):
    manifest = secret_run.json("manifest.json")
    assert REDACTED not in json.dumps(manifest["stages"])
    assert len(manifest["recipe_hash"]) == 64
