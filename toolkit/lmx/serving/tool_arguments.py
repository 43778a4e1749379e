"""Arguments of tool calls whose format writes every value as text.

mlx-lm's parsers of these formats look at the plain `type` of an argument only, and read
"123" of any other schema as they like. Here they give the text, which a value of the
schema is made of.
"""

import ast
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ..generation.json_schema import find

TEXT_FORMATS = {
    *("qwen3_coder", "glm47", "laguna", "longcat", "minimax_m2", "minicpm5"),
}
"""Modules of mlx-lm's parsers."""
KINDS = ("null", "boolean", "integer", "number", "string", "array", "object")
MAX_REFERENCES = 20


def texts_only(tools: Sequence[dict]) -> list[dict]:
    """The tools with arguments that are all texts, for a parser."""
    functions = [tool["function"] for tool in tools]
    texts = [
        {name: {"type": "string"} for name in _schemas(function)}
        for function in functions
    ]
    return [
        {"function": {"name": f["name"], "parameters": {"properties": properties}}}
        for f, properties in zip(functions, texts, strict=True)
    ]


def typed(name: str, arguments: dict, tools: Sequence[dict]) -> dict:
    """The arguments of a function, as its JSON schema types them.

    A text that is no value of its schema stays as it is.
    """
    named = (t["function"] for t in tools if t["function"]["name"] == name)
    function = next(named, {})
    root, schemas = function.get("parameters") or {}, _schemas(function)
    return {
        key: _value(value, *_choices(schemas[key], root)) if key in schemas else value
        for key, value in arguments.items()
    }


def _schemas(function: dict) -> dict[str, Any]:
    properties = (function.get("parameters") or {}).get("properties")
    return properties if isinstance(properties, dict) else {}


def _choices(schema: Any, root: dict, depth: int = 0) -> tuple[set[str], list]:
    """The kinds of JSON values that a schema takes, and its only values, if any."""
    if not isinstance(schema, dict) or depth > MAX_REFERENCES:
        return {*KINDS}, []
    if isinstance(reference := schema.get("$ref"), str):
        return _choices(find(root, reference), root, depth + 1)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return {_kind(value) for value in values}, values
    for keyword in ("anyOf", "oneOf", "allOf"):
        if isinstance(inner := schema.get(keyword), list) and inner:
            parts = [_choices(each, root, depth + 1) for each in inner]
            kinds = [part[0] for part in parts]
            join = set.intersection if keyword == "allOf" else set.union
            # One without a list of values takes others too.
            values = (
                [v for _, some in parts for v in some]
                if all(p[1] for p in parts)
                else []
            )
            return join(*kinds), values
    kinds = schema.get("type", KINDS)
    return {kinds} if isinstance(kinds, str) else {*kinds}, []


def _kind(value: Any) -> str | None:
    """The kind of a value; None = JSON has none of it."""
    if isinstance(value, float):
        whole = "integer" if value.is_integer() else "number"
        return whole if math.isfinite(value) else None
    kinds = {bool: "boolean", int: "integer", str: "string", list: "array"}
    return (kinds | {dict: "object", type(None): "null"}).get(type(value))


def _value(given: Any, kinds: set[str], values: list) -> Any:
    """The value of one of these kinds that a text means; the text if there is none."""
    text = "null" if given is None else given  # some parsers read it at once
    if not isinstance(text, str):
        return given
    if text in values:
        return text
    for read in (json.loads, ast.literal_eval):
        # A number may have too many digits, and a text be nested too deeply.
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            value = read(text.strip())
            kind = _kind(value)
            is_right = kind in kinds or (kind == "integer" and "number" in kinds)
            if kind != "string" and is_right and (not values or value in values):
                is_whole = kind == "integer" and "integer" in kinds
                return int(value) if is_whole else value
    return text
