"""The `evaluate` block: metrics and thresholds."""

from typing import Literal

from pydantic import Field, model_validator

from .base import ConfigModel
from .quant_spec import MIN_KV_SIZE, KVPolicy


class EvaluationThresholds(ConfigModel):
    """Limits. A run that misses one ends with exit code 1 and publishes nothing.

    The reference of a quantized model is the same model before quantization, of any
    other model the base model.
    """

    max_kl: float | None = Field(None, gt=0)
    """Maximum mean KL divergence from the reference, in nats per token."""
    min_top1_agreement: float | None = Field(None, ge=0, le=1)
    """Minimum fraction of positions with the reference's most probable token."""
    max_perplexity: float | None = Field(None, gt=0)
    """Maximum perplexity on the validation data."""
    max_perplexity_ratio: float | None = Field(None, gt=0)
    """Maximum perplexity divided by the reference's."""
    min_exact_match: float | None = Field(None, ge=0, le=1)
    """Minimum fraction of exact matches; see `exact_match`."""


class ExactMatchConfig(ConfigModel):
    """Questions with one correct answer, and what of an answer is compared."""

    samples: int = Field(120, ge=0)
    """Maximum examples, spread over the kinds of examples."""
    filter: Literal["none", "flexible-extract"] = "none"
    """What is compared, in the names of lm-evaluation-harness. none: the whole answer,
    JSON by its values; of the examples with a `skill`, else of those whose answer is
    short or JSON. flexible-extract: the last number of the answer, after `####` if the
    answer has it, as in GSM8K; of all examples whose answer has a number."""


class EvaluateConfig(ConfigModel):
    """Evaluate every model of the run on the validation data and check thresholds."""

    thresholds: EvaluationThresholds = EvaluationThresholds()
    """Limits for the current model."""
    num_tokens: int = Field(4096, ge=1)
    """Minimum tokens with a loss to evaluate on, if the validation data has as many."""
    exact_match: ExactMatchConfig = ExactMatchConfig()
    """Which answers are compared with the expected ones."""
    max_tokens: int = Field(48, ge=1)
    """Maximum tokens of a generated answer, of samples too. Answers of GSM8K need about
    256."""
    thinking_budget: int | None = Field(None, ge=0, examples=[512])
    """Let models think before they answer, for at most this many tokens, which are none
    of `max_tokens`. Answers are compared without the chain of thought. None = models
    with a switch do not think."""
    num_samples: int = Field(4, ge=0)
    """Examples for which the report shows the output of every model."""
    latency_tokens: int | None = Field(None, ge=8, examples=[64])
    """Measure time to first token and decoding rate, with answers of this many tokens.
    None = not measured; `lmx bench` measures them too."""
    max_kv_size: int | None = Field(None, ge=MIN_KV_SIZE, examples=[512])
    """Answers and latency: keep the keys and values of at most this many tokens of a
    request, in layers with full attention. None = all. Perplexity, KL and tasks always
    have all."""
    kv_policy: KVPolicy | None = None
    """Which tokens these are. window (the default): the first 4 and the last ones.
    snapkv: those that the end of the prompt attends to most."""
    tasks: list[str] = Field([], examples=[["arc_easy", "gsm8k"]])
    """lm-evaluation-harness tasks: task names or .yaml files. Needs the extra
    `eval`."""
    task_limit: int | None = Field(None, ge=1)
    """Maximum documents per task."""

    @model_validator(mode="after")
    def _policy_needs_size(self):
        if self.kv_policy and self.max_kv_size is None:
            raise ValueError("kv_policy needs max_kv_size")
        return self
