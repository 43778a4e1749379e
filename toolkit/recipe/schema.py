"""The recipe's schema: every key, its type, its default and its meaning."""

from typing import Annotated, Literal, Union

from pydantic import BeforeValidator, Field, model_validator

from ..registry import entries
from ..section import Section
from ..stages.export import Config as Export
from ..stages.train import Config as Train
from ..stages.validate import Config as Validate

METHODS = entries("toolkit.quant", "Config")


def _with_method(value):
    """A quantize block that names no method rounds to nearest."""
    return {"method": "rtn", **value} if isinstance(value, dict) else value


# A union of one would be its only member, which pydantic refuses to discriminate.
_METHOD_CONFIGS = tuple(module.Config for module in METHODS.values())
Quantize = Annotated[
    Annotated[Union[_METHOD_CONFIGS], Field(discriminator="method")]  # noqa: UP007
    if len(_METHOD_CONFIGS) > 1
    else _METHOD_CONFIGS[0],
    BeforeValidator(_with_method),
]


def _listed(value):
    return [value] if isinstance(value, str) else value


Sources = Annotated[list[str], BeforeValidator(_listed)]


class Fresh(Section):
    """A model from scratch, with a byte-level BPE tokenizer trained on the data."""

    model_type: Literal["llama"] = "llama"
    """The architecture."""
    vocabulary: int = Field(2048, ge=320)
    """Tokens of the tokenizer, the 256 bytes and the chat tokens included."""
    hidden_size: int = Field(256, ge=8)
    """Width of the residual stream."""
    intermediate_size: int = Field(512, ge=8)
    """Width of the feed-forward layers."""
    layers: int = Field(4, ge=1)
    """Transformer blocks."""
    heads: int = Field(4, ge=1)
    """Attention heads."""
    key_value_heads: int | None = Field(None, ge=1)
    """Heads of keys and values; absent = as many as heads."""
    positions: int = Field(2048, ge=8)
    """Longest sequence."""
    rope_theta: float = Field(10000.0, gt=0)
    """Base of the rotary position embedding."""
    tied: bool = True
    """Use the embedding as the output head."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float16"
    """Storage type of the checkpoint."""

    @model_validator(mode="after")
    def _divisible(self):
        if self.hidden_size % self.heads:
            raise ValueError("hidden_size must be a multiple of heads")
        if self.heads % (self.key_value_heads or self.heads):
            raise ValueError("heads must be a multiple of key_value_heads")
        return self


class Model(Section):
    """Where the base model comes from."""

    path: str | None = None
    """A local folder or a Hub id."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint. Only if you read it."""
    fresh: Fresh | None = None
    """A model from scratch instead of a checkpoint."""

    @model_validator(mode="after")
    def _one(self):
        if (self.path is None) == (self.fresh is None):
            raise ValueError("give either path or fresh")
        return self


class Data(Section):
    """What is read, and which of its tokens are trained."""

    train: Sources = Field([])
    """Files, folders, Hub ids or builtin:<name>."""
    valid: Sources = Field([])
    """Held-out rows; absent = a split valid or validation, else rows set aside."""
    max_length: int = Field(512, ge=8)
    """Longest row in tokens; text is cut into windows, longer chats truncated."""
    train_on: Literal["answers", "everything"] = "answers"
    """answers = every assistant turn or completion; everything = all tokens."""
    columns: dict[str, str] = Field({})
    """Names of your columns: {prompt: question, completion: answer}."""
    streaming: bool = False
    """Read a Hub data set as a stream, without downloading it whole; needs limit."""
    limit: int | None = Field(None, ge=1)
    """Rows to read of each source, at most."""


class Stage(Section):
    """One step of the recipe: a mapping with exactly one key."""

    # pydantic's base class has an attribute `validate`, so that field has an alias.

    train: Train | None = None
    """Train or fine-tune."""
    quantize: Quantize | None = None
    """Quantize after training."""
    check: Validate | None = Field(None, alias="validate")
    """Measure from disk and check the gates."""
    export: Export | None = None
    """Publish."""

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value):
        """`- validate:` with nothing below is a block of defaults."""
        if not isinstance(value, dict):
            return value
        return {key: {} if block is None else block for key, block in value.items()}

    @model_validator(mode="after")
    def _one(self):
        if len(self.model_fields_set) != 1:
            raise ValueError("a stage has one key: train, quantize, validate or export")
        return self

    @property
    def kind(self) -> str:
        """train, quantize, validate or export."""
        field = next(iter(self.model_fields_set))
        return type(self).model_fields[field].alias or field

    @property
    def config(self) -> Section:
        """The block of that kind."""
        return getattr(self, next(iter(self.model_fields_set)))


def _model(value):
    return {"path": value} if isinstance(value, str) else value


class Recipe(Section):
    """A whole job."""

    model: Annotated[Model, BeforeValidator(_model)]
    """A local folder, a Hub id, or {fresh: {...}}."""
    data: Data = Data()
    """Rows to train and measure on."""
    seed: int = Field(0, ge=0)
    """Seed of everything random."""
    output: str | None = None
    """The run folder; absent = exports/<recipe name>."""
    stages: list[Stage] = Field(min_length=1)
    """What to do, in order."""
