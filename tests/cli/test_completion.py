"""Completion in shells: what is offered, and bash itself."""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from lmx.cli import completion, main
from lmx.config import bundled

BIN = Path(sys.executable).parent
# As bash calls the function after the tabulator key.
BASH = """\
eval "$(lmx completion bash)"
for line in "$@"; do
    COMP_LINE=$line COMP_POINT=${#line} COMP_TYPE=9 COMPREPLY=()
    _python_argcomplete "${line%% *}"
    echo "${COMPREPLY[@]}"
done
"""


def offered(prefix: str, recipe: str | None = "qat_4bit") -> list[str]:
    arguments = argparse.Namespace(recipe=recipe)
    words = completion.override_keys(prefix, arguments)
    return [word for word in words if word.startswith(prefix)]


def test_override_keys_are_those_of_the_schema():
    assert offered("data.max") == ["data.max_seq_length=", "data.max_samples="]
    assert "stages.train.qat.bits=" in offered("stages.train.qat.")
    # A list or a mapping is set as a whole.
    assert offered("stages.train.sample_prompts") == ["stages.train.sample_prompts="]
    every = offered("")
    assert len(set(every)) == len(every) > 50


def test_override_keys_are_those_of_the_stages_of_the_recipe(tmp_path):
    assert offered("stages.quantize") == []
    assert offered("stages.draft.steps", "distill_draft") == ["stages.draft.steps="]
    # One of two stages of a kind needs its number.
    assert offered("stages.train", "qat_2bit") == []
    assert offered("stages.3.train.pack", "qat_2bit") == ["stages.3.train.packing="]
    for unreadable in (None, "no_such", str(tmp_path)):
        assert offered("stages.draft.steps", unreadable) == ["stages.draft.steps="]
    (tmp_path / "odd.yaml").write_text("stages: [7, {}, {draft: }]\n- x: [")
    assert offered("stages.draft.steps", str(tmp_path / "odd.yaml")) == []


def test_override_values_are_the_choices_of_the_schema():
    key = "stages.train.optimizer="
    names = ["adamw", "adamw_8bit", "adafactor", "lion", "lion_8bit", "muon", "sgd"]
    assert offered(key) == [f"{key}{name}" for name in names]
    key = "stages.train.packing="
    assert offered(f"{key}t") == [f"{key}true"]
    assert offered("seed=") == []


def test_recipe_names_are_included_recipes_and_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "other.txt").touch()
    names = completion.recipe_names("")
    assert set(bundled.bundled_recipes()) <= set(names)
    assert "mine.yaml" in names
    assert "other.txt" not in names


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_completion_prints_the_script_of_a_shell(shell, capsys):
    assert main.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert {"bash": "complete -o", "zsh": "#compdef lmx", "fish": "complete "}[
        shell
    ] in script
    assert "lmx-train" in script


@pytest.mark.skipif(
    not shutil.which("bash") or not (BIN / "lmx").exists(), reason="needs both"
)
def test_completion_in_bash():
    lines = {
        "lmx rec": "recipes",
        "lmx recipes copy qat_4": "qat_4bit",
        "lmx-train qat_4bit stages.train.optimizer=m": "muon",
        "lmx train qat_4bit --ig": "--ignore-limits",
    }
    done = subprocess.run(
        ["bash", "-c", BASH, "bash", *lines],
        env={"PATH": f"{BIN}:/usr/bin:/bin", "COMP_WORDBREAKS": " \t\n\"'><=;|&(:"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.replace(" \n", "\n").splitlines() == [*lines.values()], done
