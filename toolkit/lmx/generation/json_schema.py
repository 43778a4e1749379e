"""The JSON schemas that constrain a completion: which keywords they may have.

llguidance enforces these keywords of draft 2020-12. It ignores a keyword that it does
not know, as the standard says, so a misspelt one would have no effect.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from ..config.messages import nearest
from ..errors import UserError

MAX_DEPTH = 50
"""Schemas in schemas. llguidance reads 127 levels of JSON, two for each of them."""
MAX_CHAIN = 400
"""Schemas or rules of which each contains or names the next. llguidance follows them by
recursion, and some chains of thousands take minutes."""
MAX_NUMBER = 2**53
"""llguidance rounds larger numbers, cuts them to 64 bits, or crashes."""
MAX_MULTIPLE = 10_000
"""Of the digits of multipleOf: compiling takes as many states, .3 seconds here."""
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
UNENFORCED = {"uniqueItems"}
"""Accepted with a warning: clients write it for a set (pydantic), and read a set that
has an item twice. Only an item that is complete shows that it is one too many."""
NUMERIC = NUMBERS | {"minimum", "maximum", "multipleOf", "enum", "const"}
KEYWORDS = SCHEMA_MAPS | SCHEMA_LISTS | SCHEMAS | NUMBERS
KEYWORDS |= ENFORCED | ANNOTATIONS | UNENFORCED


def check_schema(schema: Any, place: str) -> None:
    """Refuse a schema whose keywords would not all be enforced.

    Args:
        place: of the schema, for errors.

    Raises:
        UserError: with the place of the keyword.
    """
    if not isinstance(schema, dict):
        raise UserError("a JSON schema is an object", place=place)
    root, top = schema, place
    waiting = [(schema, place, 0)]
    below: dict[int, list[int]] = {}
    while waiting:
        schema, place, depth = waiting.pop()
        if isinstance(schema, bool) or id(schema) in below:
            continue
        if not isinstance(schema, dict):
            raise UserError("a JSON schema is an object, true or false", place=place)
        if depth > MAX_DEPTH:
            raise UserError("the JSON schema is nested too deeply", place=place)
        if "additionalItems" in schema and not isinstance(schema.get("items"), list):
            raise UserError("additionalItems needs a list of items", place=place)
        inner, reference = [], str(schema.get("$ref"))
        if (target := find(root, reference)) is not None:
            path = reference.partition("#/")[2].replace("/", ".")
            inner.append((target, f"{top}.{path}", 0))
        for keyword, value in schema.items():
            _check_keyword(keyword, value, place)
            each = _schemas_below(keyword, value)
            inner += [(one, f"{place}.{path}", depth + 1) for path, one in each]
        below[id(schema)] = [id(each) for each, _, _ in inner]
        waiting += inner
    require_short_chain(id(root), below, top)


def enforced(schema: Any) -> Any:
    """A checked schema as llguidance takes it: without `UNENFORCED`, with a warning."""
    if not isinstance(schema, dict):
        return schema
    kept = {k: value for k, value in schema.items() if k not in UNENFORCED}
    for keyword in schema.keys() & UNENFORCED:
        if schema[keyword]:
            message = f"{keyword} is not enforced: items may come twice"
            warnings.warn(message, stacklevel=2)
    for keyword, value in kept.items():
        if keyword in SCHEMA_MAPS:
            kept[keyword] = {name: enforced(each) for name, each in value.items()}
        elif keyword in SCHEMA_LISTS and isinstance(value, list):
            kept[keyword] = [*map(enforced, value)]
        elif keyword in SCHEMAS:
            kept[keyword] = enforced(value)
    return kept


def require_short_chain(
    start: Any, following: Mapping[Any, Iterable[Any]], place: str
) -> None:
    """Refuse a chain of more than MAX_CHAIN, of which each one names the next.

    Args:
        following: those that each names. A chain that comes back to itself ends there.

    Raises:
        UserError: with the place.
    """
    lengths: dict[Any, int] = {}

    def measure(name: Any, depth: int) -> int:
        if depth + lengths.get(name, 1) > MAX_CHAIN:
            message = f"a chain of references is longer than {MAX_CHAIN}"
            raise UserError(message, place=place)
        if name not in lengths:
            lengths[name] = longest = 0
            for each in following.get(name, ()):
                longest = max(longest, measure(each, depth + 1))
            lengths[name] = 1 + longest
        return lengths[name]

    measure(start, 0)


def _numbers(value: Any) -> Iterator[int | float]:
    """All numbers in a JSON value."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict | list):
            waiting += value.values() if isinstance(value, dict) else value
        elif isinstance(value, int | float):
            yield value


def find(schema: Any, reference: str) -> dict | None:
    """The object in a schema that a $ref such as "#/$defs/a" names, if there is one."""
    for part in reference.partition("#/")[2].split("/"):
        part = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and part.isdecimal() and int(part) < len(schema):
            schema = schema[int(part)]
        else:
            schema = schema.get(part) if isinstance(schema, dict) else None
    return schema if isinstance(schema, dict) else None


def _check_keyword(keyword: str, value: Any, place: str) -> None:
    if keyword not in KEYWORDS:
        raise UserError(
            f"the keyword '{keyword}' of JSON schemas is not supported",
            place=place,
            hint=nearest(keyword, sorted(KEYWORDS - ANNOTATIONS)),
        )
    if keyword in UNENFORCED and not isinstance(value, bool):
        raise UserError(f"{keyword} must be true or false", place=place)
    if keyword in NUMBERS and isinstance(value, bool):
        raise UserError(f"{keyword} must be a number", place=place)
    if keyword in NUMERIC and any(abs(x) > MAX_NUMBER for x in _numbers(value)):
        raise UserError(f"{keyword} has a number beyond 2^53", place=place)
    if keyword == "multipleOf" and isinstance(value, int | float):
        digits = Decimal(str(value)).normalize().as_tuple().digits
        if int("".join(map(str, digits))) > MAX_MULTIPLE:
            raise UserError(f"multipleOf {value} has too many digits", place=place)
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
