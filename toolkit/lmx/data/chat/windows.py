"""Finds the turns of long chats in time that grows with the length of the chat.

To render the messages before every turn takes time that grows with the square of the
number of turns. So a long chat is checked in windows: its first messages and some
later ones are rendered, and the result must be the text of the chat with one piece cut
out.
"""

from collections import Counter
from dataclasses import dataclass, replace

from .completeness import missing_part
from .rendering import NoTrainableTokens
from .sequences import (
    Chat,
    Span,
    TurnSequence,
    common_prefix,
    find_turn,
    join_turns,
    skip_empty_block,
)

# Turns of a chat that are found without windows, and turns per window.
EXACT_TURNS, BLOCK = 16, 8
# Messages of a window before the first turn that it checks.
CONTEXT, MAX_CONTEXT = 4, 64
# A chat of more turns * characters is skipped if windows do not fit its template.
MAX_CHARACTERS = 20_000_000


def find_sequences(chat: Chat, turns: list[int]) -> list[TurnSequence]:
    """The training sequences of a chat that ends with its last trained turn.

    Args:
        turns: the indices of the messages that are trained.

    Raises:
        NoTrainableTokens: a turn cannot be trained as it is served, or the chat is too
            long for a template that windows do not fit.
    """
    if len(turns) > EXACT_TURNS:
        text = chat.render(len(chat.messages))
        if sequence := _in_windows(chat, turns, text):
            return [sequence]
        if len(turns) * len(text) > MAX_CHARACTERS:
            raise NoTrainableTokens(
                f"the chat has {len(turns):,} turns and {len(text):,} characters: "
                f"turns * characters is at most {MAX_CHARACTERS:,} for its template"
            )
    return join_turns([find_turn(chat, index) for index in turns])


@dataclass(frozen=True)
class Window:
    """The messages of a chat without `skipped` ones, and the text of the chat.

    Attributes:
        text: the text of the whole chat.
        head: number of messages before the skipped ones.
        at, cut: the start and the length of the text of the skipped messages.
    """

    chat: Chat
    text: str
    head: int = 0
    skipped: int = 0
    at: int = 0
    cut: int = 0

    def render(self, end: int, *, add_generation_prompt: bool = False) -> str:
        """The text of the messages before message `end`."""
        messages = self.chat.messages
        kept = [*messages[: self.head], *messages[self.head + self.skipped : end]]
        return self.chat.render_messages(
            kept, add_generation_prompt=add_generation_prompt
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

    def span(self, index: int) -> Span | None:
        """The target of turn `index`; None if it is not as a server asks for it."""
        start = self.end_of(index, add_generation_prompt=True)
        end = self.end_of(index + 1)
        if not start or end is None:
            return None
        stop = self.chat.template.stop.search(self.text, start)
        if stop is None or self.text[end : stop.start()].strip():
            return None
        message = self.chat.messages[index]
        start = skip_empty_block(self.text, start, message)
        is_whole = missing_part(message, self.text[start : stop.end()]) is None
        return (start, stop.end()) if is_whole else None


def _in_windows(chat: Chat, turns: list[int], text: str) -> TurnSequence | None:
    """The sequence of a chat whose turns nest.

    None if a window is not the text with one piece cut out, or a turn that is asked for
    without windows, the last one and one in the middle, has another span.
    """
    middle, last = (find_turn(chat, turns[n]) for n in (len(turns) // 2, -1))
    is_same = last.text.startswith(text[: last.end])
    if not is_same or len(join_turns([middle, last])) > 1:
        return None
    window, head = Window(chat, text), _head(chat.messages, turns[0])
    spans: list[Span] = []
    for number, index in enumerate(turns):
        if number and number % BLOCK == 0:
            window = _next_window(window, head, turns[number - 1])
            if window is None:
                return None
        span = (last.start, last.end) if index == turns[-1] else window.span(index)
        if span is None:
            return None
        spans.append(span)
    if spans[len(turns) // 2] != (middle.start, middle.end):
        return None
    return TurnSequence(last.text, tuple(spans), last.add_eos)


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


def _next_window(before: Window, head: int, turn: int) -> Window | None:
    """A window of the first `head` messages and of those from shortly before `turn` on.

    Args:
        before: the window before, which has the prompt of `turn`.
    """
    messages = before.chat.messages
    roles = _roles(messages, head)
    starts = range(turn - CONTEXT, max(head, turn - MAX_CONTEXT), -1)
    start = next((s for s in starts if _roles(messages, s) == roles), None)
    end = before.end_of(turn, add_generation_prompt=True)
    if start is None or end is None:
        return None
    window = Window(before.chat, before.text, head, start - head)
    try:
        text = window.render(turn, add_generation_prompt=True)
    except NoTrainableTokens:
        return None
    at = common_prefix(text, before.text)
    window = replace(window, at=at, cut=end - len(text))
    return window if window.cut >= 0 and window.is_prefix(text) else None
