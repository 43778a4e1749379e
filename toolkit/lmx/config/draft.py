"""The `draft` block: train a draft model for speculative decoding."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from .base import ConfigModel
from .budget import Budget
from .quantize import QuantizeConfig

Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
# A generator with sliding windows can roll back this many tokens at any time.
MAX_DRAFT_TOKENS = 32
# Keys of `DrafterConfig` that only one architecture reads.
DRAFTER_KEYS = {"draft_vocab_size": "eagle3"}
DEFAULT_STEPS = 1000
Architecture = Literal["model", "eagle3", "dflash"]


class DraftModelConfig(ConfigModel):
    """Initial draft model: pruned from the target, or from another model."""

    init_from: str | None = None
    """Folder or Hub id of a model with the target's tokenizer to prune. Default: the
    target model."""
    num_layers: Count | list[Annotated[int, Field(ge=0)]] | None = None
    """Number of blocks to keep, by importance; or a list of block indices. Default: a
    quarter of the blocks."""

    def depth(self, count: int) -> int:
        """Blocks of a draft model that is pruned from `count` blocks, by number."""
        return min(count, self.num_layers or max(1, count // 4))

    @model_validator(mode="after")
    def _check_shape(self):
        layers = self.num_layers
        if isinstance(layers, list) and len(set(layers)) != len(layers):
            raise ValueError("num_layers has duplicate blocks")
        if layers == []:
            raise ValueError("num_layers has no blocks")
        return self


class DrafterConfig(ConfigModel):
    """Size of a drafter that reads the target's hidden states."""

    num_layers: Count | None = None
    """Decoder layers. Default: 1 for eagle3, 3 for dflash."""
    layer_ids: list[Annotated[int, Field(ge=0)]] | None = Field(None, min_length=1)
    """Blocks of the target, from 0, whose outputs are read. Default: three blocks near
    the start, the middle and the end."""
    num_draft_tokens: int = Field(5, ge=1, le=MAX_DRAFT_TOKENS)
    """Draft tokens per round in training. dflash drafts them in one pass."""
    draft_vocab_size: Count | None = None
    """eagle3: the most frequent tokens of the completions that it can draft. Default:
    all tokens."""

    @model_validator(mode="after")
    def _check_layers(self):
        layers = self.layer_ids or []
        if layers != sorted(set(layers)):
            raise ValueError("layer_ids must be in ascending order")
        return self


class DataGenerationConfig(ConfigModel):
    """Completions that the target model generates as training data of the draft."""

    num_prompts: int = Field(2000, ge=1)
    """Maximum training prompts."""
    num_eval_prompts: int = Field(64, ge=1)
    """Maximum validation prompts."""
    max_tokens: int = Field(256, ge=2)
    """Maximum tokens per completion."""
    temperatures: list[Annotated[float, Field(ge=0)]] = Field([0.0, 0.7], min_length=1)
    """Sampling temperatures, used for the prompts in turn."""
    text_tokens: int = Field(0, ge=0)
    """Tokens of the training data as it is (prompts, given answers, texts) on which the
    first half of the steps trains. The target predicts them in one forward pass, while
    it generates a completion token by token."""
    top_k: Count | None = 64
    """Most probable tokens of the target that are compared per position; the remaining
    probability counts as one outcome. Those of completions are cached. null = all
    tokens, without a cache: the target runs in every training step."""
    max_hidden_states_gb: float = Field(20.0, ge=0)
    """eagle3, dflash: the target's hidden states are cached on disk if they are not
    larger. Otherwise the target runs in every training step."""


class DraftBenchmarkConfig(ConfigModel):
    """Benchmark of the trained draft on prompts of the validation data."""

    num_prompts: int = Field(16, ge=1)
    """Maximum number of prompts, split evenly across the chat, text and copy sets."""
    max_tokens: int = Field(64, ge=8)
    """Maximum tokens per completion."""
    temperature: float = Field(0.7, gt=0)
    """Temperature of the sampled completions. Greedy decoding is measured as well."""


class DraftThresholds(ConfigModel):
    """Limits. A draft that misses one ends the run with exit code 1."""

    min_acceptance_rate: float | None = Field(None, ge=0, le=1)
    """Minimum acceptance rate, for greedy and for sampled decoding."""
    min_speedup: float | None = Field(None, gt=0)
    """Minimum measured speed-up, for greedy and for sampled decoding."""


class DraftConfig(ConfigModel):
    """Train a draft model for speculative decoding by distilling the current model."""

    architecture: Architecture = "model"
    """model: a small language model, which every engine serves. eagle3 (arXiv
    2503.01840), dflash (arXiv 2602.06036): a drafter that reads the target's hidden
    states."""
    draft_model: DraftModelConfig = DraftModelConfig()
    """Initial draft model, with architecture: model."""
    drafter: DrafterConfig = DrafterConfig()
    """Size of the drafter, with the other architectures."""
    data_generation: DataGenerationConfig = DataGenerationConfig()
    """Training data, generated by the target model."""
    ce_weight: Fraction = 0.1
    """Weight of the cross-entropy on the generated tokens; the distillation loss has
    the weight 1 - ce_weight."""
    steps: int | None = Field(None, ge=1)
    """Optimizer steps. Default: those of the budget, or 1000."""
    budget: Budget | None = None
    """In place of steps: time such as 45min or 3h, or a number of tokens. The time is
    that of the steps alone: the first ones are timed, without effect, and the log has
    how many follow."""
    batch_tokens: int = Field(2048, ge=8)
    """Tokens per step, including prompts and padding."""
    learning_rate: float = Field(5e-4, gt=0)
    """Peak learning rate, after a warmup of 5% of the steps; then cosine decay."""
    eval_steps: int = Field(200, ge=1)
    """Steps between validations. The stage keeps the weights with the longest accepted
    length on held-out prompts, other than those of the benchmark."""
    early_stopping_patience: int | None = Field(None, ge=1)
    """Validations in a row without a longer accepted length that end the training."""
    save_steps: int = Field(200, ge=1)
    """Steps between checkpoints."""
    logging_steps: int = Field(10, ge=1)
    """Steps between log lines."""
    quantization: QuantizeConfig | None = None
    """Present = quantize the trained draft, with the keys of a quantize stage."""
    benchmark: DraftBenchmarkConfig = DraftBenchmarkConfig()
    """Benchmark of the trained draft."""
    thresholds: DraftThresholds = DraftThresholds()
    """Limits. A draft that misses one is not published."""

    @model_validator(mode="after")
    def _check_keys(self):
        is_model = self.architecture == "model"
        # A resolved recipe names all keys, with their defaults.
        unread = {"drafter": DrafterConfig()}
        if not is_model:
            unread = {"draft_model": DraftModelConfig(), "quantization": None}
        for key, default in unread.items():
            if getattr(self, key) != default:
                raise ValueError(f"architecture: {self.architecture} has no {key}")
        for name, owner in DRAFTER_KEYS.items():
            value = getattr(self.drafter, name)
            if value is not None and self.architecture != owner:
                raise ValueError(f"drafter.{name} needs architecture: {owner}")
        if self.budget is not None and self.steps:
            raise ValueError("steps and budget exclude each other")
        return self

    @property
    def num_steps(self) -> int | None:
        """Optimizer steps; None = as many as the budget has time for."""
        if isinstance(self.budget, int):
            return max(1, self.budget // self.batch_tokens)
        return None if self.budget else self.steps or DEFAULT_STEPS
