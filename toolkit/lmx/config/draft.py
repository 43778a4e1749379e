"""What a recipe says of a draft model: its shape, its lessons, how it is judged."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from .base import ConfigModel
from .quantize import QuantizeConfig

Count = Annotated[int, Field(ge=1)]
DraftLossName = Literal[
    "forward_kl", "reverse_kl", "jsd", "total_variation", "adaptive_kl_tv"
]


class DraftModelConfig(ConfigModel):
    """The draft's shape: cut from the target, from a sibling, or fresh."""

    init_from: str | None = None
    """A folder or Hub id with the target's tokens to cut from; absent = the target."""
    num_layers: Count | list[Annotated[int, Field(ge=0)]] | Literal["auto"] = "auto"
    """How many blocks are left, those most missed; or their numbers; auto = as many as
    predict the most speed on this machine after a few steps each."""
    hidden_size: Count | None = None
    """Width that is left, the most active channels; absent = all. Of a fresh one, its
    width."""
    intermediate_size: Count | None = None
    """Width of the feed-forward layers that is left, as above."""
    from_scratch: bool = False
    """Begin with random weights, in the shape of the target but for what is said."""

    @model_validator(mode="after")
    def _one_beginning(self):
        if self.from_scratch and (
            self.init_from or not isinstance(self.num_layers, int)
        ):
            raise ValueError(
                "from_scratch needs num_layers as a number, and no init_from"
            )
        if isinstance(self.num_layers, list) and len(set(self.num_layers)) != len(
            self.num_layers
        ):
            raise ValueError("num_layers names a block twice")
        if self.num_layers == []:
            raise ValueError("num_layers names no block")
        return self


class DataGenerationConfig(ConfigModel):
    """What the target says to the prompts of the rows, for the draft to learn."""

    num_prompts: int = Field(2000, ge=1)
    """Training prompts, at most."""
    num_eval_prompts: int = Field(64, ge=1)
    """Validation prompts, at most."""
    max_tokens: int = Field(256, ge=2)
    """Longest answer."""
    temperatures: list[Annotated[float, Field(ge=0)]] = Field([0.0, 0.7], min_length=1)
    """Temperatures of the answers, prompt by prompt in turn."""
    top_k: Count | None = 64
    """Likeliest tokens kept on disk of every prediction of the target, all others as
    one; null = keep nothing, and run the target beside the draft in every step."""


class OnPolicyConfig(ConfigModel):
    """Lessons of the last steps: the draft writes on where its own guesses fell, and
    the target tells what it would have said instead (arXiv 2605.29343)."""

    fraction: float = Field(0.5, gt=0, le=1)
    """Of the steps, the last ones."""
    rollout_tokens: int = Field(8, ge=1)
    """Tokens that the draft writes from every such place, at most."""
    rollout_interval: int = Field(100, ge=1)
    """Steps that learn from what was written at once, by the draft as it was then."""


class DraftBenchmarkConfig(ConfigModel):
    """How the finished draft is judged, on prompts of the validation rows."""

    num_prompts: int = Field(16, ge=1)
    """How many, at most; chats, texts and copying share them."""
    max_tokens: int = Field(64, ge=8)
    """Longest answer."""
    temperature: float = Field(0.7, gt=0)
    """Of the drawn answers; greedy ones are judged as well."""
    baseline_model: str | None = None
    """A folder or Hub id of a small model with the target's tokens, as it is to be had:
    it guesses too, for a column of its own."""


class DraftThresholds(ConfigModel):
    """Limits; a draft that misses one ends the run with exit code 1."""

    min_acceptance_rate: float | None = Field(None, ge=0, le=1)
    """Smallest share of guesses that stand, greedy and drawn."""
    min_speedup: float | None = Field(None, gt=0)
    """Smallest speed-up measured, greedy and drawn."""


Fraction = Annotated[float, Field(ge=0, le=1)]


class DraftConfig(ConfigModel):
    """Distil a draft model for speculative decoding from the current model."""

    draft_model: DraftModelConfig = DraftModelConfig()
    """The draft's shape and what it begins with."""
    data_generation: DataGenerationConfig = DataGenerationConfig()
    """What the target says to the prompts of the rows, for the draft to learn."""
    loss: DraftLossName = "adaptive_kl_tv"
    """forward, reverse or jensen_shannon divergence, total_variation, or acceptance:
    forward KL while guesses fall, total variation once they stand."""
    eta: float = Field(3.0, gt=0)
    """How soon the loss acceptance turns to total variation."""
    ce_weight: Fraction = 0.1
    """Weight of the loss on the tokens themselves; the other has the rest."""
    on_policy: OnPolicyConfig | None = None
    """Present = the last steps learn where the draft's own guesses fell."""
    steps: int = Field(1000, ge=1)
    """Optimizer steps."""
    batch_tokens: int = Field(2048, ge=8)
    """Tokens of a step, prompts and padding included."""
    learning_rate: float = Field(5e-4, gt=0)
    """Peak learning rate; it rises over 5% of the steps, then falls as a cosine."""
    eval_steps: int = Field(200, ge=1)
    """Steps between validations; the weights of the best one are left."""
    save_steps: int = Field(200, ge=1)
    """Steps between checkpoints."""
    logging_steps: int = Field(10, ge=1)
    """Steps between lines of the report."""
    quantization: QuantizeConfig | None = None
    """Present = quantize the draft after training, as a quantize stage would."""
    benchmark: DraftBenchmarkConfig = DraftBenchmarkConfig()
    """How the finished draft is judged."""
    thresholds: DraftThresholds = DraftThresholds()
    """Gates that must hold, or no draft is published."""
