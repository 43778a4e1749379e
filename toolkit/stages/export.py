"""The export stage: publish the proven artefact in the formats asked."""

from typing import Literal

from pydantic import Field

from ..section import Section


class Config(Section):
    """Publish the current model."""

    formats: list[Literal["mlx"]] = Field(["mlx"], min_length=1)
    """mlx: a folder stock mlx-lm, LM Studio and mlx-swift load."""
