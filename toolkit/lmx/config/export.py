"""The `export` block: formats and the Hugging Face Hub."""

from typing import Literal

from pydantic import Field, model_validator

from .base import ConfigModel

HUB_REPO_ID = r"^\w[\w.-]*/\w[\w.-]*$"


class ExportConfig(ConfigModel):
    """Publish the current model."""

    formats: list[Literal["mlx", "hf", "peft", "gguf"]] = Field(["mlx"], min_length=1)
    """mlx: model/, for mlx-lm, LM Studio and mlx-swift. hf: hf/, the dequantized
    weights for transformers. peft: peft/, the trained adapter. gguf: gguf/NAME.gguf for
    llama.cpp, and gguf/draft/NAME-draft.gguf if there is a draft; docs/export.md lists
    its architectures."""
    adapter_path: str | None = Field(None, examples=["exports/lora/adapters"])
    """The folder of a trained adapter of mlx-lm, which peft exports. Default: the
    adapter of the recipe's train stage."""
    draft_model: str | None = Field(None, examples=["exports/draft_eagle3/draft"])
    """Folder or Hub id of a drafter or draft model of the current model, which gguf
    exports beside it. Default: that of the recipe's draft stage."""
    hub_repo_id: str | None = Field(
        None, pattern=HUB_REPO_ID, examples=["user/Qwen3-0.6B-4bit-qat"]
    )
    """Also upload model/ to this Hugging Face Hub repository, user/name."""
    private: bool = True
    """Create the repository as private."""
    license: str | None = Field(
        None, pattern=r"^[a-z0-9][a-z0-9.+-]*$", examples=["apache-2.0"]
    )
    """Hub id of the license, e.g. apache-2.0. Default: that of the base model."""

    @model_validator(mode="after")
    def _check_formats(self):
        if len(set(self.formats)) < len(self.formats):
            raise ValueError("formats has duplicates")
        if self.adapter_path and "peft" not in self.formats:
            raise ValueError("adapter_path needs peft in formats")
        if self.draft_model and "gguf" not in self.formats:
            raise ValueError("draft_model needs gguf in formats")
        if self.hub_repo_id and "mlx" not in self.formats:
            raise ValueError("hub_repo_id needs mlx in formats")
        return self
