"""Renders records with the chat template and finds the assistant turns in the text."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..errors import UserError
from .chat_rendering import NoTrainableTokens, has_template, render_messages
from .chat_spans import Span, find_spans
from .record_formats import DataRecord, is_completion

_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


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
    spans: tuple[Span, ...]
    bare: bool = False
    last_only: bool = False
    marked: tuple[list[int], list[bool]] | None = None

    @property
    def edges(self) -> list[int]:
        """The start and the end of every completion, in characters."""
        return [edge for span in self.spans for edge in span]

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


def _chat(
    record: DataRecord, messages: list[dict], tokenizer, everything: bool
) -> RenderedChat:
    if not has_template(tokenizer):
        raise UserError(
            "chat examples need a chat template, which this model's tokenizer lacks",
            hint="use an instruct model, or examples with prompt and completion, and "
            "without system",
            place=record.where,
        )
    tools = record.tools
    if everything:
        whole = render_messages(messages, tokenizer, tools=tools)
        return RenderedChat(record, whole, ((0, len(whole)),))
    turns = [i for i, message in enumerate(messages) if is_completion(message)]
    messages = messages[: turns[-1] + 1]
    whole = render_messages(messages, tokenizer, tools=tools)
    spans = find_spans(messages, turns, whole, tokenizer, tools)
    if all(spans):
        return RenderedChat(record, whole, tuple(spans))
    has_weights = any(message.get("weight") == 0 for message in messages)
    if _MARKERS.search(str(tokenizer.chat_template)) and not has_weights:
        marked = _marked(messages, tokenizer, tools)
        return RenderedChat(record, whole, (), marked=marked)
    if spans[-1]:
        return RenderedChat(record, whole, (spans[-1],), last_only=True)
    raise NoTrainableTokens("the chat template changes the turns before the last one")


def _marked(
    messages: list[dict], tokenizer, tools: Sequence[dict] | None
) -> tuple[list[int], list[bool]]:
    """Tokens and mask from the template's {% generation %} markers."""
    # mlx-lm's wrapper drops the dictionary that holds the mask.
    inner = getattr(tokenizer, "_tokenizer", None)
    bare = inner if hasattr(inner, "apply_chat_template") else tokenizer
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    encoding = render_messages(messages, bare, tools=tools, tokenize=True, **options)
    return list(encoding["input_ids"]), [bool(m) for m in encoding["assistant_masks"]]
