"""Every included recipe runs, with settings that take seconds."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from lmx.cli.main import train
from lmx.config.errors import ConfigErrors
from lmx.config.loader import load_recipe
from lmx.models.checkpoint import weights_digest
from small_base import write_small_base

pytestmark = pytest.mark.fused

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
    # An untrained model generates the maximum of 48 tokens per example.
    "evaluate": [
        "num_tokens=200",
        "exact_match.samples=2",
        "num_samples=1",
        "latency_tokens=8",
    ],
}
GPTQ = [
    "calibration.num_tokens=1024",
    "calibration.max_seq_length=128",
    "calibration.num_eval_tokens=256",
    "refine_iters=1",
]
BATCH = {"batch_size": "batch_size=4", "batch_tokens": "batch_tokens=256"}


def small_settings(path: Path) -> list[str]:
    """Overrides that make a recipe small, for the keys that it has."""
    recipe = yaml.safe_load(path.read_text())
    overrides = ["data.max_samples=40"]
    stages, bits = [next(iter(stage.items())) for stage in recipe["stages"]], None
    for number, (kind, block) in enumerate(stages, 1):
        settings = [*SMALL.get(kind, [])]
        if kind == "draft" and block.get("architecture", "model") != "model":
            settings.remove("draft_model.num_layers=1")
            settings.append("drafter={num_layers: 1, num_draft_tokens: 2}")
        if kind == "train":
            settings += [value for key, value in BATCH.items() if key in block]
            lengths = {"steps": "2", "budget": "2048", "epochs": "0.01"}
            settings += [f"{key}={n}" for key, n in lengths.items() if key in block]
        if kind == "quantize" and block["method"] == "gptq":
            settings, bits = settings + GPTQ, block.get("bits", 4)
        if "mixed_precision" in (block or {}):
            settings += [
                "mixed_precision.candidate_bits=[2, 3, 5]",
                "mixed_precision.candidate_group_sizes=[128]",
            ]
        if kind == "train" and "qat" in block:
            bits = block["qat"].get("bits", 4)
        if kind == "evaluate" and bits:
            # Two steps do not make a good model, least of all one of 2 bits.
            ratio = 30 if bits == 2 else 3
            settings.append(f"thresholds.max_perplexity_ratio={ratio}")
        overrides += [f"stages.{number}.{kind}.{setting}" for setting in settings]
    if "from_scratch" in recipe["model"]:
        overrides += [
            "model.from_scratch.num_hidden_layers=1",
            "model.from_scratch.vocab_size=512",
            "data.max_seq_length=64",
        ]
    return overrides


@pytest.fixture(scope="module")
def small_base(tmp_path_factory):
    return write_small_base(tmp_path_factory.mktemp("small") / "model")


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_runs(path, small_base, tmp_path, capsys):
    overrides = [*small_settings(path), f"output={tmp_path / 'run'}"]
    if "from_scratch:" not in path.read_text():
        overrides.append(f"model={small_base}")
    assert train([str(path), *overrides]) == 0, capsys.readouterr().err
    report = json.loads((tmp_path / "run/report.json").read_text())
    names = {"base", "fine-tuned", "rounded", "quantized"}
    if "ptq" in path.stem:
        names.remove("fine-tuned")
    assert report["models"].keys() <= names
    assert report["models"]
    assert all(threshold["passed"] for threshold in report["thresholds"])
    assert (tmp_path / "run/model/config.json").is_file()
    if "- draft:" in path.read_text():
        draft = json.loads((tmp_path / "run/draft/draft.json").read_text())
        assert draft["target"] == weights_digest(tmp_path / "run/model")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_short_and_described(path):
    text = path.read_text()
    lines = text.splitlines()
    assert len(lines) <= 40
    assert lines[0].startswith("# ")
    assert "Qwen/Qwen3-0.6B" in text or "from_scratch:" in text


# A key that a comment sets, and a value that a comment offers for a key.
COMMENTED = re.compile(r"^( +)# (\w+: .*)$")
OFFERED = re.compile(r"^( +(?:- )?(?:# )?\w+: )\S+( +# or )(\w+)(?=[,;]|$)")


def with_comments_applied(text: str) -> Iterator[str]:
    """The recipe with the value of each such comment."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        changed = []
        if found := OFFERED.match(line):
            changed.append(f"{found[1]}{found[3]}".replace("# ", ""))
        if found := COMMENTED.match(line):
            changed.append(found[1] + found[2])
        for new in changed:
            yield "\n".join([*lines[:number], new, *lines[number + 1 :]])


COMMENTS = [
    (path, text) for path in RECIPES for text in with_comments_applied(path.read_text())
]


@pytest.mark.parametrize(("path", "text"), COMMENTS)
def test_values_in_comments_are_valid(path, text):
    assert load_recipe(path, text=text).recipe


def test_comment_with_a_value_that_is_gone_is_found():
    path = ROOT / "recipes/ptq_4bit.yaml"

    def offered(value: str) -> str:
        comment = f"      # effort: fast  # or {value}, several times slower"
        text = re.sub("^ *# effort.*$", comment, path.read_text(), flags=re.MULTILINE)
        return next(with_comments_applied(text))

    assert load_recipe(path, text=offered("standard")).recipe
    with pytest.raises(ConfigErrors, match="expected one of"):
        load_recipe(path, text=offered("best"))
