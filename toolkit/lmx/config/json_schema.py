"""The JSON Schema of a recipe: editors, messages and `lmx schema` read it."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from .errors import KeyPath
from .schema import RecipeConfig
from .yaml_io import SWITCHES

# Stands for the keys of a mapping, which the user chooses.
PATTERN = "<pattern>"
# YAML 1.2, which editors read, takes these words for text. The loader takes any case.
_WORDS = "|".join(
    "".join(f"[{letter.upper()}{letter}]" for letter in word) for word in SWITCHES
)


class _EditorSchema(GenerateJsonSchema):
    """Pydantic's JSON Schema with what an editor shows and inserts."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def bool_schema(self, schema: Any) -> JsonSchemaValue:
        return {
            "type": ["boolean", "string"],
            "pattern": f"^({_WORDS})$",
            "patternErrorMessage": "expected true or false",
        }

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        # An editor would insert a whole block, or null for an absent key.
        if isinstance(schema.get("default"), BaseModel | None):
            return self.generate_inner(schema["schema"])
        return super().default_schema(schema)

    def tagged_union_schema(self, schema: Any) -> JsonSchemaValue:
        # `discriminator` is OpenAPI's. Editors choose by the constant `method`.
        union = super().tagged_union_schema(schema)
        union.pop("discriminator", None)
        return union


@cache
def recipe_schema() -> dict:
    """The JSON Schema of a recipe (draft 2020-12), for editors. Do not change it.

    It accepts every recipe that the loader accepts. It knows types, limits, choices and
    key names; rules that need two keys, files or models are the loader's alone.
    """
    text = json.dumps(RecipeConfig.model_json_schema(schema_generator=_EditorSchema))
    head = {"$schema": _EditorSchema.schema_dialect, "title": "lmx recipe"}
    return head | json.loads(text, object_hook=_on_lines)


def _on_lines(node: dict) -> dict:
    """The node without the title of a block, with its description on one line."""
    if isinstance(node.get("title"), str):
        del node["title"]
    if isinstance(text := node.get("description"), str):
        node["description"] = " ".join(text.split())
    return node


def alternatives(node: dict) -> list[dict]:
    """The schemas of which a value has one, without choices and references."""
    if "$ref" in node:
        return [recipe_schema()["$defs"][node["$ref"].rpartition("/")[2]]]
    parts = node.get("anyOf", node.get("oneOf"))
    return [n for part in parts for n in alternatives(part)] if parts else [node]


@cache
def sections() -> dict[str, list[dict]]:
    """The blocks of a recipe by address, each before its inner blocks.

    An address is the dotted path, e.g. "stages.train.adapter"; "" = the top level. Its
    block has one of several schemas, e.g. that of a quantization method.
    """
    found: dict[str, list[dict]] = {}
    for address, block in _walk("", recipe_schema()):
        variants = found.setdefault(address, [])
        if block not in variants:
            variants.append(block)
    return found


def _walk(address: str, node: dict) -> Iterator[tuple[str, dict]]:
    for part in alternatives(node):
        if "properties" in part:
            yield address, part
            for key, value in part["properties"].items():
                yield from _walk(f"{address}.{key}".lstrip("."), value)
        if "items" in part:
            yield from _walk(address, part["items"])
        if isinstance(values := part.get("additionalProperties"), dict):
            yield from _walk(f"{address}.{PATTERN}", values)


def section_at(path: KeyPath, data: Any) -> tuple[str, dict]:
    """The address and the schema of the block at `path` of `data`."""
    steps = [step for step in path if isinstance(step, str)]

    def is_here(address: str) -> bool:
        parts = address.split(".") if address else []
        pairs = zip(parts, steps, strict=False)
        return len(parts) == len(steps) and all(p in (s, PATTERN) for p, s in pairs)

    for step in path:
        data = data[step]
    address = next(filter(is_here, sections()))
    variants = sections()[address]
    for block in variants:
        for key, node in block["properties"].items():
            if "const" in node and node["const"] == data.get(key):
                return address, block
    return address, variants[0]
