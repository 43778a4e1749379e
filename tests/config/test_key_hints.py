"""Names of other libraries get a hint with lmx's name."""

import pytest
from lmx.config import key_hints
from lmx.config.messages import fields, keys, sections
from lmx.config.schema import RecipeConfig


def blocks(section=RecipeConfig, above=""):
    """The section of every block of the schema by its address."""
    yield above, section
    for key, info in fields(section).items():
        for inner in sections(info.annotation):
            yield from blocks(inner, f"{above}.{key}".lstrip("."))


NAMES: dict[str, set[str]] = {}
for address, section in blocks():
    NAMES.setdefault(address, set()).update(fields(section))


def test_known_key_gets_the_schema_name():
    known = {address for address, _ in keys(RecipeConfig)}
    for address, names in key_hints.KEYS.items():
        assert address in known
        block, _, leaf = address.rpartition(".")
        for name in names.split():
            assert name not in NAMES[block], f"{name} is a key of {block}, no alias"
            assert key_hints.key_hint(name, NAMES[block]) == f"called '{leaf}' here"


def test_ambiguous_name_gets_no_hint_elsewhere():
    assert key_hints.key_hint("max_new_tokens", {"steps"}) is None
    assert key_hints.key_hint("no-such-name", {"steps"}) is None
    hint = key_hints.key_hint("lora_alpha", {"steps"})
    assert hint == "called 'alpha', in stages.train.adapter"


@pytest.mark.parametrize("key", key_hints.VALUES)
def test_known_value_gets_the_schema_value(key):
    blocks = RecipeConfig.model_json_schema()["$defs"].values()
    allowed = str(
        [b["properties"][key] for b in blocks if key in b.get("properties", {})]
    )
    for value, known in key_hints.VALUES[key].items():
        assert f"'{known}'" in allowed
        hint = key_hints.value_hint(("stages", key, 0), value, [known])
        assert hint == f"called '{known}' here"
        assert key_hints.value_hint(("stages", key), value, ["other"]) is None
