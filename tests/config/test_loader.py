"""A recipe loads with overrides, and its resolved form loads to the same recipe."""

import re
import textwrap
from pathlib import Path

import pytest
from lmx.config import loader
from lmx.config.bundled import BUNDLED
from lmx.config.errors import ConfigErrors
from lmx.errors import UserError
from lmx.pipeline.plan import load as load_recipe
from lmx.pipeline.plan import plan, recipe_hash
from lmx.run.compare import difference

RECIPE = """\
# A recipe that uses most keys.
model: {from_scratch: {hidden_size: 64, tie_word_embeddings: no}}
data:
  train: [builtin:stdlib, rows.jsonl]
  valid: rows.jsonl
  columns: {prompt: question}
seed: 3
stages:
  - train:
      qat: {mode: mxfp4, quantize_activations: off}
      steps: 10
      batch_size: 8
      learning_rate: 1e-5
      sample_prompts: ["on", "1e-5", "12:30"]
  - evaluate:
  - export:
"""


ROW = '{"question": "q", "completion": "c", "answer": "a", "text": "t"}\n'


@pytest.fixture
def recipe(tmp_path) -> Path:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "rows.jsonl").write_text(ROW)
    path = tmp_path / "recipes" / "whole.yaml"
    path.write_text(RECIPE)
    return path


def test_load_recipe_reads_values(recipe):
    loaded = load_recipe(recipe)
    assert loaded.recipe.model.from_scratch.tie_word_embeddings is False
    assert loaded.recipe.data.valid == ["rows.jsonl"]
    train = loaded.recipe.stages[0].config
    assert train.qat.quantize_activations is False
    assert train.learning_rate == 1e-5
    assert train.sample_prompts == ["on", "1e-5", "12:30"]
    kinds = [stage.kind for stage in loaded.recipe.stages]
    assert kinds == ["train", "evaluate", "export"]
    assert loaded.name == "whole"
    assert loaded.text == RECIPE


def test_resolved_recipe_has_all_values_and_loads_again(recipe, tmp_path):
    loaded = load_recipe(
        recipe, ["data.max_samples=5", "stages.train.lr_schedule=linear"]
    )
    copy = tmp_path / "recipes" / "resolved.yaml"
    copy.write_text(loaded.resolved)
    again = load_recipe(copy)
    assert again.recipe == loaded.recipe
    assert again.resolved == loaded.resolved
    assert recipe_hash(again.resolved) == recipe_hash(loaded.resolved)
    for default in ("weight_decay: 0.01", "max_seq_length: 512", "group_size: 32"):
        assert default in loaded.resolved


@pytest.mark.parametrize(
    "path", sorted((BUNDLED / "recipes").glob("*.yaml")), ids=lambda p: p.stem
)
def test_bundled_recipes_load_and_resolve(path, tmp_path, monkeypatch):
    monkeypatch.chdir(BUNDLED)
    loaded = load_recipe(path)
    copy = tmp_path / path.name
    copy.write_text(loaded.resolved)
    assert load_recipe(copy).recipe == loaded.recipe
    assert len(loaded.text.splitlines()) <= 40
    assert loaded.text.startswith("# ")


def test_find_searches_working_directory_then_root(recipe, tmp_path, monkeypatch):
    loaded = load_recipe(recipe)
    # The parent of the folder `recipes`, else the recipe's own folder.
    assert loaded.root == tmp_path
    assert loader.root_of(tmp_path / "mine.yaml") == tmp_path
    assert loader.root_of(tmp_path / "recipes" / "deep" / "mine.yaml") == tmp_path
    assert loaded.find("rows.jsonl") == tmp_path / "rows.jsonl"
    assert loaded.find("nothing.jsonl") is None
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "rows.jsonl").write_text("{}")
    monkeypatch.chdir(elsewhere)
    assert loaded.find("rows.jsonl") == Path("rows.jsonl")


def test_overrides_are_yaml(recipe):
    arguments = """
        stages.train.steps=50 stages.2.evaluate.num_tokens=7 data.streaming=no
        data.train=[builtin:stdlib] stages.evaluate.thresholds.max_kl=5e-2
        model.from_scratch.hidden_size=128 data.columns.completion=answer
        output=exports/try stages.train.sample_prompts.2=second
    """
    loaded = load_recipe(recipe, arguments.split())
    train, evaluate, _ = (stage.config for stage in loaded.recipe.stages)
    assert (train.steps, train.sample_prompts) == (50, ["on", "second", "12:30"])
    assert (evaluate.num_tokens, evaluate.thresholds.max_kl) == (7, 0.05)
    data = loaded.recipe.data
    assert (data.train, data.streaming) == (["builtin:stdlib"], False)
    assert data.columns == {"prompt": "question", "completion": "answer"}
    assert loaded.recipe.model.from_scratch.hidden_size == 128
    assert loaded.recipe.output == "exports/try"


