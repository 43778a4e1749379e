"""The JSON Schema of recipes accepts what the loader accepts, and rejects misspelled
keys, wrong types and values out of range."""

from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from lmx.cli import main
from lmx.config import bundled, yaml_io
from lmx.config.errors import ConfigErrors
from lmx.config.json_schema import recipe_schema
from lmx.config.loader import load_recipe
from lmx.config.overrides import merge

SCHEMA = recipe_schema()
VALIDATOR = Draft202012Validator(SCHEMA)
BAD = Path(__file__).parent / "bad"
ARGUMENTS = "# arguments: "
RECIPES = bundled.bundled_recipes()
# Bad recipes that the JSON Schema accepts, by what it cannot express.
NOT_REJECTED = {
    "yaml": ["05_duplicate_keys"],
    "rules of several keys": [
        "16_steps_and_epochs",
        "18_grids",
        "26_quantized_twice",
        "30_path_and_from_scratch",
        "32_argument_against_file",
        "43_keys_of_another_optimizer",
        "70_other_quantization",
        "81_published_twice",
        "82_two_drafts",
    ],
    "files and data": [
        "19_missing_files",
        "20_no_model",
        "21_model_is_a_file",
        "22_unknown_builtin",
        "23_nothing_to_train_on",
        "24_untrained_scratch_model",
        "25_scratch_model_with_adapter",
        "27_quantized_base",
    ],
}
BASE = {"model": "a/b", "data": {"train": "builtin:stdlib"}}
TRAIN = {"steps": 1, "batch_size": 1}


def accepts(recipe) -> bool:
    return VALIDATOR.is_valid(recipe)


def stages(*entries) -> dict:
    return BASE | {"stages": [*entries]}


def test_schema_is_valid_and_described():
    Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    rank = SCHEMA["$defs"]["LoRAConfig"]["properties"]["rank"]
    assert rank == {
        "type": "integer",
        "minimum": 1,
        "default": 16,
        "description": "Rank of the update.",
    }
    blocks = [SCHEMA, *SCHEMA["$defs"].values()]
    keys = [key for block in blocks for key in block["properties"].values()]
    assert all(key["description"] for key in keys)


def test_schema_file_is_up_to_date(capsys):
    assert main.main(["schema", "--json"]) == 0
    assert bundled.schema_file().read_text() == capsys.readouterr().out, (
        "run: lmx schema --json > recipes/recipe.schema.json"
    )


@pytest.mark.parametrize("path", RECIPES.values(), ids=RECIPES)
def test_schema_accepts_included_recipe(path):
    loaded = load_recipe(path)
    assert accepts(yaml_io.read(loaded.text).data)
    assert accepts(yaml_io.read(loaded.resolved).data)


ACCEPTED = {
    "model block": stages({"train": TRAIN}) | {"model": {"path": "a/b"}},
    "source as text": stages({"train": TRAIN}) | {"data": {"train": "x.jsonl"}},
    "sources as list": stages({"train": TRAIN}) | {"data": {"train": ["x", "y"]}},
    "stages without block": stages(
        {"quantize": None}, {"draft": None}, {"evaluate": None}, {"export": None}
    ),
    "default method": stages({"quantize": {"bits": 3}}),
    "method": stages({"quantize": {"method": "gptq", "effort": "fast"}}),
    "words for booleans": stages({"train": TRAIN | {"packing": "yes", "fsdp": "Off"}}),
    "overrides": stages(
        {"quantize": {"overrides": {"*.down_proj": {"bits": 8}, "lm_head": "skip"}}}
    ),
    "target modules": stages(
        {"train": TRAIN | {"adapter": {"target_modules": ["q_proj"]}}},
        {"train": TRAIN | {"adapter": {"target_modules": {"q_proj": 4}}}},
        {"train": TRAIN | {"adapter": {"target_modules": "auto"}}},
    ),
    "layers of a draft": stages({"draft": {"draft_model": {"num_layers": [0, 1]}}}),
}


@pytest.mark.parametrize("recipe", ACCEPTED.values(), ids=ACCEPTED)
def test_schema_accepts_what_the_loader_accepts(recipe, tmp_path):
    (tmp_path / "recipe.yaml").write_text(yaml_io.write(recipe))
    assert load_recipe(tmp_path / "recipe.yaml")
    assert accepts(recipe)


REJECTED = {
    "no stage": stages(),
    "two kinds": stages({"train": TRAIN, "evaluate": {}}),
    "empty entry": stages({}),
    "key of another method": stages({"quantize": {"method": "rtn", "effort": "fast"}}),
    "key without its method": stages({"quantize": {"effort": "fast"}}),
    "unknown method": stages({"quantize": {"method": "rtnn"}}),
    "null block": stages({"train": TRAIN}) | {"data": None},
    "number as boolean": stages({"train": TRAIN | {"packing": 1}}),
    "word as boolean": stages({"train": TRAIN | {"packing": "maybe"}}),
    "boolean as number": stages({"train": TRAIN | {"steps": True}}),
    "override": stages({"quantize": {"overrides": {"lm_head": "keep"}}}),
}


@pytest.mark.parametrize("recipe", REJECTED.values(), ids=REJECTED)
def test_schema_rejects_what_the_loader_rejects(recipe, tmp_path):
    (tmp_path / "recipe.yaml").write_text(yaml_io.write(recipe))
    with pytest.raises(ConfigErrors):
        load_recipe(tmp_path / "recipe.yaml")
    assert not accepts(recipe)


def bad_data(path: Path):
    """The data of a bad recipe, with the arguments in its first line."""
    text = path.read_text()
    data = yaml_io.read(text).data
    first = text.partition("\n")[0]
    if first.startswith(ARGUMENTS):
        merge(data, first.removeprefix(ARGUMENTS).split())
    return data


def test_schema_rejects_bad_recipes():
    accepted = {p.stem for p in BAD.glob("*.yaml") if accepts(bad_data(p))}
    assert accepted == {name for names in NOT_REJECTED.values() for name in names}


def nodes(data):
    """All blocks in plain data."""
    if isinstance(data, dict):
        yield data
    for value in data.values() if isinstance(data, dict) else data:
        if isinstance(value, dict | list):
            yield from nodes(value)


@pytest.mark.parametrize("path", RECIPES.values(), ids=RECIPES)
def test_schema_rejects_every_misspelled_key(path):
    data = yaml_io.read(path.read_text()).data
    for block in nodes(data):
        for key in list(block):
            value = block.pop(key)
            block[f"{key}x"] = value
            assert not accepts(data), key
            del block[f"{key}x"]
            block[key] = value
    assert accepts(data)


def test_examples_are_accepted():
    examples = 0
    for block in [SCHEMA, *SCHEMA["$defs"].values()]:
        for key, value in block["properties"].items():
            for example in value.get("examples", []):
                schema = {**value, "$defs": SCHEMA["$defs"]}
                assert Draft202012Validator(schema).is_valid(example), (key, example)
                examples += 1
    assert examples > 10
