"""What the text of an answer must be: response formats and forced tool calls."""

import json
from collections.abc import Sequence
from typing import Any

from ..errors import UserError
from ..generation.grammar import Grammar, parse_response_format
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
            raise ApiError.of(error, param=name) from error
    return None


def grammar_parameter(parameters: GenerationParameters) -> str:
    """The parameter that a grammar of these comes from."""
    given = (name for name in FORMATS if getattr(parameters, name) is not None)
    return next(given, "tool_choice")


def chat_grammar(
    parameters: ChatCompletionParameters, tokenizer: Any
) -> Grammar | None:
    """The grammar of a chat's answer, that of a forced tool call too.

    Raises:
        ApiError: a format or a choice is wrong, or they do not go together.
    """
    grammar = answer_grammar(parameters)
    forced = _forced_tools(parameters)
    if grammar and parameters.tools and parameters.tool_choice != "none":
        name = grammar_parameter(parameters)
        message = f"{name} leaves no room for tool calls: set tool_choice none"
        raise ApiError(400, message, param=name)
    if forced is None:
        return grammar
    if parameters.parallel_tool_calls:
        message = "a forced call is one call: set parallel_tool_calls to false"
        raise ApiError(400, message, param="parallel_tool_calls")
    parser = getattr(tokenizer.tool_parser, "__module__", "").rpartition(".")[2]
    if parser != FORCED:
        message = "lmx cannot force calls in the format of this model: use auto or none"
        raise ApiError(400, message, param="tool_choice")
    try:
        return _call_grammar(forced, tokenizer)
    except UserError as error:
        raise ApiError.of(error, param="tools") from error


def _call_grammar(tools: Sequence[dict], tokenizer: Any) -> Grammar:
    """A call of one of the functions, in its tags."""
    start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
    calls = {"anyOf": [_call_schema(tool) for tool in tools]}
    schema = Grammar.json_schema(calls, "tools").source
    tags = json.dumps(f"{start}\n"), json.dumps(f"\n{end}")
    return Grammar("lark", f"start: {tags[0]} call {tags[1]}\ncall: %json {schema}")


def _forced_tools(parameters: ChatCompletionParameters) -> Sequence[dict] | None:
    """The functions of which one must be called; None = none must."""
    choice, tools = parameters.tool_choice, parameters.tools or []
    if choice in (None, "none", "auto"):
        return None
    if not tools:
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
    if choice == "required":
        return tools
    name = None
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
    chosen = [tool for tool in tools if tool["function"]["name"] == name]
    if not chosen:
        message = (
            "tool_choice is none of none, auto, required, or a function of tools as "
            '{"type": "function", "function": {"name": ...}}'
        )
        raise ApiError(400, message, param="tool_choice")
    return chosen


def _call_schema(tool: dict) -> dict:
    function = tool["function"]
    properties = {
        "name": {"const": function["name"]},
        "arguments": function.get("parameters") or ANY_ARGUMENTS,
    }
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
