"""`lmx.Recipe`: sources, overrides, errors with key paths, and texts."""

import sys
from pathlib import Path

import lmx
import mlx.core as mx
import numpy as np
import pytest
from lmx.cli.main import train
from lmx.config.bundled import bundled_recipes
from lmx.config.loader import plain_data

STAGES = [{"train": {"steps": 1, "batch_size": 2}}]
KEYS = {"model": "a/b", "data": {"train": "builtin:stdlib"}, "stages": STAGES}


def test_dict_keywords_and_file_are_the_same_recipe(tmp_path):
    recipe = lmx.Recipe(KEYS)
    assert lmx.Recipe(**KEYS) == recipe
    file = recipe.save(tmp_path / "r.yaml")
    assert lmx.Recipe(file) == recipe
    assert lmx.Recipe(str(file)).hash == recipe.hash
    assert recipe.to_dict() == KEYS
    assert lmx.Recipe(recipe.to_dict(resolved=True)) == recipe


def test_numbers_that_other_readers_of_yaml_take_for_text():
    """`yaml.safe_load` reads 2e-3 as text."""
    train = {"steps": 1, "batch_size": 2, "sample_prompts": ["2e-3"]}

    def recipe(rate):
        stages = [{"train": train | {"learning_rate": rate}}]
        return lmx.Recipe(KEYS | {"stages": stages})

    for text in ("2e-3", "2E-3", "2.e-3", "+2e-3"):
        read = recipe(text)
        assert read.config.stages[0].train.learning_rate == 2e-3
        assert read.config.stages[0].train.sample_prompts == ["2e-3"]
        assert read.hash == recipe(2e-3).hash
        assert read.to_dict() == recipe(2e-3).to_dict()
    for text in ("2e", "e-3", "fast", "2e-3x"):
        with pytest.raises(lmx.ConfigErrors, match="learning_rate"):
            recipe(text)


def test_recipe_needs_one_source():
    for arguments, keys in (((), {}), ((KEYS,), KEYS)):
        with pytest.raises(lmx.UserError, match="either a recipe or its keys"):
            lmx.Recipe(*arguments, **keys)
    name = next(iter(bundled_recipes()))
    assert lmx.Recipe(name).to_yaml() == bundled_recipes()[name].read_text()


def test_overrides_from_python_equal_those_of_the_command_line():
    values = {"stages.train.steps": 7, "seed": 3, "output": Path("here/it is")}
    recipe = lmx.Recipe(KEYS, overrides=values)
    texts = ["stages.train.steps=7", "seed=3", "output=here/it is"]
    assert lmx.Recipe(KEYS, overrides=texts) == recipe
    assert list(recipe.loaded.overrides) == texts
    assert recipe.config.stages[0].config.steps == 7
    assert recipe.output == Path("here/it is")
    assert KEYS["stages"][0]["train"]["steps"] == 1


@pytest.mark.parametrize(
    "text", ["1", "true", "~", "a: b", "", "1e-5", "x\u2028y", "🙂", "text"]
)
def test_text_override_stays_text_also_as_argument(text):
    recipe = lmx.Recipe(KEYS, overrides={"stages.train.sample_prompts": [text]})
    assert recipe.config.stages[0].config.sample_prompts == [text]
    assert lmx.Recipe(KEYS, overrides=recipe.loaded.overrides) == recipe
    assert recipe != lmx.Recipe(KEYS)


def test_derived_recipe_keeps_file_and_overrides(tmp_path):
    file = lmx.Recipe(KEYS).save(tmp_path / "r.yaml")
    derived = lmx.Recipe(lmx.Recipe(file, overrides={"seed": 1}), overrides=["seed=2"])
    assert derived.name == "r"
    assert derived.config.seed == 2
    assert derived.loaded.overrides == ("seed=1", "seed=2")
    assert lmx.Recipe(derived) == derived


def test_recipe_without_a_file_is_named_after_model_and_hash():
    recipe = lmx.Recipe(KEYS)
    assert recipe.output == Path("exports") / f"b-{recipe.hash[:8]}"
    other = lmx.Recipe(recipe, overrides={"seed": 1})
    assert other.output != recipe.output
    assert lmx.Recipe(KEYS, overrides={"output": "exports/mine"}).name == "mine"


