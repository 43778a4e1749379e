"""Arguments of tool calls whose format writes every value as text.

mlx-lm's parsers of these formats know the plain `type` of an argument only. Here they
give its text, of which a value is made that its JSON schema takes.
"""

import ast
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import NoneType
from typing import Any

from ..generation.json_schema import find

TEXT_FORMATS = {"qwen3_coder", "glm47", "laguna", "longcat", "minimax_m2", "minicpm5"}
"""Modules of mlx-lm's parsers."""
TYPES: dict[str, tuple[type, ...]] = {
    **{"null": (NoneType,), "boolean": (bool,), "integer": (int,)},
    **{"number": (int, float), "array": (list,), "object": (dict,)},
}
MAX_CHECKS = 200
"""Of schemas for a value; some refer to themselves."""


def texts_only(tools: Sequence[dict]) -> list[dict]:
    """The tools for a parser: all arguments are texts."""
    functions = []
    for function in (tool["function"] for tool in tools):
        texts = {name: {"type": "string"} for name in _properties(function)}
        functions.append(
            {"name": function["name"], "parameters": {"properties": texts}}
        )
    return [{"function": function} for function in functions]


def typed(name: str, arguments: dict, tools: Sequence[dict]) -> dict:
    """The arguments of a function; texts that are no value of their schema stay."""
    functions = (tool["function"] for tool in tools)
    function = next((f for f in functions if f["name"] == name), {})
    root, schemas = function.get("parameters"), _properties(function)
    return {k: _value(v, schemas.get(k, {}), root) for k, v in arguments.items()}


def _properties(function: dict) -> dict[str, Any]:
    return (function.get("parameters") or {}).get("properties") or {}


def _value(text: Any, schema: Any, root: Any) -> Any:
    text = "null" if text is None else text  # some parsers read it at once
    for read in (json.loads, ast.literal_eval) if isinstance(text, str) else ():
        # A number may have too many digits, and a text be nested too deeply.
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            value = read(text.strip())
            if isinstance(value, float):
                value = int(value) if value.is_integer() else value
                if not math.isfinite(value):
                    continue
            is_text = isinstance(value, str)
            if not is_text and _takes(schema, value, root, iter(range(MAX_CHECKS))):
                return value
    return text


def _takes(schema: Any, value: Any, root: Any, checks: Iterator[int]) -> bool:
    """Whether a schema takes a value that is no text, by its types and lists."""
    if not isinstance(schema, dict) or next(checks, None) is None:
        return True

    def takes(each: Any) -> bool:
        return _takes(each, value, root, checks)

    lists = [schema["const"]] if "const" in schema else schema.get("enum", [value])
    types = schema.get("type", [*TYPES])
    kinds = [
        TYPES.get(kind, ()) for kind in ([types] if isinstance(types, str) else types)
    ]
    return (
        ("$ref" not in schema or takes(find(root, schema["$ref"])))
        and any(type(each) is type(value) and each == value for each in lists)
        and any(type(value) in kind for kind in kinds)
        and all(map(takes, schema.get("allOf", ())))
        and all(any(map(takes, schema.get(key, [True]))) for key in ("anyOf", "oneOf"))
    )
