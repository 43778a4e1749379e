"""Outputs of the generator: streamed tokens and finished completions."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class GenerationResponse:
    """One streamed token. `text` is empty while a character is incomplete."""

    text: str
    token: int
    logprob: float | None = None
    """Log-probability under the unfiltered model distribution; None = not requested."""
    finish_reason: FinishReason | None = None
    """Set on the last response only."""


@dataclass(frozen=True)
class GenerationResult:
    """A finished completion with its timings; a timing is None if unmeasurable."""

    text: str
    tokens: list[int]
    """The sampled tokens without the stop token."""
    prompt_tokens: int
    finish_reason: FinishReason
    ttft_ms: float | None
    """Time from the call to the first token, in milliseconds."""
    prefill_tokens_per_second: float | None
    decode_tokens_per_second: float | None
    """Counts every token after the first, including the stop token."""
