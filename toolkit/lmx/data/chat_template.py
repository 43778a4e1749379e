"""Where the answers are in the text that a chat template renders."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import UserError
from .record_formats import DataRecord

_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class NoTrainableTokens(ValueError):
    """A row that cannot be trained on, and why."""


@dataclass(frozen=True)
class RenderedChat:
    """A row as text, and the spans of it that are answers.

    Attributes:
        spans: (start, end) in characters, in order.
        bare: no template wrote it; the tokens of a whole document belong around it.
        last_only: earlier answers are there, but cannot be trained.
        marked: tokens and mask as the template's own markers give them.
    """

    row: DataRecord
    text: str
    spans: tuple[tuple[int, int], ...]
    bare: bool = False
    last_only: bool = False
    marked: tuple[list[int], list[bool]] | None = None

    def prefixes(self) -> list[str]:
        """The text before and up to the end of every answer."""
        return [self.text[:edge] for span in self.spans for edge in span]

    def texts(self) -> list[str]:
        """All that must be encoded."""
        return [] if self.marked else [self.text, *self.prefixes()]

    def segments(self) -> Iterator[tuple[str, bool]]:
        """The text in parts, with whether the part is an answer."""
        last = 0
        for start, end in self.spans:
            yield self.text[last:start], False
            yield self.text[start:end], True
            last = end
        yield self.text[last:], False


def render(row: DataRecord, tokenizer, *, everything: bool = False) -> RenderedChat:
    """Find the answers of a row, or take all of its text as one.

    Raises:
        Untrainable: they cannot be told from the rest.
        UserError: the row is a chat and the tokenizer has no chat template.
    """
    if row.text is not None:
        return RenderedChat(row, row.text, ((0, len(row.text)),), bare=True)
    if row.messages is not None:
        return _chat(row, list(row.messages), tokenizer, everything)
    if _has_template(tokenizer):
        asked = {"role": "user", "content": row.prompt}
        answer = {"role": "assistant", "content": row.completion}
        return _chat(row, [asked, answer], tokenizer, everything)
    text = row.prompt + row.completion
    return RenderedChat(row, text, ((len(row.prompt), len(text)),), bare=True)


def _has_template(tokenizer) -> bool:
    has = getattr(tokenizer, "has_chat_template", None)
    return tokenizer.chat_template is not None if has is None else has


def _chat(
    row: DataRecord, messages: list[dict], tokenizer, everything: bool
) -> RenderedChat:
    if not _has_template(tokenizer):
        raise UserError(
            "chat rows need a chat template, and this model's tokenizer has none",
            hint="use an instruct model, or rows of prompt and completion",
            place=row.where,
        )
    if everything:
        whole = _render(messages, tokenizer)
        return RenderedChat(row, whole, ((0, len(whole)),))
    answers = [i for i, message in enumerate(messages) if _answers(message)]
    messages = messages[: answers[-1] + 1]
    whole = _render(messages, tokenizer)
    spans = [_span(messages, index, whole, tokenizer) for index in answers]
    if all(spans):
        return RenderedChat(row, whole, tuple(spans))
    if _MARKERS.search(str(tokenizer.chat_template)):
        return RenderedChat(row, whole, (), marked=_marked(messages, tokenizer))
    if spans[-1]:
        return RenderedChat(row, whole, (spans[-1],), last_only=True)
    raise NoTrainableTokens("the chat template rewrites what comes before the answer")


def _answers(message: dict) -> bool:
    filled = message["content"].strip() or message.get("tool_calls")
    return message["role"] == "assistant" and bool(filled)


def _span(
    messages: list[dict], index: int, whole: str, tokenizer
) -> tuple[int, int] | None:
    """Where answer `index` stands in `whole`; None where the template changes what
    stands before or in it once more turns follow, as those that drop old thinking do.
    """
    if index == 0:
        return None
    asked = _prefix(messages[:index], whole, tokenizer, add_generation_prompt=True)
    if index == len(messages) - 1:
        answered = whole
    else:
        answered = _prefix(messages[: index + 1], whole, tokenizer)
    if asked is None or answered is None or len(asked) >= len(answered):
        return None
    return len(asked), len(answered)


def _prefix(messages: list[dict], whole: str, tokenizer, **options) -> str | None:
    try:
        text = _render(messages, tokenizer, **options)
    except NoTrainableTokens:
        return None
    return text if whole.startswith(text) else None


def _render(messages: list[dict], tokenizer, *, add_generation_prompt=False) -> str:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise NoTrainableTokens(f"the chat template refuses it: {error}") from None


def _marked(messages: list[dict], tokenizer) -> tuple[list[int], list[bool]]:
    """Tokens and mask by the template's {% generation %} markers."""
    # mlx-lm's wrapper takes the dictionary away that holds the mask.
    inner = getattr(tokenizer, "_tokenizer", None)
    bare = inner if hasattr(inner, "apply_chat_template") else tokenizer
    found = bare.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return list(found["input_ids"]), [bool(m) for m in found["assistant_masks"]]
