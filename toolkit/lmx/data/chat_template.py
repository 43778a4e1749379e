"""Renders records with the chat template and finds the assistant turns in the text."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import UserError, error_detail, shorten
from .record_formats import DataRecord

THINK = "<think>"
# GLM-4.5 begins its block with a newline.
EMPTY_THINKING = re.compile(r"(?:\s*<think>\s*</think>\s*)?")
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class NoTrainableTokens(ValueError):
    """The reason why a record has no trainable tokens."""

    def __init__(self, reason: str):
        super().__init__(shorten(reason))


@dataclass(frozen=True)
class RenderedChat:
    """A record as text, with the spans of the completions.

    Attributes:
        spans: (start, end) in characters, in order.
        bare: the text has no chat template, so BOS and EOS must be added.
        last_only: the text has earlier assistant turns, which cannot be trained.
        marked: tokens and mask from the template's `{% generation %}` markers.
    """

    record: DataRecord
    text: str
    spans: tuple[tuple[int, int], ...]
    bare: bool = False
    last_only: bool = False
    marked: tuple[list[int], list[bool]] | None = None

    def prefixes(self) -> list[str]:
        """The text up to the start and up to the end of every completion."""
        return [self.text[:edge] for span in self.spans for edge in span]

    def texts(self) -> list[str]:
        """The texts that must be encoded."""
        return [] if self.marked else [self.text, *self.prefixes()]

    def segments(self) -> Iterator[tuple[str, bool]]:
        """The parts of the text, and whether each is a completion."""
        last = 0
        for start, end in self.spans:
            yield self.text[last:start], False
            yield self.text[start:end], True
            last = end
        yield self.text[last:], False


def render(record: DataRecord, tokenizer, *, everything: bool = False) -> RenderedChat:
    """Render a record and find its completions.

    Args:
        everything: treat the whole text as one completion.

    Raises:
        NoTrainableTokens: the completions cannot be located.
        UserError: the record is a chat and the tokenizer has no chat template.
    """
    if record.text is not None:
        return RenderedChat(record, record.text, ((0, len(record.text)),), bare=True)
    if record.messages is not None:
        return _chat(record, list(record.messages), tokenizer, everything)
    if has_template(tokenizer):
        user = {"role": "user", "content": record.prompt}
        assistant = {"role": "assistant", "content": record.completion}
        return _chat(record, [user, assistant], tokenizer, everything)
    text = record.prompt + record.completion
    return RenderedChat(record, text, ((len(record.prompt), len(text)),), bare=True)


def has_template(tokenizer) -> bool:
    """Whether a tokenizer, bare or in mlx-lm's wrapper, has a chat template."""
    has = getattr(tokenizer, "has_chat_template", None)
    return tokenizer.chat_template is not None if has is None else has


def _chat(
    record: DataRecord, messages: list[dict], tokenizer, everything: bool
) -> RenderedChat:
    if not has_template(tokenizer):
        raise UserError(
            "chat examples need a chat template, which this model's tokenizer lacks",
            hint="use an instruct model, or examples with prompt and completion",
            place=record.where,
        )
    if everything:
        whole = _render(messages, tokenizer)
        return RenderedChat(record, whole, ((0, len(whole)),))
    turns = [i for i, message in enumerate(messages) if _is_completion(message)]
    messages = messages[: turns[-1] + 1]
    whole = _render(messages, tokenizer)
    spans = [_span(messages, index, whole, tokenizer) for index in turns]
    if all(spans):
        return RenderedChat(record, whole, tuple(spans))
    if _MARKERS.search(str(tokenizer.chat_template)):
        return RenderedChat(record, whole, (), marked=_marked(messages, tokenizer))
    if spans[-1]:
        return RenderedChat(record, whole, (spans[-1],), last_only=True)
    raise NoTrainableTokens("the chat template changes the turns before the last one")


def _is_completion(message: dict) -> bool:
    filled = message["content"].strip() or message.get("tool_calls")
    return message["role"] == "assistant" and bool(filled)


def _span(
    messages: list[dict], index: int, whole: str, tokenizer
) -> tuple[int, int] | None:
    """The span of turn `index` in `whole`.

    None if the template changes the turn, or the text before it, when more turns
    follow, as templates do that drop earlier reasoning.
    """
    if index == 0:
        return None
    prompt = _prefix(messages[:index], whole, tokenizer, add_generation_prompt=True)
    if prompt is None:
        return None
    content = messages[index]["content"].strip()
    start, end = len(prompt), len(whole)
    if not content.startswith(THINK):
        # Inserted by the template. Without thinking, it is a part of the prompt.
        start += len(EMPTY_THINKING.match(whole[start:]).group())
    if index < len(messages) - 1:
        completed = _prefix(messages[: index + 1], whole, tokenizer)
        end = len(completed or "") or _end_of_turn(messages, content, whole, start)
    return (start, end) if start < end else None


def _end_of_turn(messages: list[dict], content: str, whole: str, start: int) -> int:
    """The end of an earlier turn with the content at `start`; 0 if it is not there.

    For templates that render the last turn in another way, such as with an empty
    thinking block.
    """
    last = messages[-1]["content"].strip()
    if not last:
        return 0
    before, _, suffix = whole.rpartition(last)
    turn = content + suffix
    return start + len(turn) if before and whole.startswith(turn, start) else 0


def _prefix(messages: list[dict], whole: str, tokenizer, **options) -> str | None:
    try:
        text = _render(messages, tokenizer, **options)
    except NoTrainableTokens:
        return None
    return text if whole.startswith(text) else None


def _render(messages: list[dict], tokenizer, *, add_generation_prompt=False) -> str:
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    # A template is a program: it raises whatever a program raises.
    except Exception as error:
        detail = error_detail(error)
        raise NoTrainableTokens(f"the chat template rejects it: {detail}") from None
    if not isinstance(text, str):
        raise NoTrainableTokens("the chat template returns no text")
    return text


def _marked(messages: list[dict], tokenizer) -> tuple[list[int], list[bool]]:
    """Tokens and mask from the template's {% generation %} markers."""
    # mlx-lm's wrapper drops the dictionary that holds the mask.
    inner = getattr(tokenizer, "_tokenizer", None)
    bare = inner if hasattr(inner, "apply_chat_template") else tokenizer
    encoding = bare.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return list(encoding["input_ids"]), [bool(m) for m in encoding["assistant_masks"]]
