"""Outputs of the generator: streamed tokens and finished completions."""

import time
from collections.abc import Collection
from dataclasses import dataclass, field
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


@dataclass
class CompletionOutput:
    """The tokens of one completion, and the times of the first and the last."""

    prompt_tokens: int
    stop_tokens: Collection[int]
    responses: list[GenerationResponse] = field(default_factory=list)
    start: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    last: float = 0.0

    def add(self, response: GenerationResponse) -> None:
        """Append the next token."""
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.responses.append(response)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the completion ended; None = it goes on."""
        return self.responses[-1].finish_reason if self.responses else None

    def result(self) -> GenerationResult:
        """The completion so far."""
        tokens = [response.token for response in self.responses]
        decoded, prefill = len(tokens) - 1, self.first - self.start
        if tokens and tokens[-1] in self.stop_tokens:
            tokens.pop()
        return GenerationResult(
            text="".join(response.text for response in self.responses),
            tokens=tokens,
            prompt_tokens=self.prompt_tokens,
            finish_reason=self.finish_reason or "length",
            ttft_ms=1000 * prefill if self.responses else None,
            prefill_tokens_per_second=_rate(self.prompt_tokens, prefill),
            decode_tokens_per_second=_rate(decoded, self.last - self.first),
        )


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if tokens > 0 and seconds > 0 else None
