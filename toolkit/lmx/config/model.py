"""Where a recipe's base model comes from."""

from typing import Literal

from pydantic import Field, model_validator

from .base import ConfigModel


class ScratchModelConfig(ConfigModel):
    """A model from scratch, with a byte-level BPE tokenizer trained on the data."""

    model_type: Literal["llama"] = "llama"
    """The architecture."""
    vocab_size: int = Field(2048, ge=320)
    """Tokens of the tokenizer, the 256 bytes and the chat tokens included."""
    hidden_size: int = Field(256, ge=8)
    """Width of the residual stream."""
    intermediate_size: int = Field(512, ge=8)
    """Width of the feed-forward layers."""
    num_hidden_layers: int = Field(4, ge=1)
    """Transformer blocks."""
    num_attention_heads: int = Field(4, ge=1)
    """Attention heads."""
    num_key_value_heads: int | None = Field(None, ge=1)
    """Heads of keys and values; absent = as many as heads."""
    max_position_embeddings: int = Field(2048, ge=8)
    """Longest sequence."""
    rope_theta: float = Field(10000.0, gt=0)
    """Base of the rotary position embedding."""
    tie_word_embeddings: bool = True
    """Use the embedding as the output head."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float16"
    """Storage type of the checkpoint."""

    @model_validator(mode="after")
    def _divisible(self):
        if self.hidden_size % self.num_attention_heads:
            raise ValueError("hidden_size must be a multiple of num_attention_heads")
        if self.num_attention_heads % (
            self.num_key_value_heads or self.num_attention_heads
        ):
            raise ValueError(
                "num_attention_heads must be a multiple of num_key_value_heads"
            )
        return self


class ModelConfig(ConfigModel):
    """Where the base model comes from."""

    path: str | None = None
    """A local folder, a Hub id or a GGUF file."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint. Only if you read it."""
    from_scratch: ScratchModelConfig | None = None
    """A model from scratch instead of a checkpoint."""

    @model_validator(mode="after")
    def _one(self):
        if (self.path is None) == (self.from_scratch is None):
            raise ValueError("give either path or from_scratch")
        return self
