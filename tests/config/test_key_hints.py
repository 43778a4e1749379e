"""Names of other libraries get a hint with lmx's name."""

import pytest
from lmx.config import key_hints
from lmx.config.messages import fields, keys, sections
from lmx.config.schema import RecipeConfig

ALIASES = [
    pytest.param(address, name, id=f"{address}:{name}")
    for address, names in key_hints.KEYS.items()
    for name in names.split()
]
VALUES = [
    pytest.param(key, value, known, id=f"{key}:{value}")
    for key, values in key_hints.VALUES.items()
    for value, known in values.items()
]


def blocks(section=RecipeConfig, above=""):
    """The section of every block of the schema by its address."""
    yield above, section
    for key, info in fields(section).items():
        for inner in sections(info.annotation):
            yield from blocks(inner, f"{above}.{key}".lstrip("."))


BLOCKS: dict[str, list] = {}
for address, section in blocks():
    BLOCKS.setdefault(address, []).append(section)


def keys_at(block: str) -> set[str]:
    return {key for section in BLOCKS[block] for key in fields(section)}


@pytest.mark.parametrize("address", key_hints.KEYS)
def test_key_hints_name_a_key_of_the_schema(address):
    assert address in {known for known, _ in keys(RecipeConfig)}


@pytest.mark.parametrize(("address", "name"), ALIASES)
def test_known_key_gets_the_schema_name(address, name):
    block, _, leaf = address.rpartition(".")
    siblings = keys_at(block)
    assert name not in siblings, "a key of this block is no alias"
    assert key_hints.key_hint(name, siblings) == f"called '{leaf}' here"


def test_ambiguous_name_gets_no_hint_elsewhere():
    assert key_hints.key_hint("max_new_tokens", {"steps"}) is None
    assert key_hints.key_hint("no-such-name", {"steps"}) is None
    hint = key_hints.key_hint("lora_alpha", {"steps"})
    assert hint == "called 'alpha', in stages.train.adapter"


@pytest.mark.parametrize(("key", "value", "known"), VALUES)
def test_known_value_gets_the_schema_value(key, value, known):
    hint = f"called '{known}' here"
    assert key_hints.value_hint(("stages", key, 0), value, [known]) == hint
    assert key_hints.value_hint(("stages", key), value, ["other"]) is None


@pytest.mark.parametrize("key", key_hints.VALUES)
def test_value_hints_name_a_value_of_the_schema(key):
    blocks = RecipeConfig.model_json_schema()["$defs"].values()
    values = str(
        [b["properties"][key] for b in blocks if key in b.get("properties", {})]
    )
    for known in key_hints.VALUES[key].values():
        assert f"'{known}'" in values