def test_later_override_wins_and_null_resets(recipe):
    arguments = ["seed=1", "seed=2", "stages.train.steps=null", "stages.train.epochs=2"]
    arguments += ["data.valid=null"]
    loaded = load_recipe(recipe, arguments)
    assert (loaded.recipe.seed, loaded.recipe.data.valid) == (2, [])
    assert loaded.recipe.stages[0].config.epochs == 2
    assert loaded.overrides == tuple(arguments)


@pytest.mark.parametrize("number", ["9" * 5000, "٣", "0"])
def test_override_of_no_stage_is_refused(recipe, number):
    with pytest.raises(UserError, match=r"no stage|entries 1 to 3|stage 3 is"):
        load_recipe(recipe, [f"stages.{number}.train.steps=1"])


def test_places_of_secrets_are_known(recipe):
    recipe.write_text(f"{RECIPE}# password: hunter2\n")
    loaded = load_recipe(recipe, ["output=token:abc123def"])
    assert loaded.secrets == ("line 17", "the argument output")
    assert "hunter2" not in loaded.text
    assert loaded.overrides == ("output=token:REDACTED",)


def test_all_errors_are_reported_in_line_order(recipe):
    text = RECIPE.replace("seed: 3", "sed: 3").replace(
        "embeddings: no", "embeddings: maybe"
    )
    recipe.write_text(text.replace("valid: rows", "valid: lost"))
    with pytest.raises(ConfigErrors) as caught:
        load_recipe(recipe, ["stages.train.beta1=2"])
    where = re.findall(
        r"^(?:\S*:(\d+):\d+|argument) ?", str(caught.value), re.MULTILINE
    )
    assert where == ["2", "5", "7", ""]
    assert str(caught.value).endswith("\n4 problems; nothing was run.")


def test_unreadable_recipe_is_reported(tmp_path):
    with pytest.raises(UserError, match="cannot read the recipe: no such file"):
        load_recipe(tmp_path / "none.yaml")
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("model: caf\xe9".encode("latin-1"))
    with pytest.raises(UserError, match="byte 11 is not UTF-8"):
        load_recipe(latin)


def test_hub_ids_are_not_local_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "hub.yaml"
    path.write_text(
        "model: Qwen/Qwen3-0.6B\ndata: {train: [gsm8k, org/rows]}\n"
        "stages: [{train: {steps: 1, batch_size: 8}}]\n"
    )
    assert load_recipe(path).recipe.model.path == "Qwen/Qwen3-0.6B"
    # A folder of the owner's name makes it a local path.
    (tmp_path / "Qwen").mkdir()
    with pytest.raises(ConfigErrors, match="no such file or folder"):
        load_recipe(path)


def test_plan_has_stages_inputs_and_outputs(recipe, monkeypatch):
    steps = plan(load_recipe(recipe))
    assert steps.output == Path("exports/whole")
    names = [stage.name for stage in steps.stages]
    assert names == ["1-train", "2-evaluate", "3-export"]
    train, evaluate, export = steps.stages
    folder = Path("exports/whole/stages/1-train")
    assert train.inputs == ("from scratch", "builtin:stdlib", "rows.jsonl")
    assert train.outputs == (folder,)
    assert evaluate.inputs == (str(folder), "rows.jsonl")
    assert export.inputs == (str(folder),)
    assert export.outputs[-1] == Path("exports/whole/model")
    assert plan(load_recipe(recipe, ["output=here"])).output == Path("here")


def test_recipe_hash_ignores_output(recipe):
    hashes = [
        recipe_hash(load_recipe(recipe, arguments).resolved)
        for arguments in ([], ["output=elsewhere"], ["seed=4"])
    ]
    assert hashes[0] == hashes[1] != hashes[2]


def test_recipe_difference_has_dotted_keys(recipe):
    old = load_recipe(recipe).resolved
    new = load_recipe(
        recipe, ["stages.train.steps=50", "data.columns={}", "seed=4", "output=else"]
    ).resolved
    assert difference(old, new) == textwrap.dedent(
        """\
        data.columns.prompt: "question" -> (removed)
        seed: 3 -> 4
        stages.1.train.steps: 10 -> 50
        data.columns: (added) -> {}"""
    )
    assert difference(old, old) == ""
    assert "values before are unknown" in difference("", old)
