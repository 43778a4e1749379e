"""The chain of thought of a completion: its budget, and a grammar that follows it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ..errors import UserError
from . import harmony
from .grammar import Grammar
from .grammar_matcher import ALL, GrammarMatcher, allows, set_bit
from .harmony import is_harmony

# Tokens before the end of a prompt among which the start of a chain of thought is.
MAX_START = 64
NO_THINKING = "this model has no chain of thought that lmx knows"
# Tokens of white space between a chain of thought and an answer.
MAX_SPACES = 2


@dataclass(frozen=True)
class Thinking:
    """The chain of thought that a completion begins with.

    Attributes:
        end: tokens that end it.
        start: tokens that begin it; none = the prompt has begun it.
        budget: the most tokens of it; then `closing` follows. None = no limit.
        closing: tokens that end with `end`.
        spaces: tokens of white space, which may follow it.
        required: an answer has to begin with it.
        calls: tokens that may end the completion inside it, by a call.
        limited: tokens that begin the part that the budget is of, which comes once:
            calls follow it, and are not cut; none = all of it.
    """

    end: tuple[int, ...]
    start: tuple[int, ...] = ()
    budget: int | None = None
    closing: tuple[int, ...] = ()
    spaces: tuple[int, ...] = ()
    required: bool = False
    calls: tuple[int, ...] = ()
    limited: tuple[int, ...] = ()

    @property
    def max_tokens(self) -> int:
        """The most tokens before the answer, with a budget."""
        return len(self.start) + self.budget + len(self.closing) + MAX_SPACES

    def begin(
        self, answer: GrammarMatcher | None, stop_tokens: Collection[int]
    ) -> "ThinkingMatcher":
        """The state of a completion that has no token yet.

        Args:
            answer: the grammar of the answer; None = it is free.
        """
        return ThinkingMatcher(self, answer, stop_tokens)


def thinking_of(
    tokenizer: Any,
    prompt: Sequence[int],
    budget: int | None = None,
    *,
    grammar: Grammar | None = None,
) -> Thinking | None:
    """How a completion of a prompt thinks; None if the model has no chain of thought
    that lmx knows.

    Args:
        tokenizer: mlx-lm's TokenizerWrapper.
        budget: see `Thinking`.
        grammar: what the answer has to match.
    """
    if is_harmony(tokenizer):
        return _harmony(tokenizer, budget, grammar)
    if not tokenizer.has_thinking:
        return None
    is_open = opens_reasoning(tokenizer, prompt)
    start = () if is_open else tuple(tokenizer.think_start_tokens)
    lines = [
        tokenizer.encode(text, add_special_tokens=False) for text in ("\n", "\n\n")
    ]
    end = tuple(tokenizer.think_end_tokens)
    return Thinking(
        end=end,
        start=start,
        budget=budget,
        closing=(*lines[0], *end),
        spaces=tuple(line[0] for line in lines if len(line) == 1),
    )


def _harmony(tokenizer: Any, budget: int | None, grammar: Grammar | None) -> Thinking:
    """The analysis of Harmony: with the grammar of an answer, all until the final
    message, which has a header of its own."""

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    start = encode(harmony.ANALYSIS)
    if grammar is None or grammar.message == "call":
        end, required = encode(harmony.CLOSING), grammar is not None
        return Thinking(end, start, budget, closing=end, required=required)
    final, closing = encode(harmony.FINAL), ()
    if budget:
        closing = encode(harmony.CLOSING + harmony.NEXT)
        budget += len(start)
    if grammar.message == "either":
        calls = encode(harmony.CALL)
        return Thinking(final, (), budget, closing, calls=calls, limited=start)
    return Thinking(final, budget=budget, closing=closing + final)


def thinks(grammar: Any, budget: int | None) -> bool:
    """Whether to ask a model that can do without for a chain of thought: not where a
    text has to match a grammar, without a budget."""
    return not grammar or budget is not None


def required_thinking(
    tokenizer: Any,
    prompt: Sequence[int],
    budget: int | None = None,
    *,
    grammar: Grammar | None = None,
) -> Thinking | None:
    """The chain of thought that a request has to know of.

    A grammar without a budget begins at once, unless the prompt begins a chain of
    thought, or answers have channels.

    Raises:
        UserError: there is a budget, and no chain of thought that lmx knows.
    """
    if budget is None and not (
        grammar and (opens_reasoning(tokenizer, prompt) or is_harmony(tokenizer))
    ):
        return None
    thinking = thinking_of(tokenizer, prompt, budget, grammar=grammar)
    if thinking is None:
        raise UserError(NO_THINKING)
    return thinking


def without_thinking(tokenizer: Any, text: str) -> str:
    """The answer in the text of a completion, after its chain of thought."""
    end = harmony.FINAL if is_harmony(tokenizer) else tokenizer.think_end
    return text.rpartition(end)[2].lstrip()


def opens_reasoning(tokenizer: Any, tokens: Sequence[int]) -> bool:
    """Whether a prompt ends with the beginning of a chain of thought.

    A message may name the tag too, so only white space may come after it.
    """
    if not tokenizer.has_thinking:
        return False
    start = tokenizer.rfind_think_start(tokens, start=len(tokens) - MAX_START)
    if start < 0:
        return False
    rest = tokens[start + len(tokenizer.think_start_tokens) :]
    return not tokenizer.decode(rest).strip()


@dataclass(frozen=True)
class _Place:
    """Where a completion is.

    Attributes:
        phase: before the chain of thought, inside, in the white space after it, or in
            the answer.
        count: tokens of the phase.
        last: the last tokens of the chain of thought, as many as its end has.
    """

    phase: Literal["before", "inside", "spaces", "answer"]
    count: int = 0
    last: tuple[int, ...] = ()


class ThinkingMatcher:
    """How far a completion has come in its chain of thought, then in its grammar.

    It has the methods of `GrammarMatcher`.
    """

    def __init__(
        self,
        thinking: Thinking,
        answer: GrammarMatcher | None,
        stop_tokens: Collection[int],
    ):
        self._thinking, self._answer = thinking, answer
        self._stop_tokens = stop_tokens
        self._place = _Place("before" if thinking.start else "inside")

    @property
    def error(self) -> UserError | None:
        """What went wrong; the request has to end."""
        return self._answer and self._answer.error

    @property
    def is_free(self) -> bool:
        """Whether any token may follow, until the end."""
        is_over = self._place.phase in ("spaces", "answer")
        return is_over and (self._answer is None or self._answer.is_free)

    def advance(self, token: int) -> UserError | None:
        """Append a token to the text; returns the error, if any."""
        self._place = self._next(self._place, token)
        if self._answer and self._place.phase == "answer":
            return self._answer.advance(token)
        return self.error

    def masks(self, draft: Sequence[int], vocab_size: int) -> np.ndarray:
        """The tokens that may come along a draft; see `GrammarMatcher.masks`."""
        place, masks = self._place, []
        for number in range(len(draft) + 1):
            rest = draft[number:]
            if place.phase == "answer":
                return np.stack([*masks, *self._answer_masks(rest, vocab_size)])
            masks.append(self._mask(place, vocab_size))
            if not rest or not allows(masks[-1], rest[0]):
                break
            place = self._next(place, rest[0])
            if place.phase == "answer":
                # Its first token is one that the mask before allows.
                answer = self._answer_masks(rest, vocab_size)
                return np.stack([*masks, *answer[1:]])
        return np.stack(masks)

    def _next(self, place: _Place, token: int) -> _Place:
        thinking = self._thinking
        if place.phase == "before" and token == thinking.start[place.count]:
            is_whole = place.count + 1 == len(thinking.start)
            return _Place("inside") if is_whole else _Place("before", place.count + 1)
        if place.phase == "inside":
            last = (*place.last, token)[-len(thinking.end) :]
            if last == thinking.end:
                return _Place("spaces")
            count = place.count + 1
            if thinking.limited and place.count < (thinking.budget or 0):
                expected = thinking.limited[place.count : count]
                if token == thinking.closing[0] or expected not in ((), (token,)):
                    # What the budget is of has ended by itself, or does not come.
                    count = thinking.budget + len(thinking.closing)
            return replace(place, count=count, last=last)
        is_space = place.phase == "spaces" and token in thinking.spaces
        if is_space and place.count < MAX_SPACES:
            return replace(place, count=place.count + 1)
        return _Place("answer")

    def _mask(self, place: _Place, vocab_size: int) -> np.ndarray:
        """Bits uint32 [ceil(V / 32)] of the next token outside the answer."""
        thinking = self._thinking
        if place.phase == "inside":
            mask = _all(vocab_size)
            over = -1 if thinking.budget is None else place.count - thinking.budget
            *begun, last = thinking.end
            if self._answer and begun and [*place.last][-len(begun) :] == begun:
                # A channel could be said to have a format first.
                mask[:] = 0
                set_bit(mask, last, True)
            elif 0 <= over < len(thinking.closing):
                mask[:] = 0
                set_bit(mask, thinking.closing[over], True)
            elif self._answer:
                # The answer has to come.
                for token in self._stop_tokens:
                    set_bit(mask, token, token in thinking.calls)
                if over >= 0 and place.last[-1:] == thinking.limited[:1] != ():
                    set_bit(mask, thinking.limited[1], False)
            return mask
        mask = self._answer_masks([], vocab_size)[0].copy()
        if place.phase == "before":
            if self._answer and (place.count or thinking.required):
                mask[:] = 0
            set_bit(mask, thinking.start[place.count], True)
        elif place.count < MAX_SPACES:
            for token in thinking.spaces:
                set_bit(mask, token, True)
        return mask

    def _answer_masks(self, draft: Sequence[int], vocab_size: int) -> np.ndarray:
        if self._answer:
            return self._answer.masks(draft, vocab_size)
        return np.stack([_all(vocab_size)] * (len(draft) + 1))


def _all(vocab_size: int) -> np.ndarray:
    return np.full(-(-vocab_size // 32), ALL)
