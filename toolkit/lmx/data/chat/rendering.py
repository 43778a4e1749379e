"""Renders messages with the chat template of a tokenizer, within limits.

A chat template of a downloaded model is a foreign program. Jinja's sandbox keeps it
away from files and attributes. The limits here end endless loops and endless text.
"""

import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import Any

from ...errors import UserError, error_detail, shorten

# Of the processor, not of the clock: a busy machine skips the same chats.
MAX_SECONDS = 10.0
# Characters that a template may print, and more for each character of the messages.
MAX_CHARACTERS, CHARACTERS_PER_CHARACTER = 1_000_000, 8
# Renderings that may reach a limit before the template is refused.
MAX_EXCEEDED = 3
# The names under which templates switch the chain of thought.
SWITCHES = ("enable_thinking", "thinking")
_exceeded: Counter[str] = Counter()


class NoTrainableTokens(ValueError):
    """The reason why a record has no trainable tokens."""

    def __init__(self, reason: str):
        super().__init__(shorten(reason))


class TemplateLimitError(Exception):
    """A chat template has reached a limit."""


class _TimeIsUp(BaseException):
    """Ends a template. Jinja would catch an Exception where it computes constants."""


class ChatTemplate:
    """The chat template of a tokenizer, bare or in mlx-lm's wrapper."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    @property
    def exists(self) -> bool:
        """Whether the tokenizer has a chat template."""
        has = getattr(self.tokenizer, "has_chat_template", None)
        return self.tokenizer.chat_template is not None if has is None else has

    @cached_property
    def source(self) -> str:
        """The text of the template, of all templates if it has several."""
        return str(self.tokenizer.chat_template)

    @property
    def ignores_messages(self) -> bool:
        """Whether a user's message is not in the prompt, as with an empty template."""
        try:
            message = {"role": "user", "content": "Is it warm in Rome?"}
            text = self.render([message], add_generation_prompt=True)
            return message["content"] not in text
        except NoTrainableTokens:
            return False

    @cached_property
    def words(self) -> set[str] | None:
        """Its words; None = it is a program, which is not read."""
        has_text = self.tokenizer.chat_template is not None
        return set(re.findall(r"\w+", self.source)) if has_text else None

    @cached_property
    def switches(self) -> tuple[str, ...]:
        """The arguments of the template that switch the chain of thought."""
        return tuple(name for name in SWITCHES if name in (self.words or ()))

    def unknown(self, names: Iterable[str]) -> str | None:
        """The first name that is no word of the template."""
        words = self.words
        return next((n for n in names if words is not None and n not in words), None)

    @cached_property
    def stop(self) -> re.Pattern:
        """The text of a token at which generation stops."""
        ids = getattr(self.tokenizer, "eos_token_ids", None)
        # A set in mlx-lm's wrapper; transformers has a single id.
        if not isinstance(ids, set | list):
            ids = {self.tokenizer.eos_token_id} - {None}
        texts = {self.tokenizer.decode([token]) for token in ids} - {""}
        longest_first = sorted(texts, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def render(
        self,
        messages: Sequence[dict],
        *,
        tools: Sequence[dict] | None = None,
        **options: Any,
    ) -> str:
        """The text of messages.

        Args:
            tools: JSON schemas of the functions that the assistant may call.
            options: arguments of the template.

        Raises:
            NoTrainableTokens: the template rejects the messages.
            UserError: the template has reached its limits several times.
        """
        limit_templates()
        if tools:
            options["tools"] = [*tools]
        try:
            text = self.tokenizer.apply_chat_template(
                [*messages], tokenize=False, **options
            )
        except TemplateLimitError as error:
            _exceeded[self.source] += 1
            if _exceeded[self.source] >= MAX_EXCEEDED:
                raise UserError(
                    f"the chat template is stopped for {MAX_EXCEEDED} chats: {error}",
                    hint="use a model with another chat template",
                ) from None
            raise NoTrainableTokens(f"the chat template is stopped: {error}") from None
        # A template is a foreign program, with errors of all kinds.
        except Exception as error:
            detail = error_detail(error)
            message = f"the chat template rejects these messages: {detail}"
            raise NoTrainableTokens(message) from None
        if not isinstance(text, str):
            raise NoTrainableTokens("the chat template returns no text")
        return text


def limit_templates() -> None:
    """Let transformers compile every chat template of this process with limits."""
    from transformers.utils import chat_template_utils

    chat_template_utils._compile_jinja_template = compile_template


@lru_cache
def compile_template(source: str) -> Any:
    """A Jinja template with the filters and globals of transformers, and with limits.

    Raises:
        TemplateLimitError: to compile it takes too long.
        jinja2.TemplateError: it has an error.
    """
    from jinja2 import Template
    from transformers.utils import chat_template_utils

    class LimitedTemplate(Template):
        def render(self, **variables: Any) -> str:
            limit = MAX_CHARACTERS + CHARACTERS_PER_CHARACTER * len(str(variables))
            pieces, size = [], 0
            with _time_limit():
                for piece in self.generate(**variables):
                    size += len(piece)
                    if size > limit:
                        message = f"it prints more than {limit:,} characters"
                        raise TemplateLimitError(message)
                    pieces.append(piece)
            return "".join(pieces)

    base = chat_template_utils._cached_compile_jinja_template("").environment
    base.template_class = LimitedTemplate
    with _time_limit():
        return base.from_string(source)


@contextmanager
def _time_limit() -> Iterator[None]:
    """Raise `TemplateLimitError` after `MAX_SECONDS` of processor time."""

    def stop(*_: Any) -> None:
        raise _TimeIsUp

    def check(*_: Any) -> Any:
        return stop() if time.thread_time() > deadline else check

    deadline = time.thread_time() + MAX_SECONDS
    # A signal costs nothing. Only the main thread receives one.
    has_signals = threading.current_thread() is threading.main_thread()
    trace = sys.gettrace()
    try:
        if has_signals:
            previous = signal.signal(signal.SIGPROF, stop)
            signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
        else:
            sys.settrace(check)
        yield
    except _TimeIsUp:
        message = f"it takes more than {MAX_SECONDS:g} seconds"
        raise TemplateLimitError(message) from None
    finally:
        if has_signals:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, previous)
        else:
            sys.settrace(trace)
