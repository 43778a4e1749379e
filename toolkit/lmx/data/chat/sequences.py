"""The training sequences of a chat: every turn as it is served.

The prompt of a turn is what a server renders: the messages before the turn, with the
generation prompt. The target is what the model must then write, up to and with the
token that ends the turn. Where the texts of the turns nest, a chat is one sequence.
Where they do not, as with templates that drop earlier reasoning, a turn that does not
continue the sequence before it begins a new one.
"""

import re
from bisect import bisect_left
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
