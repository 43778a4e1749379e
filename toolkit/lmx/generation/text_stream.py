"""The text of a completion as its tokens come, up to its end."""

from collections.abc import Sequence
from typing import Any

from .outputs import FinishReason, GenerationResponse
from .sequence import GenerationRequest, TokenOutput

# What a tokenizer decodes bytes to that are no character, or not yet.
REPLACEMENT = "\ufffd"
MAX_WAITING = 64
"""Tokens after which bytes that are no character are given as they are."""
MIN_CONTEXT, MAX_CONTEXT = 4, 16
"""Tokens of a prompt that are decoded with the completion."""


class TextStream:
    """Turns the tokens of one completion into text and detects its end.

    The text is the tokenizer's decoding of prompt and completion, less that of the
    prompt: the end of the prompt decides whether a word begins with a space. A special
    token ends a text, so nothing before the last one counts. Text that may be the
    beginning of a stop string is held back until it is decided.

    Args:
        tokenizer: mlx-lm's TokenizerWrapper.
        request: its stop tokens end the completion; they produce no text.
        stop: strings that end the completion; they are not part of the text. Those that
            end before its `min_tokens` do not.

    Attributes:
        finish_reason: why the completion has ended; None = it goes on.
        length: complete characters of all tokens so far, held back or not.
    """

    def __init__(
        self, tokenizer: Any, request: GenerationRequest, stop: Sequence[str] = ()
    ):
        assert all(stop), "an empty stop string would end every completion"
        self._tokenizer, self._stop = tokenizer, stop
        self._stop_tokens = request.stop_tokens
        self._unstopped = request.min_tokens  # tokens to come whose text ends nothing
        self._tokens = self._context(request.prompt)
        # The text of tokens[_start:_end] is out, and gives the tokens after it context.
        self._start, self._end = 0, len(self._tokens)
        self._held = ""
        self.length = self._out = 0
        self.finish_reason: FinishReason | None = None

    def add(self, output: TokenOutput) -> GenerationResponse | None:
        """The text that the next token adds; None = the completion has ended before."""
        if self.finish_reason:
            return None
        is_stop = output.token in self._stop_tokens
        if not is_stop:
            self._tokens.append(output.token)
        is_last = is_stop or output.is_last
        text = self._held + self._new_text(last=is_last)
        found = []
        if self._unstopped <= 0:
            found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        self._unstopped -= 1
        if found:
            text, self._held = text[: min(found)], ""
        else:
            held = (
                0
                if is_last
                else max((_overlap(text, s) for s in self._stop), default=0)
            )
            text, self._held = text[: len(text) - held], text[len(text) - held :]
        if found or is_last:
            self.finish_reason = "stop" if found or is_stop else "length"
        return GenerationResponse(
            text, output.token, output.logprob, self.finish_reason
        )

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


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that the text ends with."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
