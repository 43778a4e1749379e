"""One completion of a request, as it goes on."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..data.token_bytes import BYTE_TOKEN, BYTES
from ..generation.outputs import REPLACEMENT, StreamingDetokenizer
from ..generation.sequence import GenerationRequest, TokenLogprobs, TokenOutput
from .chat_output import ChatOutputParser


@dataclass(frozen=True)
class Piece:
    """What some tokens add to a completion.

    Attributes:
        fields: of the message; see `ChatOutputParser`. A completion has "text" only.
        logprobs: of every token, in OpenAI's form for chats.
        text_offset: characters of all tokens before these.
        finish_reason: set on the last piece only.
    """

    choice: "Choice"
    fields: list[dict]
    logprobs: list[dict]
    finish_reason: str | None
    text_offset: int = 0


@dataclass(eq=False)
class Choice:
    """A completion.

    Args:
        index: its number in the answer.
        prompt_index: the number of its prompt.
        parser: of a chat; None = the text is the completion.
        single_call: it ends after the first tool call.

    Attributes:
        finish_reason: None = it goes on.
        tokens, accepted_tokens, reasoning_tokens: counts of its tokens, of those that
            were draft tokens, and of those of the chain of thought.
        first, last: times of the first and the last token.
    """

    index: int
    prompt_index: int
    request: GenerationRequest
    tokenizer: Any
    stop: Sequence[str] = ()
    parser: ChatOutputParser | None = None
    single_call: bool = False
    finish_reason: str | None = None
    tokens: int = 0
    accepted_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    first: float = 0.0
    last: float = 0.0
    intervals: list[float] = field(default_factory=list)

    def __post_init__(self):
        self._detokenizer = StreamingDetokenizer(
            self.tokenizer, self.request.prompt, self.request.stop_tokens, self.stop
        )

        self._offset = 0  # characters of tokens with log-probabilities

    def add(self, outputs: Sequence[TokenOutput]) -> Piece:
        """Append the tokens of a step; those after the end do not count."""
        fields: list[dict] = []
        logprobs: list[dict] = []
        offset = self._offset
        self._time(len(outputs))
        for output in outputs:
            if self.finish_reason:
                break
            self.cached_tokens = output.cached_tokens
            self.tokens += 1
            self.accepted_tokens += output.is_draft
            text, reason = self._detokenizer.add(output.token, last=output.is_last)
            is_stop = output.token in self.request.stop_tokens
            if output.logprob is not None and not is_stop:
                logprobs.append(self._logprobs(output.token, output.logprobs))
                self._offset += len(logprobs[-1]["token"])
            fields += self._read(text, reason, cut=not is_stop)
        return Piece(self, fields, logprobs, self.finish_reason, offset)

    def _read(self, text: str, reason: str | None, *, cut: bool) -> list[dict]:
        self.finish_reason = reason
        if self.parser is None:
            return [{"text": text}] if text else []
        self.reasoning_tokens += self.parser.in_reasoning
        fields = self.parser.add(text, last=reason is not None, cut=cut)
        if self.parser.calls and self.single_call:
            self.finish_reason = "tool_calls"
            calls = [f for f in fields if "tool_calls" in f]
            return fields[: fields.index(calls[0]) + 1]
        if self.parser.calls and reason == "stop":
            self.finish_reason = "tool_calls"
        return fields

    def _time(self, count: int) -> None:
        now = time.monotonic()
        if self.first:
            self.intervals += [(now - self.last) / count] * count
        self.first, self.last = self.first or now, now

    def _logprobs(self, token: int, logprobs: TokenLogprobs) -> dict:
        """Log-probabilities of a token in OpenAI's form."""
        top = [self._named(*pair) for pair in logprobs.top]
        return self._named(token, logprobs.chosen) | {"top_logprobs": top}

    def _named(self, token: int, logprob: float) -> dict:
        text, raw = token_text(self.tokenizer, token)
        # JSON has no infinity; OpenAI gives this number for a token that cannot come.
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": [*raw]}


def token_text(tokenizer: Any, token: int) -> tuple[str, bytes]:
    """The text of a token, and its bytes, which may be a part of a character."""
    text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    if REPLACEMENT not in text:
        return text, text.encode()
    name = tokenizer.convert_ids_to_tokens(token) or ""
    if match := BYTE_TOKEN.fullmatch(name):
        return text, bytes([int(match[1], 16)])
    if all(letter in BYTES for letter in name):
        return text, bytes(BYTES[letter] for letter in name)
    return text, text.encode()
