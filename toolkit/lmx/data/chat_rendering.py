"""Renders messages with the chat template of a tokenizer."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..errors import UserError, error_detail, shorten

# Renderings that may reach a limit before the template is refused.
MAX_EXCEEDED = 3
_exceeded: Counter[str] = Counter()


class NoTrainableTokens(ValueError):
    """The reason why a record has no trainable tokens."""

    def __init__(self, reason: str):
        super().__init__(shorten(reason))


def has_template(tokenizer: Any) -> bool:
    """Whether a tokenizer, bare or in mlx-lm's wrapper, has a chat template."""
    has = getattr(tokenizer, "has_chat_template", None)
    return tokenizer.chat_template is not None if has is None else has


def render_messages(
    messages: list[dict],
    tokenizer: Any,
    *,
    tools: Sequence[dict] | None = None,
    **options: Any,
) -> Any:
    """The text of messages, or what `apply_chat_template` returns with `options`.

    Args:
        tools: JSON schemas of the functions that the assistant may call.

    Raises:
        NoTrainableTokens: the template rejects the messages.
        UserError: the template has reached its limits several times.
    """
    # Imports jinja2.
    from .template_limits import TemplateLimitError, limit_templates

    limit_templates()
    if tools:
        options["tools"] = [*tools]
    try:
        result = tokenizer.apply_chat_template(
            messages, **{"tokenize": False} | options
        )
    except TemplateLimitError as error:
        template = str(tokenizer.chat_template)
        _exceeded[template] += 1
        if _exceeded[template] < MAX_EXCEEDED:
            raise NoTrainableTokens(f"the chat template is stopped: {error}") from None
        raise UserError(
            f"the chat template is stopped for {MAX_EXCEEDED} chats: {error}",
            hint="use a model with another chat template",
        ) from None
    # A template is a foreign program, with errors of all kinds.
    except Exception as error:
        detail = error_detail(error)
        raise NoTrainableTokens(f"the chat template rejects it: {detail}") from None
    if not options.get("tokenize") and not isinstance(result, str):
        raise NoTrainableTokens("the chat template returns no text")
    return result
