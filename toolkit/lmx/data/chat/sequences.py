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
from itertools import accumulate
from typing import Any

from .completeness import (
    CLOSING,
    OPENING,
    REASONING,
    TAG,
    TAGS,
    missing_part,
    reasoning_of,
)
from .rendering import ChatTemplate, NoTrainableTokens

Span = tuple[int, int]

# The chain of thought at the end of a prompt: one that it opens, or an empty one.
# Without thinking, the prompt of DeepSeek V3.1 has the closing tag alone.
OPEN_BLOCK = re.compile(rf"({OPENING})(\s*)$")
CLOSED_BLOCK = re.compile(rf"(?:{OPENING}\s*)?{CLOSING}\s*$")
# What the model writes before an answer without a chain of thought: an empty one, or
# the end of the one that the prompt opens.
EMPTY_BLOCK = re.compile(rf"\s*(?:{OPENING}\s*)?{CLOSING}")
OWN_BLOCK = re.compile(rf"\s*{OPENING}")
# A content that begins with a chain of thought.
INLINE = re.compile(rf"\s*(?:{OPENING})?(.*{CLOSING}\s*)", re.DOTALL)
# A chain of thought, to see how the template closes one.
PROBE = "lmx-probe-thought"
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

    def ways_to_ask(self, message: dict) -> Iterator[dict[str, bool]]:
        """The arguments with which a server may ask for a turn: the default, then
        with a chain of thought for a turn that has one, without it for another."""
        yield {}
        for switch in self.template.switches:
            if switch not in self.options:
                yield {switch: _has_reasoning(message)}

    def missing_from(self, end: int, **options: Any) -> str | None:
        """What the template leaves out of the text of the messages before `end`: one
        that is not the assistant's, or the tools; None if it writes all.

        Templates trim and escape contents, so another word stands for each.
        """
        messages = [*self.messages[:end]]
        words = {
            n: f"lmx-probe-{n}-"
            for n, message in enumerate(messages)
            if message["role"] != "assistant" and message["content"].strip()
        }
        for n, word in words.items():
            messages[n] = messages[n] | {"content": word}
        try:
            text = self.render_messages(messages, **options)
        except NoTrainableTokens:
            # It needs the contents themselves, as that of a tool in JSON.
            return None
        for n, word in words.items():
            if word not in text:
                return f"message {n + 1}, of the role {messages[n]['role']}"
        if not self.tools:
            return None
        bare = replace(self, tools=None).render_messages(messages, **options)
        return "tools" if text == bare else None


@dataclass(frozen=True)
class Turn:
    """A turn of the assistant as it is served.

    Attributes:
        prompt: what a server sends.
        target: what the model must then write, with the token that ends the turn.
        tail: what the template writes after it.
        add_eos: the template writes no such token, so that the tokenizer's
            end-of-sequence token follows.
    """

    prompt: str
    target: str
    tail: str
    add_eos: bool


