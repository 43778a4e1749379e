"""TODO."""

from importlib.util import find_spec
from typing import Literal

from pydantic import Field, model_validator

from .base import ConfigModel

HUB_REPO_ID = r"^\w[\w.-]*/\w[\w.-]*$"


class ExportConfig(ConfigModel):
    """Publish the current model."""

    formats: list[Literal["mlx", "hf", "peft", "gguf"]] = Field(["mlx"], min_length=1)
    """mlx: model/, a folder that stock mlx-lm, LM Studio and mlx-swift load; dense:
    dense/, the same weights unquantized as transformers loads them; peft: peft/, the
    trained adapter; gguf: gguf/NAME.gguf for llama.cpp, of Llama and Qwen models."""
    hub_repo_id: str | None = Field(None, pattern=HUB_REPO_ID)
    """A repository of the Hugging Face Hub, user/name, where model/ goes too."""
    private: bool = True
    """Whether a repository that is made for it is for you alone."""
    license: str | None = Field(None, pattern=r"^[a-z0-9][a-z0-9.+-]*$")
    """The Hub's id of the license, as apache-2.0; absent = that of the base model."""

    @model_validator(mode="after")
    def _can_be_written(self):
        if len(set(self.formats)) < len(self.formats):
            raise ValueError("a format is named twice")
        if "gguf" in self.formats and not find_spec("gguf"):
            raise ValueError("the format gguf needs its package: pip install gguf")
        if self.hub_repo_id and "mlx" not in self.formats:
            raise ValueError(
                "hub_repo_id is for the format mlx, which formats leaves out"
            )
        return self
