"""What the text of an answer must be: response formats and forced tool calls."""

import json
from collections.abc import Sequence
from typing import Any

from ..errors import UserError
from ..generation.grammar import Grammar, parse_response_format
from ..generation.lark_grammar import TIGHT
from .errors import ApiError
from .protocol import ChatCompletionParameters, GenerationParameters

ANY_ARGUMENTS = {"type": "object"}
FORCED = "json_tools"
"""mlx-lm's format of tool calls that a grammar can force: a JSON object in tags."""


FORMATS = ("response_format", "structured_outputs")


def answer_grammar(parameters: GenerationParameters) -> Grammar | None:
    """The grammar of `response_format` or `structured_outputs`; None = free text.

    Raises:
        ApiError: it is wrong, or both are given.
    """
    formats = {
        name: value
        for name in FORMATS
        if (value := getattr(parameters, name)) is not None
    }
    if len(formats) > 1:
        message = "give either response_format or structured_outputs"
        raise ApiError(400, message, param="structured_outputs")
    for name, value in formats.items():
        try:
            return parse_response_format(value, name)
        except UserError as error:
            raise ApiError.from_user_error(error, param=name) from error
    return None


def grammar_parameter(parameters: GenerationParameters) -> str:
    """The parameter that a grammar of these comes from."""
    given = (name for name in FORMATS if getattr(parameters, name) is not None)
    return next(given, "tool_choice")


def chat_grammar(
    parameters: ChatCompletionParameters, tokenizer: Any
) -> Grammar | None:
    """The grammar of a chat's answer: a format, a forced tool call, or one of both.

    Raises:
        ApiError: a format or a choice is wrong, or they do not go together.
    """
    grammar = answer_grammar(parameters)
    choice, tools = parameters.tool_choice, parameters.tools or []
    # The functions of which one must be called; None = none must.
    forced: Sequence[dict] | None = None
    if choice not in (None, "none") and not tools:
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
    if choice not in (None, "none", "auto"):
        function = choice.get("function") if isinstance(choice, dict) else None
        has_name = isinstance(function, dict) and choice.get("type") == "function"
        name = function.get("name") if has_name else None
        forced = [
            tool
            for tool in tools
            if choice == "required" or tool["function"]["name"] == name
        ]
        if not forced:
            message = (
                "tool_choice is none of none, auto, required, or a function of tools "
                'as {"type": "function", "function": {"name": ...}}'
            )
            raise ApiError(400, message, param="tool_choice")
    if choice == "none" or not (forced or (grammar and tools)):
        return grammar
    try:
        if forced:
            # A call has no other format: that of answers waits for another turn.
            return Grammar("lark", f"start: call\n{_calls(forced, tokenizer)}")
        if grammar.kind != "json_schema":
            name = grammar_parameter(parameters)
            message = f"beside tools, {name} is JSON: set tool_choice none"
            raise ApiError(400, message, param=name)
        more = "" if parameters.parallel_tool_calls is False else ' ("\\n"? call)*'
        start = f"start: answer | call{more}\nanswer: %json {grammar.source}"
        return Grammar("lark", f"{start}\n{_calls(tools, tokenizer)}")
    except UserError as error:
        raise ApiError.from_user_error(error, param="tools") from error


def _calls(tools: Sequence[dict], tokenizer: Any) -> str:
    """Rules of a grammar: `call`, of one of the functions, in its tags.

    Raises:
        UserError: a keyword of a schema is not supported.
        ApiError: calls in the format of this model have no grammar.
    """
    parser = getattr(tokenizer.tool_parser, "__module__", "").rpartition(".")[2]
    if parser != FORCED:
        message = (
            "lmx cannot force calls in the format of this model, nor offer them beside "
            "response_format: use one of both, with auto or none"
        )
        raise ApiError(400, message, param="tool_choice")
    # llguidance takes no token such as <tool_call> for its text.
    start, end = (
        f"<[{token}]>" if (token := tokens.get(tag)) is not None else json.dumps(tag)
        for tokens in [tokenizer.get_vocab()]
        for tag in (tokenizer.tool_call_start, tokenizer.tool_call_end)
    )
    names = " | ".join(f"call{index}" for index in range(len(tools)))
    rules = [f'call: {start} "\\n" ({names}) "\\n" {end}']
    for index, function in enumerate(tool["function"] for tool in tools):
        schema = function.get("parameters") or ANY_ARGUMENTS
        Grammar.json_schema(schema, f"tools[{index}].function.parameters")
        # Models write calls so, and spaces would be counted. Each schema has a rule of
        # its own, as it may refer to its root.
        name = json.dumps(function["name"], ensure_ascii=False)
        head = json.dumps(f'{{"name": {name}, "arguments": ')
        arguments = json.dumps(schema | {"x-guidance": TIGHT})
        rules.append(f'call{index}: {head} arguments{index} "}}"')
        rules.append(f"arguments{index}: %json {arguments}")
    return "\n".join(rules)
