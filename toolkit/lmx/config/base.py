"""Base class of every recipe block: strict validation, docstrings as help texts."""

from pydantic import BaseModel, ConfigDict


class ConfigModel(BaseModel):
    """A recipe block: immutable, without unknown keys and without type coercion."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )
