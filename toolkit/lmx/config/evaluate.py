"""TODO."""

from pydantic import Field

from .base import ConfigModel


class EvaluationThresholds(ConfigModel):
    """Limits; a run that misses one ends with exit code 1 and publishes nothing.

    The reference is the unquantized twin of a quantized model, else the base.
    """

    max_kl: float | None = Field(None, gt=0)
    """Largest mean KL divergence (nats per token) from the reference."""
    min_top1_agreement: float | None = Field(None, ge=0, le=1)
    """Smallest share of positions with the reference's most likely token."""
    max_perplexity: float | None = Field(None, gt=0)
    """Largest perplexity on the validation rows."""
    max_perplexity_ratio: float | None = Field(None, gt=0)
    """Largest perplexity as a multiple of the reference's."""
    min_exact_match: float | None = Field(None, ge=0, le=1)
    """Smallest share of exact answers on rows that have one answer."""


class EvaluateConfig(ConfigModel):
    """Measure every model of the run on the validation rows; check the gates."""

    thresholds: EvaluationThresholds = EvaluationThresholds()
    """Gates that must hold."""
    num_tokens: int = Field(16384, ge=1)
    """Trained tokens to measure on, at least, if the rows have as many."""
    exact_match_samples: int = Field(240, ge=0)
    """Rows with one exact answer to ask, at most, spread over their kinds."""
    num_samples: int = Field(4, ge=0)
    """Rows to show every model's answer to, of several kinds."""
    latency_tokens: int = Field(64, ge=8)
    """Tokens to generate when measuring the speed."""
    tasks: list[str] = Field([])
    """Tasks of lm-evaluation-harness: its names, or .yaml files; pip install its extra,
    lmx-toolkit[eval]."""
    task_limit: int | None = Field(None, ge=1)
    """Documents of each of those tasks, at most."""
