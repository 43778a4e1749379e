"""The base of every block of a recipe: unknown keys are errors, docstrings are help."""

from pydantic import BaseModel, ConfigDict


class ConfigModel(BaseModel):
    """A block of a recipe. Frozen, strict about keys, without coercion of types."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )
