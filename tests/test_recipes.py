"""Every shipped recipe runs, at settings that take seconds."""

import json
from pathlib import Path

import pytest
import yaml
from lmx.cli.main import train
from lmx.models.checkpoint import weights_digest
from small_base import write_small_base

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
SMALL = {
    "train": ["eval_batches=1", "learning_rate=1e-5"],
    "draft": [
        "data_generation={num_prompts: 20, num_eval_prompts: 4, max_tokens: 12}",
        "draft_model.num_layers=1",
        "steps=2",
        "batch_tokens=512",
        "benchmark={num_prompts: 2, max_tokens: 12}",
    ],
    # Of the 48 tokens that a model has to answer, one that knows nothing needs all.
    "evaluate": [
        "num_tokens=200",
        "exact_match_samples=2",
        "num_samples=1",
        "latency_tokens=8",
    ],
}
GPTQ = [
    f"calibration.{v}"
    for v in ("num_tokens=1024", "max_seq_length=128", "num_eval_tokens=256")
]
GPTQ.append("refine_iters=1")
TUNE = [
    f"scale_tuning.{v}" for v in ("steps=2", "batch_tokens=256", "learning_rate=1e-3")
]
BATCH = {"batch_size": "batch_size=4", "batch_tokens": "batch_tokens=256"}


def shortened(path: Path) -> list[str]:
    """Arguments that make a recipe small, by the keys it has."""
    recipe = yaml.safe_load(path.read_text())
    arguments = ["data.max_samples=40"]
    stages, bits = [next(iter(stage.items())) for stage in recipe["stages"]], None
    for number, (kind, block) in enumerate(stages, 1):
        settings = [*SMALL.get(kind, [])]
        if kind == "train":
            settings += [value for key, value in BATCH.items() if key in block]
            settings += ["steps=2"] if "steps" in block else ["epochs=0.01"]
        if kind == "quantize" and block["method"] == "gptq":
            settings, bits = settings + GPTQ, block.get("bits", 4)
            # The compiling of one tuning is enough.
            if path.stem == "ptq_4bit":
                settings.append("scale_tuning=false")
            elif block.get("scale_tuning") is not False:
                settings += TUNE
        if "mixed_precision" in (block or {}):
            settings += [
                "mixed_precision.candidate_bits=[2, 3, 5]",
                "mixed_precision.candidate_group_sizes=[128]",
            ]
        if kind == "evaluate" and bits:
            # Of two bits, two steps make nothing good.
            settings.append(
                f"thresholds.max_perplexity_ratio={30 if bits == 2 else 1.5}"
            )
        arguments += [f"stages.{number}.{kind}.{setting}" for setting in settings]
    if "from_scratch" in recipe["model"]:
        arguments += [
            "model.from_scratch.num_hidden_layers=1",
            "model.from_scratch.vocab_size=512",
        ]
        arguments.append("data.max_seq_length=64")
    return arguments


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_small_base(tmp_path_factory.mktemp("small") / "model")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_runs(path, small, tmp_path, capsys):
    arguments = [*shortened(path), f"output={tmp_path / 'run'}"]
    if "from_scratch:" not in path.read_text():
        arguments.append(f"model={small}")
    assert train([str(path), *arguments]) == 0, capsys.readouterr().err
    report = json.loads((tmp_path / "run/report.json").read_text())
    names = {"base", "fine-tuned", "quantized"} - (
        {"fine-tuned"} if "ptq" in path.stem else set()
    )
    assert report["models"].keys() <= names
    assert report["models"]
    assert all(gate["passed"] for gate in report["thresholds"])
    assert (tmp_path / "run/model/config.json").is_file()
    if "- draft:" in path.read_text():
        draft = json.loads((tmp_path / "run/draft/draft.json").read_text())
        assert draft["target"] == weights_digest(tmp_path / "run/model")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_is_short_and_says_what_it_is(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 40
    assert lines[0].startswith("# ")
    assert "Qwen/Qwen3-0.6B" in path.read_text() or "from_scratch:" in path.read_text()
