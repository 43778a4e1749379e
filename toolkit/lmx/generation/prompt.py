"""A chat or bare text as the tokens a model reads."""

from typing import Any

from ..errors import UserError

Messages = list[dict[str, str]]


def encode_chat(
    tokenizer: Any, prompt: str | Messages, *, thinking: bool = True
) -> list[int]:
    """The tokens of a chat up to where the answer begins.

    Without a chat template, the bare text.

    Args:
        tokenizer: mlx-lm's TokenizerWrapper.
        thinking: let a template that offers the choice open a chain of thought.

    Raises:
        UserError: the template refuses these messages.
    """
    if not tokenizer.has_chat_template:
        text = prompt if isinstance(prompt, str) else _contents(prompt)
        return encode_text(tokenizer, text)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(
            prompt,
            add_generation_prompt=True,
            enable_thinking=thinking and tokenizer.has_thinking,
        )
    except TemplateError as error:
        raise UserError(
            f"the model's chat template refuses these messages: {error}"
        ) from error


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """The tokens of bare text; text that opens with BOS gets no second one."""
    bos = tokenizer.bos_token
    has_bos = bos is not None and text.startswith(bos)
    return tokenizer.encode(text, add_special_tokens=not has_bos)


def _contents(messages: Messages) -> str:
    return "\n".join(message["content"] for message in messages)
