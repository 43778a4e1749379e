"""Finds the assistant turns in the text of a chat.

A turn starts where the prompt ends with which a model would be asked for it: the
rendered messages before it, with the generation prompt. To render these for every turn
takes time that grows with the square of the number of turns. So a long chat is checked
in windows: its first messages and some later ones are rendered, and the result must be
the text of the chat with one piece cut out.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .chat_rendering import NoTrainableTokens, render_messages

Span = tuple[int, int]

THINK = "<think>"
# GLM-4.5 begins its block with a newline.
EMPTY_THINKING = re.compile(r"(?:\s*<think>\s*</think>\s*)?")

# Turns of a chat that are found without windows, and turns per window.
EXACT_TURNS, BLOCK = 16, 8
# Messages of a window before the first turn that it checks.
CONTEXT, MAX_CONTEXT = 4, 64
# A chat of more turns * characters is skipped if windows do not fit its template.
MAX_CHARACTERS = 100_000_000


@dataclass(frozen=True)
class ChatView:
    """The messages of a chat without `skipped` ones, and the text of the chat.

    Attributes:
        text: the text of the whole chat.
        suffix: what follows the content of the last message; None if it is not there.
        tools: those of `render_messages`.
        head: number of messages before the skipped ones.
        at, cut: the start and the length of the text of the skipped messages.
    """

    messages: list[dict]
    text: str
    suffix: str | None
    tokenizer: Any
    tools: Sequence[dict] | None = None
    head: int = 0
    skipped: int = 0
    at: int = 0
    cut: int = 0

    @classmethod
    def whole(
        cls,
        messages: list[dict],
        text: str,
        tokenizer: Any,
        tools: Sequence[dict] | None = None,
    ) -> "ChatView":
        """A view without skipped messages."""
        last = messages[-1]["content"].strip()
        before, _, suffix = text.rpartition(last) if last else ("", "", "")
        return cls(messages, text, suffix if before else None, tokenizer, tools)

    def render(self, end: int, *, add_generation_prompt: bool = False) -> str:
        """The text of the messages before message `end`.

        Raises:
            NoTrainableTokens: the template rejects them.
        """
        after = self.messages[self.head + self.skipped : end]
        return render_messages(
            self.messages[: self.head] + after,
            self.tokenizer,
            tools=self.tools,
            add_generation_prompt=add_generation_prompt,
        )

    def is_prefix(self, text: str) -> bool:
        """Whether the text of the chat, without the cut, starts with `text`."""
        first, second = text[: self.at], text[self.at :]
        return (
            len(first) == self.at
            and self.text.startswith(first)
            and self.text.startswith(second, self.at + self.cut)
        )

    def end_of(self, end: int, *, add_generation_prompt: bool = False) -> int | None:
        """Where the messages before message `end` end in the text of the chat.

        None if the template renders them in another way when more turns follow.
        """
        try:
            text = self.render(end, add_generation_prompt=add_generation_prompt)
        except NoTrainableTokens:
            return None
        return len(text) + self.cut if self.is_prefix(text) else None


def find_spans(
    messages: list[dict],
    turns: list[int],
    text: str,
    tokenizer: Any,
    tools: Sequence[dict] | None = None,
) -> list[Span | None]:
    """The spans of assistant turns, in characters.

    A span is None if the template changes the turn, or the text before it, when more
    turns follow, as templates do that drop earlier reasoning. If one of them is None,
    the others but the last may be None too.

    Args:
        turns: the indices of the turns; the last one is that of the last message.
        tools: those of `render_messages`.

    Raises:
        NoTrainableTokens: the chat is too long for a template that windows do not fit.
    """
    view = ChatView.whole(messages, text, tokenizer, tools)
    if len(turns) > EXACT_TURNS:
        spans = _find_in_windows(view, turns)
        if spans is not None:
            return spans
        if len(turns) * len(text) > MAX_CHARACTERS:
            raise NoTrainableTokens(
                f"the chat has {len(turns):,} turns and {len(text):,} characters: "
                f"with this chat template, turns * characters is at most "
                f"{MAX_CHARACTERS:,}"
            )
    return [_span(view, index) for index in turns]


def _span(view: ChatView, index: int) -> Span | None:
    """The span of turn `index`; None if it cannot be trained."""
    if index == 0:
        return None
    start = view.end_of(index, add_generation_prompt=True)
    if start is None:
        return None
    text, content = view.text, view.messages[index]["content"].strip()
    if not content.startswith(THINK):
        # Inserted by the template. Without thinking, it is a part of the prompt.
        start = EMPTY_THINKING.match(text, start).end()
    end = len(text)
    if index < len(view.messages) - 1:
        end = view.end_of(index + 1) or _end_of_turn(view, content, start)
    return (start, end) if start < end else None


def _end_of_turn(view: ChatView, content: str, start: int) -> int:
    """The end of an earlier turn with the content at `start`; 0 if it is not there.

    For templates that render the last turn in another way, such as with an empty
    thinking block.
    """
    if view.suffix is None:
        return 0
    turn = content + view.suffix
    return start + len(turn) if view.text.startswith(turn, start) else 0


def _find_in_windows(chat: ChatView, turns: list[int]) -> list[Span | None] | None:
    """`find_spans` in time that grows with the length of the chat.

    None if a window is not the text with one piece cut out, or if a window and the
    whole chat give the last turn or one in the middle another span.
    """
    last, middle = _span(chat, turns[-1]), _span(chat, turns[len(turns) // 2])
    last_only = [*[None] * (len(turns) - 1), last]
    if not (last and middle):
        return last_only
    spans, view, head = [], chat, _head(chat.messages, turns[0])
    for number, index in enumerate(turns):
        if number and number % BLOCK == 0:
            view = _window(chat, view, head, turns[number - 1])
            if view is None:
                return None
        span = _span(view, index)
        if span is None:
            return last_only if _span(chat, index) is None else None
        spans.append(span)
    same = spans[-1] == last and spans[len(turns) // 2] == middle
    return spans if same else None


def _head(messages: list[dict], first: int) -> int:
    """The number of messages before a window.

    The first turn is one of them: templates treat the first messages in another way.
    After them comes the pair of roles that is most frequent in the chat.
    """
    pairs = [_roles(messages, index) for index in range(1, len(messages))]
    counts = Counter(pairs)
    candidates = range(first + 1, min(first + 1 + BLOCK, len(messages)))
    return max(candidates, key=lambda index: counts[pairs[index - 1]])


def _roles(messages: list[dict], index: int) -> tuple[str, str]:
    return messages[index - 1]["role"], messages[index]["role"]


def _window(chat: ChatView, view: ChatView, head: int, turn: int) -> ChatView | None:
    """A view of the first `head` messages and of those from shortly before `turn` on.

    Args:
        view: the window before, which has the prompt of `turn`.
    """
    messages, roles = chat.messages, _roles(chat.messages, head)
    starts = range(turn - CONTEXT, max(head, turn - MAX_CONTEXT), -1)
    start = next((s for s in starts if _roles(messages, s) == roles), None)
    end = view.end_of(turn, add_generation_prompt=True)
    if start is None or end is None:
        return None
    window = replace(chat, head=head, skipped=start - head)
    try:
        text = window.render(turn, add_generation_prompt=True)
    except NoTrainableTokens:
        return None
    at = _common_prefix(text, chat.text)
    window = replace(window, at=at, cut=end - len(text))
    return window if window.cut >= 0 and window.is_prefix(text) else None


def _common_prefix(text: str, other: str) -> int:
    """The number of characters that two texts have in common at their start."""
    return bisect_left(
        range(1, len(text) + 1),
        True,
        key=lambda size: not other.startswith(text[:size]),
    )
