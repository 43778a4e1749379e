"""TODO."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from .base import ConfigModel


def _listed(value):
    return [value] if isinstance(value, str) else value


DataSources = Annotated[list[str], BeforeValidator(_listed)]


class DataConfig(ConfigModel):
    """What is read, and which of its tokens are trained."""

    train: DataSources = Field([])
    """A file, folder, Hub id (owner/name, owner/name@revision) or builtin:<name>, or a
    list of them."""
    valid: DataSources = Field([])
    """Held-out rows; absent = a split valid or validation, else rows set aside."""
    max_seq_length: int = Field(512, ge=8)
    """Longest row in tokens; text is cut into windows, longer chats truncated."""
    loss_on: Literal["completions", "all"] = "completions"
    """answers = every assistant turn or completion; everything = all tokens."""
    columns: dict[str, str] = Field({})
    """Names of your columns: {prompt: question, completion: answer}."""
    streaming: bool = False
    """Read a Hub data set as a stream, without downloading it whole."""
    max_samples: int | None = Field(None, ge=1)
    """Rows to read of each source, at most."""
