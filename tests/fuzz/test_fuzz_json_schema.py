"""The JSON Schema and the loader agree about damaged recipes: what the loader accepts,
the schema accepts, and a wrong key, type or limit is wrong in both."""

import copy

from json_mutations import mutate_json
from jsonschema import Draft202012Validator
from lmx.config import bundled, loader, yaml_io
from lmx.config.json_schema import recipe_schema
from lmx.config.schema import RecipeConfig
from pydantic import ValidationError

# Rules of several keys; numbers that JSON does not have; 1.0 is an integer in JSON.
LOADER_ONLY = {"value_error", "finite_number", "int_type", "int_from_float"}


def recipes() -> list[dict]:
    """The included recipes as written, and with all values."""
    data = []
    for path in bundled.bundled_recipes().values():
        loaded = loader.load_recipe(path)
        data += [yaml_io.read(text).data for text in (loaded.text, loaded.resolved)]
    return data


def is_shallow(value) -> bool:
    """Whether at most 20 lists and blocks contain each other."""
    level = [value]
    for _ in range(20):
        inner = [v for v in level if isinstance(v, dict | list)]
        level = [
            child for v in inner for child in (v.values() if isinstance(v, dict) else v)
        ]
    return not level


def error_types(data) -> set[str]:
    try:
        RecipeConfig.model_validate(data)
    except ValidationError as invalid:
        return {error["type"] for error in invalid.errors()}
    return set()


def test_schema_and_loader_agree(num_cases, fuzz_random):
    validator = Draft202012Validator(recipe_schema())
    sources = recipes()
    accepted = rejected = 0
    for case in range(num_cases(300)):
        data = copy.deepcopy(fuzz_random.choice(sources))
        for _ in range(fuzz_random.choice([1, 1, 2, 4])):
            changed = mutate_json(fuzz_random, data)
            # The loader has its own tests of values that are nested too deep.
            data = changed if is_shallow(changed) else data
        if not isinstance(data, dict):
            continue
        in_schema = validator.is_valid(data)
        # The loader also takes words for booleans, and changes them in place.
        recipe, _ = loader._validate(copy.deepcopy(data))
        if recipe:
            accepted += 1
            assert in_schema, f"case {case}: only the loader accepts {data}"
        elif error_types(data) - LOADER_ONLY - {"bool_type"}:
            rejected += 1
            assert not in_schema, f"case {case}: only the schema accepts {data}"
    assert accepted
    assert rejected
