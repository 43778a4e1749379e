"""The prompts of requests: messages, text or tokens, as token ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..data.chat.messages import KEYS, BadRecord, parse_turn, require_text
from ..data.chat.rendering import ChatTemplate
from ..errors import UserError
from ..generation.prompt import SystemMessages, encode_chat, encode_text
from ..generation.sequence import GenerationRequest, TokenOutput
from ..generation.text_stream import TextStream
from ..generation.thinking import opens_reasoning
from .errors import ApiError
from .protocol import ChatCompletionParameters, CompletionParameters
from .tool_formats import NO_TOOL_FORMAT

ECHOED = {"refusal", "annotations", "audio"}
"""Keys of OpenAI's answers, which clients send back empty with the next turn."""
NOTES = {"cache_control", "provider_specific_fields", "reasoning_details"}
"""Keys that clients add to messages, and that say nothing beside the others."""
RESERVED = {
    *("conversation", "messages", "tools", "documents", "chat_template", "tokenize"),
    *("add_generation_prompt", "continue_final_message", "padding", "truncation"),
    *("max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
    *("return_assistant_tokens_mask",),
}
"""Arguments of `apply_chat_template` that are no variables of the template."""


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt.

    Attributes:
        in_reasoning: whether it ends inside the chain of thought.
        thinks: whether it asks for a chain of thought, if the model has one.
        echo: its text, if the answer begins with it.
        offsets: where each token begins in this text, if they are scored.
    """

    tokens: list[int]
    in_reasoning: bool = False
    thinks: bool = True
    echo: str | None = None
    offsets: Sequence[int] = ()


def require_length(
    parameters: ChatCompletionParameters | CompletionParameters, most: int | None
) -> int:
    """The characters of all prompts of a request, before they are encoded.

    Args:
        most: characters of a prompt; None = no limit.

    Raises:
        ApiError: a prompt has more.
    """
    if isinstance(parameters, CompletionParameters):
        sizes = [
            len(prompt) for prompt in parameters.prompts if isinstance(prompt, str)
        ]
    else:
        sizes = [sum(len(str(m.get("content"))) for m in parameters.messages)]
    if most is not None and max(sizes, default=0) > most:
        message = f"the prompt has {max(sizes):,} characters, and at most {most:,} fit"
        place, code = parameters.PROMPT, "context_length_exceeded"
        raise ApiError(400, message, param=place, code=code)
    return sum(sizes)


def encode_messages(
    tokenizer: Any,
    parameters: ChatCompletionParameters,
    tools: Sequence[dict] | None,
    *,
    system_messages: SystemMessages = "merge",
) -> EncodedPrompt:
    """The prompt of a chat.

    Args:
        tools: those of `checked_tools`.
        system_messages: see `encode_chat`.

    Raises:
        ApiError: a message or an argument of the template is wrong.
    """
    template = ChatTemplate(tokenizer)
    messages = []
    for index, given in enumerate(parameters.messages):
        place = f"messages[{index}]"
        message = {
            key: value
            for key, value in given.items()
            if value is not None and key not in NOTES and (value or key not in ECHOED)
        }
        for key in message:
            if key not in KEYS and template.unknown([key]):
                text = f"Unrecognized request argument supplied: {place}.{key}"
                param, code = f"{place}.{key}", "unknown_parameter"
                raise ApiError(400, text, param=param, code=code)
        if "role" not in message:
            raise ApiError(400, f"{place}: role is missing", param=f"{place}.role")
        try:
            messages.append(parse_turn(message, index + 1))
        except BadRecord as error:
            raise ApiError(400, str(error), param=place) from None
    if tools and not tokenizer.has_tool_calling:
        raise ApiError(400, NO_TOOL_FORMAT, param="tools")
    options = dict(parameters.chat_template_kwargs or {})
    if parameters.reasoning_effort is not None:
        options = _with_effort(template, options, parameters.reasoning_effort)
    reserved = next((name for name in options if name in RESERVED), None)
    if name := reserved or template.unknown(options):
        message = f"the chat template of this model has no {name}"
        raise ApiError(400, message, param=name, code="unknown_parameter")
    try:
        tokens = encode_chat(
            tokenizer,
            messages,
            tools=tools,
            template_kwargs=options,
            system_messages=system_messages,
        )
    except UserError as error:
        raise ApiError.from_user_error(error, param="messages") from error
    thinks = all(options.get(name) is not False for name in template.switches)
    return EncodedPrompt(tokens, opens_reasoning(tokenizer, tokens), thinks)


def encode_prompts(
    tokenizer: Any, parameters: CompletionParameters
) -> list[EncodedPrompt]:
    """The prompts of a completion.

    Raises:
        ApiError: one is no text, or empty.
    """
    prompts = []
    for prompt in parameters.prompts:
        tokens, text = prompt, prompt
        if isinstance(prompt, str):
            try:
                tokens = encode_text(tokenizer, prompt)
            except UserError as error:
                raise ApiError.from_user_error(error, param="prompt") from error
        elif parameters.echo:
            text = tokenizer.decode(prompt)
        if not parameters.echo:
            prompts.append(EncodedPrompt(tokens))
            continue
        offsets = ()
        if parameters.logprobs is not None:
            offsets = _offsets(tokenizer, tokens, text)
        prompts.append(EncodedPrompt(tokens, echo=text, offsets=offsets))
    return prompts


def _offsets(tokenizer: Any, tokens: Sequence[int], text: str) -> list[int]:
    """Where each token begins in its text. Tokens before a text are no part of it."""
    added = 0
    if [*tokens[:1]] == [tokenizer.bos_token_id]:
        added = not text.startswith(tokenizer.bos_token)
    request = GenerationRequest([])
    stream, offsets = TextStream(tokenizer, request), [0] * added
    for token in tokens[added:]:
        offsets.append(min(stream.length, len(text)))
        stream.add(TokenOutput(request, token, False))
    return offsets


def _with_effort(template: ChatTemplate, options: dict, effort: str) -> dict:
    """The arguments of a template, for an effort of reasoning: its own argument where
    it has one, else its switch of the chain of thought."""
    if not template.unknown(["reasoning_effort"]):
        return {"reasoning_effort": effort} | options
    return dict.fromkeys(template.switches, effort != "none") | options


def checked_tools(parameters: ChatCompletionParameters) -> list[dict] | None:
    """The functions that the assistant may call.

    Raises:
        ApiError: one is no function with a name.
    """
    for index, tool in enumerate(parameters.tools or []):
        place = f"tools[{index}]"
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            message = f'{place} is no {{"type": "function", "function": ...}}'
            raise ApiError(400, message, param=place)
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise ApiError(400, f"{place}.function has no name", param=place)
        if not isinstance(function.get("parameters") or {}, dict):
            message = f"{place}.function.parameters is no JSON schema"
            raise ApiError(400, message, param=place)
        try:
            require_text(tool, place)
        except BadRecord as error:
            raise ApiError(400, str(error), param=place) from None
    return parameters.tools if parameters.tool_choice != "none" else None
