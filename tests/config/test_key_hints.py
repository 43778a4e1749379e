"""Names of other tools get a hint with lmx's name, and the table names what exists."""

import pytest
from lmx.config import key_hints
from lmx.config.json_schema import sections

TABLES = key_hints.tables()
NAMES = {
    address: {key for block in blocks for key in block["properties"]}
    for address, blocks in sections().items()
}


def test_known_key_gets_the_schema_name():
    for name, addresses in TABLES["keys"].items():
        for address in addresses:
            block, _, leaf = address.rpartition(".")
            assert leaf in NAMES[block]
            assert name not in NAMES[block], f"{name} is a key of {block}, no alias"
            assert key_hints.key_hint(name, NAMES[block]) == f"called '{leaf}' here"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_new_tokens", None),  # of several blocks
        ("no-such-name", None),
        ("lora_alpha", "called 'alpha', in stages.train.adapter"),
    ],
)
def test_name_of_another_block(name, hint):
    assert key_hints.key_hint(name, {"steps"}) == hint


@pytest.mark.parametrize("key", TABLES["values"])
def test_known_value_gets_the_schema_value(key):
    blocks = [block["properties"] for found in sections().values() for block in found]
    allowed = str([block[key] for block in blocks if key in block])
    for value, [known] in TABLES["values"][key].items():
        assert f"'{known}'" in allowed
        hint = key_hints.value_hint(("stages", key, 0), value, [known])
        assert hint == f"called '{known}' here"
        assert key_hints.value_hint(("stages", key), value, ["other"]) is None