def test_errors_of_a_dict_have_key_paths_and_come_together():
    stages = [{"train": {"steps": "ten", "batch_size": 2, "lr": 1}}, {"evaluat": {}}]
    with pytest.raises(lmx.ConfigErrors) as caught:
        lmx.Recipe({"model": "a/b", "stages": stages, "sed": 1})
    assert str(caught.value).splitlines() == [
        "stages.1.train: nothing to train on",
        "    hint: name training examples in data.train",
        'stages.1.train.steps: expected a whole number, got "ten"',
        "stages.1.train.lr: unknown key 'lr'",
        "    hint: called 'learning_rate' here",
        "stages.2.evaluat: unknown stage kind 'evaluat'",
        "    hint: did you mean 'evaluate'?",
        "sed: unknown key 'sed'",
        "    hint: did you mean 'seed'?",
        "5 problems; nothing was run.",
    ]
    assert isinstance(caught.value, lmx.UserError)
    assert caught.value.errors[1].path == ("stages", 0, "train", "steps")


def test_errors_of_overrides_and_files_have_their_places(tmp_path):
    place = r"argument 'stages.train.steps=0': must"
    with pytest.raises(lmx.ConfigErrors, match=place):
        lmx.Recipe(KEYS, overrides={"stages.train.steps": 0})
    file = tmp_path / "bad.yaml"
    file.write_text("model: a/b\nsed: 1\nstages: [{export: {}}]\n")
    with pytest.raises(lmx.ConfigErrors, match=rf"{file}:2:1: unknown key 'sed'"):
        lmx.Recipe(file)


def test_values_of_other_libraries_become_plain():
    values = {
        "a": (np.int64(3), np.float32(0.5), mx.array(2), Path("x")),
        "b": [True, None, "t"],
    }
    assert plain_data(values) == ({"a": [3, 0.5, 2, "x"], "b": [True, None, "t"]}, [])


def test_values_that_no_file_can_hold_are_errors_with_their_keys():
    loop: list = []
    loop.append(loop)
    with pytest.raises(lmx.ConfigErrors) as caught:
        lmx.Recipe({"model": {1}, "data": {2: "a"}, "stages": [len], "x": loop})
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("model: expected text, a number, a list or a dict, got")
    assert lines[1] == "data: a key must be text, got an int"
    assert "give it to lmx.train as loss or metrics" in lines[2]
    assert "nested more than 50 levels deep" in lines[3]


def test_recipe_renders_as_escaped_html():
    data = {"train": "builtin:stdlib", "columns": {"prompt": "<b>"}}
    html = lmx.Recipe(KEYS | {"data": data})._repr_html_()
    assert "&lt;b&gt;" in html
    assert "<b>" not in html


def test_recipe_that_needs_functions_is_refused_by_the_command(tmp_path, capsys):
    block = {"loss": "m.f sha256:0"}
    file = lmx.Recipe(KEYS | {"python": block}).save(tmp_path / "r.yaml")
    assert train([str(file), f"output={tmp_path / 'run'}"]) == 2
    assert "lmx.train(recipe, loss=...)" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": [{"export": {}}]}, "no train stage uses this loss"),
        (
            {"stages": [{"train": STAGES[0]["train"] | {"teacher": {}}}]},
            "does not work with teacher",
        ),
    ],
)
def test_loss_that_no_stage_could_use_is_refused(changes, message):
    block = {"loss": "m.f sha256:0"}
    with pytest.raises(lmx.ConfigErrors, match=message):
        lmx.Recipe(KEYS | {"python": block} | changes)


@pytest.mark.skipif(sys.platform != "linux", reason="has no /proc")
def test_save_where_nothing_can_be_written_is_one_sentence():
    recipe = lmx.Recipe("full")
    with pytest.raises(lmx.UserError, match="cannot write: "):
        recipe.save("/proc/x.yaml")