@dataclass(frozen=True)
class TurnSequence:
    """Turns that nest.

    Attributes:
        text: the prompt, the target and the tail of the last turn.
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
        earlier: tuple[Span, ...] = ()
        if sequences and _continues(sequences[-1], turn):
            earlier = sequences.pop().spans
        start, text = len(turn.prompt), turn.prompt + turn.target
        spans = (*earlier, (start, len(text)))
        sequences.append(TurnSequence(text + turn.tail, spans, turn.add_eos))
    return sequences


def _continues(before: TurnSequence, turn: Turn) -> bool:
    """Whether the prompt of a turn starts with the turns before it."""
    end = before.spans[-1][1]
    return turn.prompt.startswith(before.text[:end]) and not before.add_eos


def find_turn(chat: Chat, index: int) -> Turn:
    """The turn that message `index` is, as a server asks for it.

    A prompt after which the answer itself follows is preferred to one after which the
    model must write an empty chain of thought.

    Raises:
        NoTrainableTokens: no way to ask for it gives a text that holds it.
    """
    if index == 0:
        raise NoTrainableTokens(
            "it starts with the assistant, and no server asks for that; a message with "
            "weight: 0 is not trained"
        )
    best, error = None, None
    for way in chat.ways_to_ask(chat.messages[index]):
        try:
            turn = _Request(chat, index, way).turn()
        except NoTrainableTokens as reason:
            error = reason
            continue
        if not EMPTY_BLOCK.match(turn.target):
            return turn
        best = best or turn
    if best is None:
        raise error
    return best


@dataclass(frozen=True)
class _Request:
    """A request for message `index` of a chat, with one of `Chat.ways_to_ask`."""

    chat: Chat
    index: int
    way: dict[str, bool]

    def prompt(self) -> str:
        return self.chat.render(self.index, add_generation_prompt=True, **self.way)

    def turn(self) -> Turn:
        """The first answer that holds the message."""
        prompt, message = self.prompt(), self.chat.messages[self.index]
        if not prompt:
            raise NoTrainableTokens("the chat template writes no prompt")
        first_fault = None
        for answer in self._answers(prompt, message):
            stop = self.chat.template.stop.search(answer)
            end = stop.end() if stop else len(answer)
            fault = _fault(message, self.index, prompt, answer[:end])
            if fault is None:
                return Turn(prompt, answer[:end], answer[end:], stop is None)
            first_fault = first_fault or fault
        if first_fault:
            raise NoTrainableTokens(first_fault)
        raise _changed(prompt, self.chat.render(self.index + 1, **self.way))

    def _answers(self, prompt: str, message: dict) -> Iterator[str]:
        """What may follow the prompt, the template's own text first."""
        if (rest := self._after(prompt, message)) is not None:
            yield rest
        is_plain = not _has_reasoning(message)
        if block := OPEN_BLOCK.search(prompt[-MAX_BLOCK:]):
            if is_plain:
                # As the template closes a chain of thought.
                probe = message | {"reasoning_content": PROBE}
                if PROBE in (closed := self._after(prompt, probe) or ""):
                    yield closed.replace(PROBE, "", 1)
            # No text of a turn has the chain of thought, as in R1 and QwQ.
            answer = self._after_block(prompt, block, _without_reasoning(message))
            if answer is not None:
                yield _thought(message, block) + answer
        elif is_plain and (block := CLOSED_BLOCK.search(prompt[-MAX_BLOCK:])):
            # Only the generation prompt has the empty chain of thought.
            answer = self._after_block(prompt, block, message)
            if answer is not None:
                yield answer
        if rest := self._after_moved(message):
            yield rest

    def _after(self, prompt: str, message: dict) -> str | None:
        """The text of a message with the token that ends it; None if the text of the
        chat does not start with `prompt`."""
        messages = [*self.chat.messages[: self.index], message]
        text = self.chat.render_messages(messages, **self.way)
        if not text.startswith(prompt):
            return None
        template = self.chat.template
        if not template.stop.search(text, len(prompt)):
            try:
                longer = self.chat.render_messages([*messages, NEXT], **self.way)
            except NoTrainableTokens:
                longer = ""
            header = template.stop.match(longer, len(text))
            if header and longer.startswith(text):
                # GLM stops at the header of the next message.
                text = longer[: header.end()]
            elif template.tokenizer.eos_token_id is None:
                raise NoTrainableTokens(
                    "neither the chat template nor the tokenizer has a token that ends "
                    "a turn"
                )
        return text[len(prompt) :]

    def _after_block(self, prompt: str, block: re.Match, message: dict) -> str | None:
        """The text of a message that has not the chain of thought of the prompt."""
        before = prompt[: len(prompt) - len(block.group())]
        for start in (before, before.rstrip()):
            rest = self._after(start, message)
            if rest is not None and not OWN_BLOCK.match(rest):
                # DeepSeek V3.1 begins every turn with the closing tag.
                return re.sub(rf"^\s*{CLOSING}", "", rest)
        return None

    def _after_moved(self, message: dict) -> str | None:
        """The text of a message in a template that writes the system message in
        another place when the answer is last, as that of Mistral."""
        before = self.chat.messages[: self.index]
        others = [m for m in before if m["role"] != "system"]
        if len(others) == len(before) or not others:
            return None
        chat = replace(self.chat, messages=[*others, message])
        request = _Request(chat, len(others), self.way)
        rest = request._after(request.prompt(), message)
        text = self.chat.render(self.index + 1, **self.way)
        return rest if rest and text.endswith(rest) else None


def _has_reasoning(message: dict) -> bool:
    return bool(reasoning_of(message) or TAG.match(message["content"].strip()))


def _without_reasoning(message: dict) -> dict:
    answer = {key: value for key, value in message.items() if key not in REASONING}
    if _has_reasoning(answer) and (thought := INLINE.match(answer["content"])):
        answer["content"] = answer["content"][thought.end() :]
    return answer


def _thought(message: dict, block: re.Match) -> str:
    """The chain of thought of a message up to its answer, after a prompt that opens it.

    Apart from the content, it has the white space that the prompt has after the tag:
    a line of its own in R1 and QwQ.
    """
    tag, space = block.groups()
    thought = (reasoning_of(message) or "").strip()
    inline = INLINE.match(message["content"])
    if not thought and inline and _has_reasoning(message):
        return inline[1].lstrip() if space else inline[1]
    return f"{thought}{space}{TAGS[tag]}{space * 2}"


def _fault(message: dict, index: int, prompt: str, target: str) -> str | None:
    """Why a target is not what the message says."""
    if missing := missing_part(message, target):
        return f"the chat template does not write the {missing} of message {index + 1}"
    if OPEN_BLOCK.search(prompt[-MAX_BLOCK:]) and not re.search(CLOSING, target):
        return (
            f"message {index + 1} does not close the chain of thought that the prompt "
            "opens"
        )
    return None


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


def find_sequences(chat: Chat, turns: list[int]) -> list[TurnSequence]:
    """The training sequences of a chat that ends with its last trained turn.

    Args:
        turns: the indices of the messages that are trained.

    Raises:
        NoTrainableTokens: a turn cannot be trained as it is served, its prompt lacks a
            message or the tools, or the chat is too long for a template that windows do
            not fit.
    """
    sequences = _sequences(chat, turns)
    for number in accumulate(len(sequence.spans) for sequence in sequences):
        last = turns[number - 1]
        if missing := chat.missing_from(last, add_generation_prompt=True):
            raise NoTrainableTokens(f"the chat template does not write {missing}")
    return sequences


def _sequences(chat: Chat, turns: list[int]) -> list[TurnSequence]:
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
        stop = self.chat.template.stop
        found = stop.search(self.text, start, end) or stop.match(self.text, end)
        if found is None:
            return None
        message = self.chat.messages[index]
        prompt, target = self.text[:start], self.text[start : found.end()]
        has_other_ways = len([*self.chat.ways_to_ask(message)]) > 1
        is_other = has_other_ways and EMPTY_BLOCK.match(target)
        is_exact = not is_other and _fault(message, index, prompt, target) is None
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
    window, head = Window(chat, text), _head(chat.messages, turns[0])
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
