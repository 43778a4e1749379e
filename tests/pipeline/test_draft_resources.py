"""Cost estimates of the draft stage: `--dry-run` shows them and refuses what does not
fit."""

import json
from dataclasses import replace

import pytest
from lmx.cli import main
from lmx.config.draft import DraftConfig
from lmx.config.model import ScratchModelConfig
from lmx.models import from_scratch
from lmx.pipeline import resources
from lmx.pipeline.draft.estimate import (
    draft_benchmark_work,
    draft_training_cost,
    generation_cost,
)
from lmx.pipeline.estimate import BatchShape, ModelShape
from lmx.pipeline.work import Work
from lmx.run.progress import readable_size

SHAPE = ScratchModelConfig(
    vocab_size=2048, hidden_size=128, intermediate_size=256, num_hidden_layers=8
)
BATCH = BatchShape(96, 1024, 1024)
RECIPE = """\
model: data/tiny-base
data: {train: data/skills/train.jsonl, max_seq_length: 64, max_samples: 30}
stages:
  - draft:
      draft_model: {num_layers: 2}
      data_generation: {num_prompts: 20, num_eval_prompts: 5, max_tokens: 16, top_k: 16}
      steps: 10
"""


def draft_cost(draft_model: dict, find_model=lambda name: None, **settings):
    config = DraftConfig(draft_model=draft_model, **settings)
    return draft_training_cost(target(), config, BATCH, 4, find_model)


def target() -> ModelShape:
    return replace(ModelShape(from_scratch.llama_config(SHAPE), 0), bytes=4_000_000)


@pytest.mark.parametrize(
    ("draft_model", "shape_change"),
    [
        ({"num_layers": 2}, {"num_hidden_layers": 2}),
        ({"num_layers": [0, 3, 7]}, {"num_hidden_layers": 3}),
        ({"num_layers": "auto"}, {"num_hidden_layers": 4}),
    ],
    ids=str,
)
def test_draft_training_cost_includes_the_target(draft_model, shape_change):
    cost = draft_cost(draft_model)
    shape = SHAPE.model_copy(update=shape_change)
    expected = ModelShape(from_scratch.llama_config(shape), 0).parameters
    assert cost.trained == cost.parameters == expected
    assert cost.memory["target"] == 4 * target().parameters


def test_online_target_costs_time_and_no_disk():
    offline, online = (
        draft_cost({"num_layers": 2}, data_generation={"top_k": k}) for k in (64, None)
    )
    assert offline.step.forward == 0
    assert online.step.forward == 2 * target().parameters * 1024
    data_generation = {"num_prompts": 90, "num_eval_prompts": 10, "max_tokens": 20}
    configs = [
        DraftConfig(data_generation=data_generation | {"top_k": k}) for k in (64, None)
    ]
    costs = [generation_cost(target(), config, 30.0) for config in configs]
    (stored, disk), (unstored, no_disk) = costs
    # 2 bytes per token id of 2048, 2 per log-probability, 4 for the remaining mass.
    assert f"{readable_size(5000 * (64 * 4 + 4))} in the cache" in disk
    assert all(f"at most {5000:,} tokens" in text for text in (disk, no_disk))
    assert "predictions: none" in no_disk
    per_token = 2 * target().parameters
    assert unstored == Work(generated=2000 * per_token, forward=3000 * per_token)
    assert stored == unstored + Work(forward=5000 * per_token)


def test_draft_benchmark_work_grows_with_prompts():
    def work(**benchmark):
        config = DraftConfig(benchmark=benchmark)
        return draft_benchmark_work(target(), config).decoded

    one = work(num_prompts=1, max_tokens=8)
    assert work(num_prompts=2, max_tokens=32) == 8 * one


def test_draft_cost_of_a_hub_model_is_unknown(tmp_path):
    assert draft_cost({"init_from": "some/sibling"}) is None
    sizes = [SHAPE.model_copy(update={"num_hidden_layers": count}) for count in (3, 2)]
    sibling, pruned = map(from_scratch.llama_config, sizes)
    (tmp_path / "config.json").write_text(json.dumps(sibling))
    cost = draft_cost({"init_from": "some/sibling"}, lambda name: tmp_path)
    assert cost.trained == ModelShape(pruned, 0).parameters


def test_dry_run_shows_data_memory_and_time(tmp_path, capsys):
    recipe = tmp_path / "draft.yaml"
    recipe.write_text(RECIPE)
    assert main.train([str(recipe), "--dry-run"]) == 0
    output = capsys.readouterr().out
    for expected in (
        "data     1-draft: generates at most ",
        "(target ",
        "for 10 steps",
    ):
        assert expected in output


def test_draft_that_does_not_fit_is_refused_with_remedies(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(resources, "memory_limit", lambda: 1_000_000)
    recipe = tmp_path / "draft.yaml"
    recipe.write_text(RECIPE)
    assert main.train([str(recipe), "--dry-run"]) == 3
    assert "stages.1.draft.batch_tokens=1024" in capsys.readouterr().err


def test_draft_model_that_cannot_be_pruned_is_refused(tmp_path, capsys):
    recipe = tmp_path / "draft.yaml"
    recipe.write_text(RECIPE.replace("num_layers: 2", "num_layers: [0, 9]"))
    assert main.train([str(recipe), "--dry-run"]) == 2
    assert "there is no block 9" in capsys.readouterr().err
