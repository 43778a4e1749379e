"""Every shipped recipe runs, at settings that take seconds."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from toolkit.cli import train
from toolkit.model.folder import weights_digest

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
SMALL = {
    "train": ["evaluate_batches=1", "learning_rate=1e-5"],
    "distill": [
        "answers={prompts: 20, held_out: 4, max_tokens: 12}",
        "student.layers=1",
        "steps=2",
        "batch_tokens=512",
        "trial={prompts: 2, max_tokens: 12}",
    ],
    "validate": ["tokens=200", "questions=9", "speed_tokens=8"],
}
BASE, BLOCKS = ROOT / "data/tiny-base", 2
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


@pytest.fixture(scope="module")
def shallow(tmp_path_factory):
    """The first blocks of the model that comes along."""
    folder = tmp_path_factory.mktemp("shallow") / "model"
    shutil.copytree(BASE, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = BLOCKS
    (folder / "config.json").write_text(json.dumps(config))
    deeper = tuple(f"model.layers.{number}." for number in range(BLOCKS, 6))
    weights = mx.load(str(BASE / "model.safetensors"))
    weights = {k: v for k, v in weights.items() if not k.startswith(deeper)}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_runs(path, shallow, tmp_path, capsys):
    arguments = [*shortened(path), f"output={tmp_path / 'run'}"]
    if "fresh:" not in path.read_text():
        arguments.append(f"model={shallow}")
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
