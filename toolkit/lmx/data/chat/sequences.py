"""The training sequences of a chat: every turn as it is served.

The prompt of a turn is what a server renders: the messages before the turn, with the
generation prompt. The target is what the model must then write, up to and with the
token that ends the turn. Where the texts of the turns nest, a chat is one sequence.
Where they do not, as with templates that drop earlier reasoning, a turn that does not
continue the sequence before it begins a new one.

To render the messages before every turn takes time that grows with the square of the
number of turns. So a long chat is checked in windows: its first messages and some later
ones are rendered, and the result must be the text of the chat with one piece cut out.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .completeness import CLOSING, OPENING, TAG, missing_part, reasoning_of
from .rendering import ChatTemplate, NoTrainableTokens

Span = tuple[int, int]

# A chain of thought that the generation prompt opens, or opens and closes.
PROMPT_BLOCK = re.compile(rf"{OPENING}(\s*)({CLOSING}\s*)?$")
# An empty chain of thought in a turn. GLM-4.5 begins its block with a newline. The
# prompt may have opened it.
EMPTY_BLOCK = re.compile(rf"(?:\s*{OPENING}\s*{CLOSING}\s*)?")
OWN_BLOCK = re.compile(rf"\s*{OPENING}")
EMPTY_REST = re.compile(rf"(?:\s*{CLOSING}\s*)?")
# A message after a turn, to see what ends the turn.
NEXT = {"role": "user", "content": "Go on."}
# Characters of a block at the end of a prompt.
MAX_BLOCK = 64
# Characters of the differing texts in a message.
MAX_SHOWN = 40


# Turns of a chat that are found without windows, and turns per window.
EXACT_TURNS, BLOCK = 16, 8
# Messages of a window before the first turn that it checks.
CONTEXT, MAX_CONTEXT = 4, 64
# A chat of more turns * characters is skipped if windows do not fit its template.
MAX_CHARACTERS = 20_000_000


@dataclass(frozen=True)
class Chat:
    """The messages of an example and what the chat template gets with them.

    Attributes:
        tools: JSON schemas of the functions that the assistant may call.
        options: further arguments of the template.
    """

    template: ChatTemplate
    messages: Sequence[dict]
    tools: Sequence[dict] | None
    options: dict[str, Any]

    def render(self, end: int, **options: Any) -> str:
        """The text of the messages before message `end`."""
        return self.render_messages(self.messages[:end], **options)

    def render_messages(self, messages: Sequence[dict], **options: Any) -> str:
        """The text of other messages, with the same tools."""
        return self.template.render(
            messages, tools=self.tools, **self.options | options
        )

    def ways_to_ask(self) -> Iterator[dict[str, bool]]:
        """The arguments with which a server may ask: the default, then without and
        with a chain of thought."""
        yield {}
        for thinking in (False, True):
            for switch in self.template.switches:
                if switch not in self.options:
                    yield {switch: thinking}


@dataclass(frozen=True)
class Turn:
    """A turn of the assistant in the text of a chat.

    Attributes:
        text: the text of the chat from its start, at least to the end of the turn.
        start, end: the target in `text`, in characters.
        add_eos: the template writes no token that ends the turn, so that the
            tokenizer's end-of-sequence token follows it.
        is_exact: the prompt is exactly what a server sends; else an empty chain of
            thought of the template is left out or is a part of the prompt.
    """

    text: str
    start: int
    end: int
    add_eos: bool = False
    is_exact: bool = True


@dataclass(frozen=True)
class TurnSequence:
    """Turns that nest.

    Attributes:
        text: the text of the last turn.
        spans: the (start, end) of the targets in `text`, in order.
        add_eos: see `Turn`.
    """

    text: str
    spans: tuple[Span, ...]
    add_eos: bool = False


def join_turns(turns: Sequence[Turn]) -> list[TurnSequence]:
    """The fewest sequences of turns in order, such that every turn is exact."""
    sequences: list[TurnSequence] = []
    for turn in turns:
        sequence = TurnSequence(turn.text, ((turn.start, turn.end),), turn.add_eos)
        if sequences and _continues(sequences[-1], turn):
            before = sequences.pop()
            sequence = replace(sequence, spans=before.spans + sequence.spans)
        sequences.append(sequence)
    return sequences


def _continues(before: TurnSequence, turn: Turn) -> bool:
    """Whether the prompt of a turn starts with the turns before it."""
    end = before.spans[-1][1]
    is_prefix = turn.start >= end and turn.text.startswith(before.text[:end])
    return is_prefix and not before.add_eos


def find_turn(chat: Chat, index: int) -> Turn:
    """The turn that message `index` is, as a server asks for it.

    Raises:
        NoTrainableTokens: no way to ask for it gives a text that holds it.
    """
    if index == 0:
        raise NoTrainableTokens(
            "it starts with the assistant, and no server asks for that; a message with "
            "weight: 0 is not trained"
        )
    best, first_error = None, None
    for way in chat.ways_to_ask():
        try:
            turn = _ask(chat, index, way)
        except NoTrainableTokens as error:
            first_error = first_error or error
            continue
        if turn.is_exact:
            return turn
        best = best or turn
    if best is None:
        raise first_error
    return best


def _ask(chat: Chat, index: int, way: dict[str, bool]) -> Turn:
    message = chat.messages[index]
    prompt = chat.render(index, add_generation_prompt=True, **way)
    text = chat.render(index + 1, **way)
    turn = _with_end(chat, index, way, _start(prompt, text, message))
    if turn.start == 0:
        raise NoTrainableTokens("the chat template writes no prompt")
    missing = missing_part(message, turn.text[turn.start : turn.end])
    if missing is None and turn.is_exact:
        return turn
    if verbatim := _verbatim(prompt, turn, message):
        return verbatim
    if missing:
        raise NoTrainableTokens(
            f"the chat template does not write the {missing} of message {index + 1}"
        )
    if OWN_BLOCK.match(turn.text, turn.start):
        raise _changed(prompt, text)
    return turn


def _start(prompt: str, text: str, message: dict) -> Turn:
    """The turn from its start to the end of `text`."""
    if text.startswith(prompt):
        start = skip_empty_block(text, len(prompt), message)
        return Turn(text, start, len(text), is_exact=start == len(prompt))
    # R1 opens a chain of thought, which the text of a turn does not have.
    if block := _prompt_block(prompt):
        before = prompt[: len(prompt) - len(block.group())]
        for start in (len(before), len(before.rstrip())):
            if text.startswith(prompt[:start]):
                return Turn(text, start, len(text), is_exact=False)
    raise _changed(prompt, text)


def skip_empty_block(text: str, start: int, message: dict) -> int:
    """Where the target of a message without a chain of thought starts.

    The template may have inserted an empty one. Without thinking, it is a part of the
    prompt.

    Args:
        start: where the generation prompt ends.
    """
    if reasoning_of(message) or TAG.match(message["content"].strip()):
        return start
    block = _prompt_block(text[max(0, start - MAX_BLOCK) : start])
    inserted = EMPTY_REST if block and not block.group(2) else EMPTY_BLOCK
    skipped, content = inserted.match(text, start).group(), message["content"]
    # The space before the content is not that of the block.
    space = content[: len(content) - len(content.lstrip())]
    return start + len(skipped) - (len(space) if skipped.endswith(space) else 0)


def _prompt_block(prompt: str) -> re.Match | None:
    return PROMPT_BLOCK.search(prompt[-MAX_BLOCK:])


def _changed(prompt: str, text: str) -> NoTrainableTokens:
    at = common_prefix(prompt, text)
    asked, has = (shown[at : at + MAX_SHOWN] for shown in (prompt, text))
    return NoTrainableTokens(
        f"the chat template changes the prompt: it asks with {asked!r}, the chat has "
        f"{has!r}"
    )


def common_prefix(text: str, other: str) -> int:
    """The number of characters that two texts have in common at their start."""
    sizes = range(1, len(text) + 1)
    return bisect_left(sizes, True, key=lambda n: not other.startswith(text[:n]))


def _with_end(chat: Chat, index: int, way: dict[str, bool], turn: Turn) -> Turn:
    """The turn up to and with the token that ends it."""
    if stop := chat.template.stop.search(turn.text, turn.start):
        return replace(turn, end=stop.end())
    try:
        messages = [*chat.messages[: index + 1], NEXT]
        longer = chat.render_messages(messages, **way)
    except NoTrainableTokens:
        longer = ""
    if longer.startswith(turn.text):
        space = len(longer) - len(longer[len(turn.text) :].lstrip())
        # GLM stops at the header of the next message.
        if stop := chat.template.stop.match(longer, space):
            return replace(turn, text=longer[: stop.end()], end=stop.end())
    if chat.template.tokenizer.eos_token_id is None:
        raise NoTrainableTokens(
            "neither the chat template nor the tokenizer has a token that ends a turn"
        )
    return replace(turn, add_eos=True)


def _verbatim(prompt: str, turn: Turn, message: dict) -> Turn | None:
    """The turn with its content as the model wrote it, in place of the template's text.

    For templates that drop the chain of thought of every turn, as that of R1. None if
    the generation prompt does not open it, or the content does not hold it.
    """
    block, content = _prompt_block(prompt), message["content"].strip()
    opening = re.match(OPENING, content)
    if not (block and opening) or block.group(2) or message.get("tool_calls"):
        return None
    answer = TAG.split(content)[-1].strip()
    place = turn.text.rfind(answer, turn.start, turn.end)
    if not answer or place < 0:
        return None
    # The prompt ends with the whitespace that follows the tag.
    thought = content[opening.end() :]
    thought = thought.lstrip() if block.group(1) else thought
    rest = turn.text[place + len(answer) :]
    end = len(prompt) + len(thought) + turn.end - place - len(answer)
    text = prompt + thought + rest
    return Turn(text, len(prompt), end, turn.add_eos)


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
