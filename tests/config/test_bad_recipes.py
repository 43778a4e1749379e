"""Every recipe in bad/ gives exactly the message in the file next to it."""

from pathlib import Path

import pytest
from lmx.config.bundled import bundled_recipes
from lmx.config.errors import ConfigErrors
from lmx.config.yaml_io import read
from lmx.errors import USAGE
from lmx.pipeline.plan import load as load_recipe

BAD = Path(__file__).parent / "bad"
RECIPES = sorted(BAD.glob("*.yaml"))
ARGUMENTS = "# arguments: "

SAMPLE = """\
model: Qwen/Qwen3-0.6B
data:
  train: builtin:stdlib
  max_seq_length: 512
stages:
  - train:
      adapter: {type: lora, rank: 16}
      qat: {bits: 4, group_size: 64}
      steps: 300
      batch_size: 8
  - evaluate:
      thresholds: {max_kl: 0.05}
  - export: {formats: [mlx]}
"""


def faults(path: str, arguments=()) -> ConfigErrors:
    with pytest.raises(ConfigErrors) as caught:
        load_recipe(path, arguments)
    assert caught.value.code == USAGE
    return caught.value


def test_bad_recipes_are_collected():
    assert len(RECIPES) >= 25


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_bad_recipe_message(recipe, monkeypatch):
    monkeypatch.chdir(BAD)
    first = recipe.read_text().partition("\n")[0]
    arguments = (
        first.removeprefix(ARGUMENTS).split() if first.startswith(ARGUMENTS) else ()
    )
    expected = recipe.with_suffix(".txt").read_text()
    assert f"{faults(recipe.name, arguments)}\n" == expected


def keys(data, path=()):
    """The path of every key of plain data."""
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in items:
        if isinstance(key, str):
            yield (*path, key)
        if isinstance(value, dict | list):
            yield from keys(value, (*path, key))


SHIPPED = {path.stem: path.read_text() for path in bundled_recipes().values()}


def test_misspelled_key_gets_the_right_key_as_hint(tmp_path):
    """Every key of the shipped recipes and of the sample, once."""
    places, recipe = {}, tmp_path / "mutated.yaml"
    for text in (*SHIPPED.values(), SAMPLE):
        document = read(text)
        for path in keys(document.data):
            names = tuple(part for part in path if isinstance(part, str))
            places[names] = text, document, path
    for text, document, path in places.values():
        line, column = document.keys[path]
        lines = text.splitlines()
        end = column - 1 + len(path[-1])
        lines[line - 1] = f"{lines[line - 1][:end]}x{lines[line - 1][end:]}"
        recipe.write_text("\n".join(lines))
        message = str(faults(recipe))
        assert f"{recipe}:{line}:{column}: unknown " in message
        assert f"did you mean '{path[-1]}'?" in message, path


def test_sample_recipe_is_valid(tmp_path):
    recipe = tmp_path / "good.yaml"
    recipe.write_text(SAMPLE)
    assert load_recipe(recipe).recipe.stages[0].config.steps == 300
