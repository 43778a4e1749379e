"""A turn of a chat as it is served.

The prompt of a turn is what a server renders: the messages before the turn, with the
generation prompt. The target is what the model must then write, up to and with the
token that ends the turn. Templates write a chat of several messages in another way than
a prompt, so that the target is not always what the text of the chat adds to the prompt.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
        messages, words = [*self.messages[:end]], {}
        for n, message in enumerate(messages):
            if message["role"] != "assistant" and message["content"].strip():
                words[n] = f"lmx-probe-{n}-"
                messages[n] = message | {"content": words[n]}
        try:
            text = self.render_messages(messages, **options)
        except NoTrainableTokens:
            # It needs the contents themselves, as that of a tool in JSON.
            return None
        for n, word in words.items():
            if word not in text:
                return f"message {n + 1}, of the role {messages[n]['role']}"
        without = replace(self, tools=None)
        is_same = self.tools and without.render_messages(messages, **options) == text
        return "tools" if is_same else None


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
            turn = _TurnRequest(chat, index, way).turn()
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
class _TurnRequest:
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
        first_fault: str | None = None
        for answer in self._answers(prompt, message):
            stop = self.chat.template.stop.search(answer)
            end = stop.end() if stop else len(answer)
            fault = fault_of(message, self.index, prompt, answer[:end])
            if fault is None:
                return Turn(prompt, answer[:end], answer[end:], stop is None)
            first_fault = first_fault or fault
        if first_fault is None:
            text = self.chat.render(self.index + 1, **self.way)
            at = common_prefix(prompt, text)
            asked, has = (shown[at : at + MAX_SHOWN] for shown in (prompt, text))
            first_fault = (
                f"the chat template changes the prompt: it asks with {asked!r}, the "
                f"chat has {has!r}"
            )
        raise NoTrainableTokens(first_fault)

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
            inline = None if is_plain else INLINE.match(message["content"])
            plain = {k: v for k, v in message.items() if k not in REASONING}
            if inline and _has_reasoning(plain):
                plain["content"] = message["content"][inline.end() :]
            answer = self._after_block(prompt, block, plain)
            if answer is not None:
                # After the tag comes the white space that the prompt has there: a line
                # of its own in R1 and QwQ.
                tag, space = block.groups()
                thought = (reasoning_of(message) or "").strip()
                if not thought and inline:
                    yield (inline[1].lstrip() if space else inline[1]) + answer
                else:
                    yield f"{thought}{space}{TAGS[tag]}{space * 2}{answer}"
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
        request = _TurnRequest(chat, len(others), self.way)
        rest = request._after(request.prompt(), message)
        text = self.chat.render(self.index + 1, **self.way)
        return rest if rest and text.endswith(rest) else None


def _has_reasoning(message: dict) -> bool:
    return bool(reasoning_of(message) or TAG.match(message["content"].strip()))


def fault_of(message: dict, index: int, prompt: str, target: str) -> str | None:
    """Why a target is not what the message says."""
    if missing := missing_part(message, target):
        return f"the chat template does not write the {missing} of message {index + 1}"
    if OPEN_BLOCK.search(prompt[-MAX_BLOCK:]) and not re.search(CLOSING, target):
        return (
            f"message {index + 1} does not close the chain of thought that the prompt "
            "opens"
        )
    return None


def common_prefix(text: str, other: str) -> int:
    """The number of characters that two texts have in common at their start."""
    sizes = range(1, len(text) + 1)
    return bisect_left(sizes, True, key=lambda n: not other.startswith(text[:n]))
