"""The keywords of JSON schemas: each is enforced or refused."""

import re
import warnings

import numpy as np
import pytest
from lmx.errors import UserError
from lmx.generation.grammar import Grammar
from lmx.generation.grammar_matcher import GrammarCompiler
from lmx.generation.json_schema import ANNOTATIONS, KEYWORDS, UNENFORCED
from tiny_generators import VOCABULARY, byte_tokenizer

TOKENIZER = byte_tokenizer()
(STOP,) = TOKENIZER.eos_token_ids
COMPILER = GrammarCompiler(TOKENIZER)
ARRAY, OBJECT = {"type": "array"}, {"type": "object"}
TEXT, NUMBER = {"type": "string"}, {"type": "number"}


def is_match(schema, text):
    """Whether a whole text is allowed, token by token."""
    matcher = COMPILER.compile(Grammar.json_schema(schema)).start({STOP})
    for token in [*TOKENIZER.encode(text, add_special_tokens=False), STOP]:
        (mask,) = matcher.masks([], VOCABULARY)
        if not mask[token // 32] >> np.uint32(token % 32) & 1:
            return False
        assert matcher.advance(token) is None
    return True


ENFORCED = [
    ({"type": ["null", "integer"]}, "1", "1.5"),
    ({"enum": [3, "x"]}, '"x"', "4"),
    ({"const": 3}, "3", "4"),
    ({"anyOf": [TEXT, NUMBER]}, "3", "[]"),
    ({"oneOf": [TEXT, NUMBER]}, "3", "null"),
    ({"allOf": [{"minimum": 2}, {"maximum": 3}]}, "3", "4"),
    ({"$ref": "#/$defs/a", "$defs": {"a": TEXT}}, '"x"', "3"),
    ({"$ref": "#/definitions/a", "definitions": {"a": TEXT}}, '"x"', "3"),
    (OBJECT | {"properties": {"a": TEXT}}, '{"a":"x"}', '{"a":1}'),
    (OBJECT | {"properties": {"a": False}}, "{}", '{"a":1}'),
    (OBJECT | {"patternProperties": {"^a": TEXT}}, '{"a":"x"}', '{"a":1}'),
    (OBJECT | {"additionalProperties": TEXT}, '{"b":"x"}', '{"b":1}'),
    ({"required": ["a"]}, '{"a":1}', "{}"),
    (OBJECT | {"minProperties": 1}, '{"a":1}', "{}"),
    (OBJECT | {"maxProperties": 1}, '{"a":1}', '{"a":1,"b":2}'),
    (ARRAY | {"items": TEXT}, '["a"]', "[3]"),
    (ARRAY | {"items": [TEXT]}, '["a",3]', "[3]"),
    (ARRAY | {"items": [TEXT], "additionalItems": False}, '["a"]', '["a",3]'),
    (ARRAY | {"prefixItems": [TEXT], "items": False}, '["a"]', '["a",3]'),
    ({"minItems": 1}, "[1]", "[]"),
    (ARRAY | {"maxItems": 1}, "[1]", "[1,2]"),
    ({"minLength": 2}, '"ab"', '"a"'),
    (TEXT | {"maxLength": 2}, '"ab"', '"abc"'),
    (TEXT | {"pattern": "b$"}, '"ab"', '"a"'),
    (TEXT | {"format": "date"}, '"2020-01-01"', '"a"'),
    ({"minimum": 2}, "2", "1"),
    (NUMBER | {"maximum": 2}, "2", "3"),
    (NUMBER | {"exclusiveMinimum": 2}, "3", "2"),
    (NUMBER | {"exclusiveMaximum": 2}, "1", "2"),
    (NUMBER | {"multipleOf": 3}, "9", "8"),
]


@pytest.mark.parametrize(("schema", "good", "bad"), ENFORCED)
def test_supported_keywords_are_enforced(schema, good, bad):
    assert is_match(schema, good)
    assert not is_match(schema, bad)


def test_every_supported_keyword_is_tested():
    tested = {keyword for schema, _, _ in ENFORCED for keyword in schema}
    assert tested == KEYWORDS - ANNOTATIONS - UNENFORCED


def test_unique_items_are_accepted_with_a_warning():
    """As pydantic writes a set; everything beside it is enforced."""
    items = ARRAY | {"items": {"enum": ["a", "b"]}, "uniqueItems": True}
    parts = [
        items,
        ARRAY | {"prefixItems": [items], "items": False},
        {"anyOf": [items, TEXT]},
        {"$ref": "#/$defs/uniqueItems", "$defs": {"uniqueItems": items}},
        OBJECT | {"additionalProperties": items},
    ]
    texts = ['["a"]', '[["a"]]', '["a"]', '["a"]', '{"x":["a"]}']
    for schema, text in zip(parts, texts, strict=True):
        # Equal items may come. This is what the warning says.
        taken = [text, text.replace("a", "c"), text.replace('"a"', '"a","a"')]
        with pytest.warns(UserWarning, match="uniqueItems is not enforced"):
            taken = [is_match(schema, each) for each in taken]
        assert taken == [True, False, True]
    # A value and a property of this name stay, and need no warning.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert is_match({"const": {"uniqueItems": True}}, '{"uniqueItems":true}')
        named = OBJECT | {"properties": {"uniqueItems": TEXT}}
        assert not is_match(named, '{"uniqueItems":1}')
        assert is_match(ARRAY | {"uniqueItems": False}, "[1,1]")


def test_whitespace_is_limited():
    schema = ARRAY | {"items": NUMBER}
    assert is_match(schema, "[" + " " * 20 + "1" + "\n\t" * 10 + "]")
    assert not is_match(schema, "[" + " " * 21 + "1]")
    assert not is_match(schema, " []")


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def test_deep_and_long_schemas():
    COMPILER.compile(Grammar.json_schema(nested(40)))
    for bad in (nested(60), nested(2000), "[" * 100_000, {"enum": ["x" * 300_000]}):
        with pytest.raises(UserError, match=r"deep|long|JSON|characters"):
            Grammar.json_schema(bad)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"minLenght": 3}, "at: the keyword 'minLenght'.*\n.*minLength"),
        ({"properties": {"a": {"not": {}}}}, "at.properties.a: the keyword 'not'"),
        ({"anyOf": [{}, {"contains": {}}]}, r"at.anyOf\[1\]: .*contains"),
        ({"uniqueItems": "yes"}, "uniqueItems must be true or false"),
        ({"items": {"if": {}}}, "at.items: .*'if'"),
        ({"$defs": {"b": {"nullable": True}}}, r"at.\$defs.b: .*nullable"),
        ({"x-guidance": {"lenient": True}}, "x-guidance"),
        ({"exclusiveMinimum": True}, "must be a number"),
        ({"prefixItems": [], "additionalItems": False}, "needs a list of items"),
        ({"properties": []}, "an object of schemas"),
        ({"items": 3}, "at.items: a JSON schema is an object"),
        (True, "at: a JSON schema is an object"),
        ("{", "at: not JSON"),
        ({"const": float("nan")}, "at: not JSON"),
        ({"minimum": 2**53 + 1, "maximum": 2**55}, "minimum has a number beyond 2.53"),
        ({"exclusiveMaximum": 1e30}, "exclusiveMaximum has a number beyond"),
        ({"enum": [1, {"a": [-(2**63)]}]}, "enum has a number beyond"),
        ({"multipleOf": 99_991}, "multipleOf 99991 has too many digits"),
        ({"$ref": "#/default", "default": {"not": {}}}, "at.default: .*'not'"),
    ],
)
def test_schemas_that_would_not_be_enforced_are_refused(schema, message):
    with pytest.raises(UserError) as caught:
        Grammar.json_schema(schema, "at")
    assert re.search(message, str(caught.value))
