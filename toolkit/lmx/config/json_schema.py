"""The recipe schema as JSON Schema (draft 2020-12), for editors.

It accepts every recipe that the loader accepts. It knows types, limits, choices and key
names; rules that need two keys, files or models are the loader's alone.
"""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from .loader import SWITCHES
from .schema import RecipeConfig

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


def recipe_schema() -> dict:
    """The JSON Schema of a recipe."""
    schema = RecipeConfig.model_json_schema(schema_generator=_EditorSchema)
    head = {"$schema": _EditorSchema.schema_dialect, "title": "lmx recipe"}
    return head | _without_titles(schema)


def _without_titles(node: Any) -> Any:
    """The node without titles of blocks, with descriptions on one line."""
    if isinstance(node, list):
        return [_without_titles(item) for item in node]
    if not isinstance(node, dict):
        return node
    cleaned = {}
    for key, value in node.items():
        if key == "title" and isinstance(value, str):
            continue
        if key == "description" and isinstance(value, str):
            value = " ".join(value.split())
        cleaned[key] = _without_titles(value)
    return cleaned
