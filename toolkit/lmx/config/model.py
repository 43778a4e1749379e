"""The `model` block: the base model of a recipe."""

from typing import Literal

from pydantic import Field, model_validator

from .base import ConfigModel


class ScratchModelConfig(ConfigModel):
    """A Llama with random weights, and a byte-level BPE tokenizer of the data."""

    vocab_size: int = Field(2048, ge=320)
    """Vocabulary size, including 256 byte tokens and the chat tokens."""
    hidden_size: int = Field(256, ge=8)
    """Width of the residual stream."""
    intermediate_size: int = Field(512, ge=8)
    """Width of the feed-forward layers."""
    num_hidden_layers: int = Field(4, ge=1)
    """Number of transformer blocks."""
    num_attention_heads: int = Field(4, ge=1)
    """Number of attention heads."""
    num_key_value_heads: int | None = Field(None, ge=1)
    """Number of key and value heads. Default: num_attention_heads."""
    max_position_embeddings: int = Field(2048, ge=8)
    """Maximum sequence length of the model."""
    rope_theta: float = Field(10000.0, gt=0)
    """Base of the rotary position embedding."""
    tie_word_embeddings: bool = True
    """Use the embedding matrix as output head."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float16"
    """Storage dtype of the checkpoint."""

    @model_validator(mode="after")
    def _check_head_counts(self):
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
    """The base model: an existing checkpoint, or a model from scratch."""

    path: str | None = Field(None, examples=["Qwen/Qwen3-0.6B", "model.gguf"])
    """A local folder, a Hub id or a GGUF file."""
    revision: str | None = Field(None, examples=["main"])
    """Branch, tag or commit of a Hub id."""
    trust_remote_code: bool = False
    """Run Python code from the checkpoint. Enable it only for code that you
    reviewed."""
    from_scratch: ScratchModelConfig | None = None
    """Initialize a new model instead of loading a checkpoint."""

    @model_validator(mode="after")
    def _check_one_source(self):
        if (self.path is None) == (self.from_scratch is None):
            raise ValueError("give either path or from_scratch")
        return self
