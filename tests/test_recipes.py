"""Every shipped recipe runs, at settings that take seconds."""

import json
from pathlib import Path

import pytest

from toolkit.cli import train
from toolkit.model.folder import weights_digest

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
SMALL = {
    "train": ["evaluate_batches=1", "learning_rate=1e-5"],
    "distill": [
        "answers={prompts: 20, held_out: 4, max_tokens: 12}",
        "steps=2",
        "batch_tokens=512",
        "trial={prompts: 2, max_tokens: 12}",
    ],
    "validate": ["tokens=200", "questions=9", "speed_tokens=8"],
}
BATCH = {"batch_size": "batch_size=4", "batch_tokens": "batch_tokens=256"}


def shortened(path: Path) -> list[str]:
    """Arguments that make a recipe small, by the keys it has."""
    text = path.read_text()
    arguments = ["data.limit=40"]
    for stage, settings in SMALL.items():
        if f"- {stage}:" in text:
            arguments += [f"stages.{stage}.{setting}" for setting in settings]
    if "- train:" in text:
        block = text.partition("- train:")[2].partition("\n  - ")[0]
        arguments += [f"stages.train.{v}" for k, v in BATCH.items() if f"{k}:" in block]
    if "- quantize:" in text and "method: gptq" in text:
        calibration = ("tokens=1024", "length=128", "held_out=256")
        tune = ("steps=2", "batch_tokens=256", "learning_rate=1e-3")
        arguments += [f"stages.quantize.calibration.{value}" for value in calibration]
        arguments.append("stages.quantize.rounds=1")
        # The compiling of one tuning is enough.
        if path.stem == "ptq_4bit":
            arguments.append("stages.quantize.tune=false")
        elif "tune: false" not in text:
            arguments += [f"stages.quantize.tune.{value}" for value in tune]
        # Of two bits, two steps make nothing good.
        ratio = 30 if "bits: 2" in text else 1.5
        arguments.append(f"stages.validate.require.perplexity_ratio={ratio}")
    if "budget:" in text:
        arguments.append("stages.quantize.budget.bits=[2, 3, 5]")
        arguments.append("stages.quantize.budget.group_sizes=[128]")
    if "- train:" in text and "steps:" in text:
        arguments.append("stages.train.steps=2")
    if "fresh:" in text:
        arguments += ["model.fresh.layers=1", "model.fresh.vocabulary=512"]
        arguments += ["stages.train.epochs=0.01", "data.max_length=64"]
    return arguments


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_runs(path, tmp_path, capsys):
    arguments = [*shortened(path), f"output={tmp_path / 'run'}"]
    assert train([str(path), *arguments]) == 0, capsys.readouterr().err
    report = json.loads((tmp_path / "run/report.json").read_text())
    names = {"base", "tuned", "quantized"} - (
        {"tuned"} if "ptq" in path.stem else set()
    )
    assert report["models"].keys() <= names
    assert report["models"]
    assert all(gate["passed"] for gate in report["gates"])
    assert (tmp_path / "run/model/config.json").is_file()
    if "- distill:" in path.read_text():
        draft = json.loads((tmp_path / "run/draft/draft.json").read_text())
        assert draft["target"] == weights_digest(tmp_path / "run/model")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_is_short_and_says_what_it_is(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 40
    assert lines[0].startswith("# ")
    assert "Qwen/Qwen3-0.6B" in path.read_text() or "fresh:" in path.read_text()
