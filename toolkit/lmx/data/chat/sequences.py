"""The training sequences of a chat: every turn as it is served.

Where the texts of the turns nest, a chat is one sequence. Where they do not, as with
templates that drop earlier reasoning, a turn that does not continue the sequence before
it begins a new one.

To render the messages before every turn takes time that grows with the square of the
number of turns. So a long chat is checked in windows: its first messages and some later
ones are rendered, and the result must be the text of the chat with one piece cut out.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from .rendering import NoTrainableTokens
from .turns import EMPTY_BLOCK, Chat, Turn, common_prefix, fault_of, find_turn

Span = tuple[int, int]

# Turns of a chat that are found without windows, and turns per window.
EXACT_TURNS, BLOCK = 16, 8
# Messages of a window before the first turn that it checks.
CONTEXT, MAX_CONTEXT = 4, 64
# A chat of more turns * characters is skipped if windows do not fit its template.
MAX_CHARACTERS = 20_000_000


@dataclass(frozen=True)
class TurnSequence:
    """Turns that nest.

    Attributes:
        text: the prompt, the target and the tail of the last turn.
        spans: the (start, end) of the targets in `text`, in order.
        add_eos: the end-of-sequence token follows, as in `Turn`.
    """

    text: str
    spans: tuple[Span, ...]
    add_eos: bool = False


def join_turns(turns: Sequence[Turn]) -> list[TurnSequence]:
    """The fewest sequences of turns in order, such that every turn is exact."""
    sequences: list[TurnSequence] = []
    for turn in turns:
        earlier: tuple[Span, ...] = ()
        if sequences and not sequences[-1].add_eos:
            before = sequences[-1].text[: sequences[-1].spans[-1][1]]
            if turn.prompt.startswith(before):
                earlier = sequences.pop().spans
        start, text = len(turn.prompt), turn.prompt + turn.target
        spans = (*earlier, (start, len(text)))
        sequences.append(TurnSequence(text + turn.tail, spans, turn.add_eos))
    return sequences


def find_sequences(chat: Chat, turns: list[int]) -> list[TurnSequence]:
    """The training sequences of a chat that ends with its last trained turn.

    Args:
        turns: the indices of the messages that are trained.

    Raises:
        NoTrainableTokens: a turn cannot be trained as it is served, its prompt lacks a
            message or the tools, or the chat is too long for a template that windows do
            not fit.
    """
    sequences = None
    if len(turns) > EXACT_TURNS:
        text = chat.render(len(chat.messages))
        if sequence := _in_windows(chat, turns, text):
            sequences = [sequence]
        elif len(turns) * len(text) > MAX_CHARACTERS:
            raise NoTrainableTokens(
                f"the chat has {len(turns):,} turns and {len(text):,} characters: "
                f"turns * characters is at most {MAX_CHARACTERS:,} for its template"
            )
    if sequences is None:
        sequences = join_turns([find_turn(chat, index) for index in turns])
    for number in accumulate(len(sequence.spans) for sequence in sequences):
        last = turns[number - 1]
        if missing := chat.missing_from(last, add_generation_prompt=True):
            raise NoTrainableTokens(f"the chat template does not write {missing}")
    return sequences


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
        stop = self.chat.template.stop
        found = stop.search(self.text, start, end) or stop.match(self.text, end)
        if found is None:
            return None
        message = self.chat.messages[index]
        prompt, target = self.text[:start], self.text[start : found.end()]
        has_other_ways = len([*self.chat.ways_to_ask(message)]) > 1
        is_other = has_other_ways and EMPTY_BLOCK.match(target)
        is_exact = not is_other and fault_of(message, index, prompt, target) is None
        return (start, found.end()) if is_exact else None


def _in_windows(chat: Chat, turns: list[int], text: str) -> TurnSequence | None:
    """The sequence of a chat whose turns nest.

    None if a window is not the text with one piece cut out, or a turn that is asked for
    without windows, the last one and one in the middle, has another span.
    """
    half = len(turns) // 2
    whole, *others = join_turns([find_turn(chat, turns[n]) for n in (half, -1)])
    middle, last = whole.spans[0], whole.spans[-1]
    if others or not whole.text.startswith(text[: last[1]]):
        return None
    # The messages before every window: the first turn is one of them, as templates
    # treat the first messages in another way. After them comes the pair of roles that
    # is most frequent in the chat.
    pairs = [_roles(chat.messages, n) for n in range(1, len(chat.messages))]
    counts = Counter(pairs)
    candidates = range(turns[0] + 1, min(turns[0] + 1 + BLOCK, len(chat.messages)))
    head = max(candidates, key=lambda index: counts[pairs[index - 1]])
    window = Window(chat, text)
    spans: list[Span] = []
    for number, index in enumerate(turns):
        if number and number % BLOCK == 0:
            window = _next_window(window, head, turns[number - 1])
            if window is None:
                return None
        span = last if index == turns[-1] else window.span(index)
        if span is None:
            return None
        spans.append(span)
    return replace(whole, spans=tuple(spans)) if spans[half] == middle else None


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
