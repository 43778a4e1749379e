"""All quantization methods, and the block of a recipe that names one."""

from typing import Annotated, Union

from pydantic import BeforeValidator, Field

from ..registry import entries

METHODS = entries("toolkit.quant.methods", "Config")


def _with_method(value):
    """A quantize block that names no method rounds to nearest."""
    return {"method": "rtn", **value} if isinstance(value, dict) else value


_CONFIGS = tuple(module.Config for module in METHODS.values())
Quantize = Annotated[
    Annotated[Union[_CONFIGS], Field(discriminator="method")],  # noqa: UP007
    BeforeValidator(_with_method),
]
