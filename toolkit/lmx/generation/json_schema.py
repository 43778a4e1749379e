"""The JSON schemas that constrain a completion: which keywords they may have.

llguidance enforces these keywords of draft 2020-12. It ignores a keyword that it does
not know, as the standard says, so a misspelt one would have no effect.
"""

from collections.abc import Iterator
from typing import Any

from ..config.messages import nearest
from ..errors import UserError

MAX_DEPTH = 50
"""Schemas in schemas. llguidance reads 127 levels of JSON, two for each of them."""
SCHEMA_MAPS = {"properties", "patternProperties", "$defs", "definitions"}
SCHEMA_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems", "items"}
SCHEMAS = {"items", "additionalItems", "additionalProperties"}
NUMBERS = {"exclusiveMinimum", "exclusiveMaximum"}
"""Keywords that are booleans in draft 4, which llguidance reads as absent."""
ENFORCED = {
    *("type", "enum", "const", "$ref", "required", "minProperties", "maxProperties"),
    *("minItems", "maxItems", "minLength", "maxLength", "pattern", "format"),
    *("minimum", "maximum", "multipleOf"),
}
ANNOTATIONS = {
    *("$schema", "$id", "id", "$anchor", "$comment", "title", "description"),
    *("default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("contentMediaType", "contentEncoding"),
    # The oneOf next to it says the same.
    "discriminator",
}
KEYWORDS = SCHEMA_MAPS | SCHEMA_LISTS | SCHEMAS | NUMBERS | ENFORCED | ANNOTATIONS


def check_schema(schema: Any, place: str) -> None:
    """Refuse a schema whose keywords would not all be enforced.

    Args:
        place: of the schema, for errors.

    Raises:
        UserError: with the place of the keyword.
    """
    if not isinstance(schema, dict):
        raise UserError("a JSON schema is an object", place=place)
    waiting = [(schema, place, 0)]
    while waiting:
        schema, place, depth = waiting.pop()
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, dict):
            raise UserError("a JSON schema is an object, true or false", place=place)
        if depth > MAX_DEPTH:
            raise UserError("the JSON schema is nested too deeply", place=place)
        if "additionalItems" in schema and not isinstance(schema.get("items"), list):
            raise UserError("additionalItems needs a list of items", place=place)
        for keyword, value in schema.items():
            _check_keyword(keyword, value, place)
            inner = _schemas_below(keyword, value)
            waiting += [(each, f"{place}.{path}", depth + 1) for path, each in inner]


def _check_keyword(keyword: str, value: Any, place: str) -> None:
    if keyword not in KEYWORDS:
        raise UserError(
            f"the keyword '{keyword}' of JSON schemas is not supported",
            place=place,
            hint=nearest(keyword, sorted(KEYWORDS - ANNOTATIONS)),
        )
    if keyword in NUMBERS and isinstance(value, bool):
        raise UserError(f"{keyword} must be a number", place=place)
    if keyword in SCHEMA_MAPS and not isinstance(value, dict):
        raise UserError(f"{keyword} must be an object of schemas", place=place)


def _schemas_below(keyword: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The schemas in the value of a keyword, with their paths."""
    if keyword in SCHEMA_MAPS:
        for name, schema in value.items():
            yield f"{keyword}.{name}", schema
    elif keyword in SCHEMA_LISTS and isinstance(value, list):
        for index, schema in enumerate(value):
            yield f"{keyword}[{index}]", schema
    elif keyword in SCHEMAS:
        yield keyword, value
