"""What comes out of the generator."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class GenerationResponse:
    """One token as it comes; its text is empty while a character is incomplete."""

    text: str
    token: int
    logprob: float | None = None
    """Log-probability under the model, before any filter; when asked for."""
    finish_reason: FinishReason | None = None
    """Set on the last piece only."""


@dataclass(frozen=True)
class GenerationResult:
    """A finished answer and how fast it came; None where no token could be timed."""

    text: str
    tokens: list[int]
    """Those chosen, without the stop token."""
    prompt_tokens: int
    finish_reason: FinishReason
    ttft_ms: float | None
    """From the call to the first token."""
    prefill_tokens_per_second: float | None
    decode_tokens_per_second: float | None
    """Every token after the first, the stop token included."""
