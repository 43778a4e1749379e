"""The `data` block: dataset sources, sequence length and loss mask."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from .base import ConfigModel


def _as_list(value):
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


DataSources = Annotated[
    list[str], BeforeValidator(_as_list, json_schema_input_type=str | list[str] | None)
]


class DataConfig(ConfigModel):
    """The datasets, and which tokens have a loss."""

    train: DataSources = Field(
        [],
        examples=["data/skills/train.jsonl", "builtin:stdlib", "openai/gsm8k:main"],
    )
    """Training data: a file, folder, Hub id or `builtin:<name>`, or a list of them. A
    Hub id is owner/name, owner/name@revision, and both with a configuration and a
    split, as in openai/gsm8k:main[test]."""
    valid: DataSources = Field(
        [],
        examples=[
            "data/skills/valid.jsonl",
            ["valid.jsonl", "openai/gsm8k:main[test]"],
        ],
    )
    """Validation data. Default: the split `valid` or `validation` of the training data,
    else examples split off from it."""
    max_seq_length: int = Field(512, ge=8)
    """Maximum tokens per sequence. Longer texts are split, longer chats truncated."""
    loss_on: Literal["completions", "all"] = "completions"
    """Tokens with a loss. completions: assistant turns and completions; all: every
    token."""
    columns: dict[str, str] = Field(
        {}, examples=[{"prompt": "question", "completion": "answer"}]
    )
    """Column names of your dataset, e.g. {prompt: question, completion: answer}."""
    streaming: bool = False
    """Stream a Hub dataset instead of downloading all of it."""
    max_samples: int | None = Field(None, ge=1)
    """Maximum examples to read from each source."""
