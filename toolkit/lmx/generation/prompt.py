"""Prompt encoding: chat messages or raw text to token ids."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from ..data.chat.messages import name_tool_results
from ..data.chat.rendering import ChatTemplate, NoTrainableTokens
from ..data.chat.system_messages import merge_system_messages
from ..data.chat.turns import Chat
from ..errors import UserError

SystemMessages = Literal["merge", "strict"]
Messages = list[dict[str, str]]


def encode_chat(
    tokenizer: Any,
    prompt: str | Messages,
    *,
    thinking: bool = True,
    tools: Sequence[dict] | None = None,
    template_kwargs: dict[str, Any] | None = None,
    system_messages: SystemMessages = "merge",
) -> list[int]:
    """Token ids of a chat, including the generation prompt.

    Without a chat template the message contents are encoded as raw text.

    Args:
        tokenizer: mlx-lm's TokenizerWrapper.
        thinking: enable the chain of thought in templates that have a switch for it.
        tools: JSON schemas of the functions that the assistant may call.
        template_kwargs: further arguments of the chat template, as vLLM's
            chat_template_kwargs.
        system_messages: merge those that the template does not take where they are, as
            in training; strict = let the template refuse them.

    Raises:
        UserError: the chat template rejects the messages, or they are not UTF-8 text.
    """
    if not tokenizer.has_chat_template:
        if not isinstance(prompt, str):
            prompt = "\n".join(message["content"] for message in prompt)
        return encode_text(tokenizer, prompt)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    prompt = [m | {"content": utf8_text(m["content"])} for m in prompt]
    options = {"enable_thinking": thinking and tokenizer.has_thinking}
    options |= template_kwargs or {}
    chat = Chat(ChatTemplate(tokenizer), name_tool_results(prompt), tools, options)
    if system_messages == "merge":
        merged = merge_system_messages(chat)
        if merged != chat.messages:
            warnings.warn(
                "system messages are merged: the chat template of this model does not "
                "take them where a chat has them",
                stacklevel=2,
            )
        chat = replace(chat, messages=merged)
    try:
        text = chat.render_messages(chat.messages, add_generation_prompt=True)
    except NoTrainableTokens as error:
        raise UserError(
            str(error),
            place=getattr(tokenizer, "name_or_path", None) or "chat_template",
            hint="correct chat_template.jinja, or use --ignore-chat-template",
        ) from error
    return list(tokenizer.encode(text, add_special_tokens=False))


def encode_prompt(
    tokenizer: Any,
    prompt: str | Messages,
    *,
    system: str | None = None,
    thinking: bool = True,
    ignore_chat_template: bool = False,
) -> list[int]:
    """Token ids of a user's text or of a chat, with an optional system message.

    Args:
        thinking: see `encode_chat`.
        ignore_chat_template: encode the text as it is.

    Raises:
        UserError: the chat template rejects the messages.
    """
    if ignore_chat_template:
        assert isinstance(prompt, str), "messages need the chat template"
        return encode_text(tokenizer, prompt)
    if system is None:
        return encode_chat(tokenizer, prompt, thinking=thinking)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    messages = [{"role": "system", "content": system}, *prompt]
    return encode_chat(tokenizer, messages, thinking=thinking)


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of raw text. BOS is not added if the text already starts with it.

    Raises:
        UserError: it is not UTF-8 text.
    """
    text = utf8_text(text)
    bos = tokenizer.bos_token
    has_bos = bos is not None and text.startswith(bos)
    return tokenizer.encode(text, add_special_tokens=not has_bos)


def utf8_text(text: str) -> str:
    """The text, which may come from an argument or a stream of another locale.

    Python keeps bytes that the locale cannot decode as halves of surrogate pairs.

    Raises:
        UserError: it is not UTF-8 text; no tokenizer would take it.
    """
    try:
        return text.encode(errors="surrogateescape").decode()
    except UnicodeError as error:
        raise UserError(
            "the prompt is not UTF-8 text", hint="save or send it as UTF-8"
        ) from error
