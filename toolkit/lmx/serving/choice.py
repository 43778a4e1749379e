"""One completion of a request, as it goes on."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..data.token_bytes import token_bytes
from ..generation.sequence import GenerationRequest, TokenLogprobs, TokenOutput
from ..generation.text_stream import TextStream
from .chat_output import ChatOutputParser
from .prompts import EncodedPrompt


@dataclass(frozen=True)
class Piece:
    """What some tokens add to a completion.

    Attributes:
        fields: of the message; see `ChatOutputParser`. A completion has "text" only.
        logprobs: of every token, in OpenAI's form for chats.
        text_offsets: where each of these tokens begins in the text.
        finish_reason: set on the last piece only.
    """

    choice: "Choice"
    fields: list[dict]
    logprobs: list[dict]
    finish_reason: str | None
    text_offsets: Sequence[int] = ()


@dataclass(eq=False)
class Choice:
    """A completion.

    Args:
        index: its number in the answer.
        prompt_index: the number of its prompt.
        parser: of a chat; None = the text is the completion.
        single_call: it ends after the first tool call.
        prompt: its text and log-probabilities come first, if it is echoed.
        prompt_only: nothing else does.

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
    prompt: EncodedPrompt | None = None
    prompt_only: bool = False
    finish_reason: str | None = None
    tokens: int = 0
    accepted_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    first: float = 0.0
    last: float = 0.0
    intervals: list[float] = field(default_factory=list)

    def __post_init__(self):
        self._text = TextStream(self.tokenizer, self.request, self.stop)
        self._names: dict[int, tuple[str, list[int]]] = {}  # and bytes, by token

    def add_outputs(self, outputs: Sequence[TokenOutput]) -> Piece:
        """Append the tokens of a step; those after the end do not count."""
        fields: list[dict] = []
        logprobs: list[dict] = []
        offsets: list[int] = []
        now = time.monotonic()
        echo = self.prompt.echo if self.prompt else None
        start = len(echo or "")
        if echo is not None and not self.first:
            fields.append({"text": echo})
            logprobs += self._prompt_logprobs(outputs[0].prompt_logprobs)
            offsets += self.prompt.offsets
        if self.first:
            self.intervals += [(now - self.last) / len(outputs)] * len(outputs)
        self.first, self.last = self.first or now, now
        for output in outputs:
            if self.finish_reason:
                break
            self.cached_tokens = output.cached_tokens
            if self.prompt_only:
                self.finish_reason = "length"
                break
            self.tokens += 1
            self.accepted_tokens += output.is_draft
            begin = start + self._text.length
            response = self._text.add(output)
            text, reason = response.text, response.finish_reason
            is_stop = output.token in self.request.stop_tokens
            # A prompt is scored with an entry for every token, the last one too.
            if output.logprob is not None and (echo is not None or not is_stop):
                logprobs.append(self._logprobs(output.token, output.logprobs))
                offsets.append(begin)
            self.finish_reason = reason
            if self.parser is None:
                fields += [{"text": text}] if text else []
                continue
            self.reasoning_tokens += self.parser.in_reasoning
            read = self.parser.add_text(text, last=reason is not None, cut=not is_stop)
            if self.parser.calls and (self.single_call or reason == "stop"):
                self.finish_reason = "tool_calls"
            if self.parser.calls and self.single_call:
                call = next(field for field in read if "tool_calls" in field)
                read = read[: read.index(call) + 1]
            fields += read
        return Piece(self, fields, logprobs, self.finish_reason, offsets)

    def _prompt_logprobs(self, scores: Sequence[TokenLogprobs]) -> list[dict]:
        """Log-probabilities of all tokens of the prompt; the first one has none."""
        if self.request.logprobs is None:
            return []
        first, *others = self.request.prompt
        entries = map(self._logprobs, others, scores)
        head = self._named(first, 0.0)
        return [head | {"logprob": None}, *entries]

    def _logprobs(self, token: int, logprobs: TokenLogprobs) -> dict:
        """Log-probabilities of a token in OpenAI's form."""
        top = [self._named(*pair) for pair in logprobs.top]
        return self._named(token, logprobs.chosen) | {"top_logprobs": top}

    def _named(self, token: int, logprob: float) -> dict:
        if token not in self._names:
            raw = token_bytes(self.tokenizer, token)
            self._names[token] = raw.decode(errors="replace"), [*raw]
        text, raw = self._names[token]
        # JSON has no infinity; OpenAI gives this number for a token that cannot come.
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": raw}
