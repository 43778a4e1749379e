"""Outputs of the generator: streamed text with stop strings, finished completions."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

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


# What a tokenizer decodes bytes to that are no character, or not yet.
REPLACEMENT = "\ufffd"
MAX_WAITING = 64
"""Tokens after which bytes that are no character are given as they are."""
MIN_CONTEXT, MAX_CONTEXT = 4, 16
"""Tokens of a prompt that are decoded with the completion."""


class StopStringMatcher:
    """Passes text through up to the first stop string.

    Text that may be the beginning of a stop string is held back until it is decided.
    """

    def __init__(self, stop_strings: Sequence[str]):
        assert all(stop_strings), "an empty stop string would end every completion"
        self._stop_strings = tuple(stop_strings)
        self._pending = ""
        self.matched = False
        """Whether a stop string was found; no more text is passed through."""

    def push(self, text: str) -> str:
        """Add text; returns the text that is safe to show."""
        text, self._pending = self._pending + text, ""
        positions = [text.find(stop) for stop in self._stop_strings]
        if matches := [position for position in positions if position >= 0]:
            self.matched = True
            return text[: min(matches)]
        held = (_partial_match(text, stop) for stop in self._stop_strings)
        end = len(text) - max(held, default=0)
        self._pending = text[end:]
        return text[:end]

    def flush(self) -> str:
        """Return the text still held back, at the end of the completion."""
        text, self._pending = self._pending, ""
        return "" if self.matched else text


def _partial_match(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that the text ends with."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)


class StreamingDetokenizer:
    """Turns the tokens of one completion into text and detects its end.

    The text is the tokenizer's decoding of prompt and completion, less that of the
    prompt: the end of the prompt decides whether a word begins with a space. A special
    token ends a text, so nothing before the last one counts.

    Args:
        tokenizer: mlx-lm's TokenizerWrapper.
        prompt: the tokens before the completion.
        stop_tokens: tokens that end the completion; they produce no text.
        stop_strings: strings that end the completion; they are not part of the text.

    Attributes:
        length: complete characters of all tokens so far.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int],
        stop_tokens: Collection[int],
        stop_strings: Sequence[str] = (),
    ):
        self._tokenizer = tokenizer
        self._stop_tokens = stop_tokens
        self._matcher = StopStringMatcher(stop_strings)
        self._tokens = self._context(prompt)
        # The text of tokens[_start:_end] is out, and gives the tokens after it context.
        self._start, self._end = 0, len(self._tokens)
        self.length = self._out = 0

    def add(self, token: int, *, last: bool) -> tuple[str, FinishReason | None]:
        """Add a token.

        Args:
            last: whether this is the last token allowed by `max_tokens`.

        Returns:
            The new text, and the finish reason if the completion ends here.
        """
        is_stop = token in self._stop_tokens
        if not is_stop:
            self._tokens.append(token)
        text = self._matcher.push(self._new_text(last=is_stop or last))
        if is_stop or last:
            text += self._matcher.flush()
        if is_stop or self._matcher.matched:
            return text, "stop"
        return text, "length" if last else None

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """The end of a prompt that is decoded with the completion."""
        added = self._tokenizer.added_tokens_decoder.items()
        special, tokens = {number for number, token in added if token.special}, []
        for token in reversed(prompt[-MAX_CONTEXT:]):
            # Enough, unless it starts inside a character.
            is_enough = len(tokens) >= MIN_CONTEXT
            if is_enough and not self._decode(tokens).startswith(REPLACEMENT):
                break
            if token in special:
                break
            tokens.insert(0, token)
        return tokens

    def _new_text(self, *, last: bool) -> str:
        """The text of new tokens, without a character that is not complete yet."""
        before = self._decode(self._tokens[self._start : self._end])
        text = self._decode(self._tokens[self._start :])
        waiting = len(self._tokens) - self._end
        if text.endswith(REPLACEMENT) and not last and waiting < MAX_WAITING:
            self.length = self._out + len(text.rstrip(REPLACEMENT)) - len(before)
            return ""
        if not text.startswith(before):  # bytes that are no characters hide the others
            before, text = "", self._decode(self._tokens[self._end :])
        self._start, self._end = self._end, len(self._tokens)
        self.length = self._out = self._out + len(text) - len(before)
        return text[len(before) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
