"""What the text of an answer must be: response formats and forced tool calls."""

import json
from collections.abc import Sequence
from dataclasses import replace
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


def _or_call(
    grammar: Grammar, parameters: ChatCompletionParameters, tokenizer: Any
) -> Grammar:
    """The grammar of an answer, or the mark of a call and any text.

    Raises:
        ApiError: the mark is no token of its own, so an answer may begin like it.
    """
    start = tokenizer.tool_call_start
    mark = start and tokenizer.convert_tokens_to_ids(start)
    if mark not in tokenizer.added_tokens_decoder:
        name = grammar_parameter(parameters)
        message = f"{name} goes with no tools in the format of this model"
        raise ApiError(400, f"{message}: set tool_choice none", param=name)
    return replace(grammar, exit=mark)


def chat_grammar(
    parameters: ChatCompletionParameters, tokenizer: Any
) -> Grammar | None:
    """The grammar of a chat's answer, that of a forced tool call too.

    Raises:
        ApiError: a format or a choice is wrong, or they do not go together.
    """
    grammar = answer_grammar(parameters)
    choice, tools = parameters.tool_choice, parameters.tools or []
    # The functions of which one must be called; None = none must.
    forced: Sequence[dict] | None = None
    if choice not in (None, "none", "auto"):
        if not tools:
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
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
    if forced is None:
        has_both = grammar and tools and choice != "none"
        return _or_call(grammar, parameters, tokenizer) if has_both else grammar
    if parameters.parallel_tool_calls:
        message = "a forced call is one call: set parallel_tool_calls to false"
        raise ApiError(400, message, param="parallel_tool_calls")
    parser = getattr(tokenizer.tool_parser, "__module__", "").rpartition(".")[2]
    if parser != FORCED:
        message = "lmx cannot force calls in the format of this model: use auto or none"
        raise ApiError(400, message, param="tool_choice")
    # A call of one of the functions, in its tags.
    calls = []
    for function in (tool["function"] for tool in forced):
        properties = {
            "name": {"const": function["name"]},
            "arguments": function.get("parameters") or ANY_ARGUMENTS,
        }
        call = {"type": "object", "properties": properties}
        calls.append(call | {"required": [*properties], "additionalProperties": False})
    start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
    tags = json.dumps(f"{start}\n"), json.dumps(f"\n{end}")
    try:
        schema = json.loads(Grammar.json_schema({"anyOf": calls}, "tools").source)
        # Models write calls so, and spaces would be counted.
        source = json.dumps(schema | {"x-guidance": TIGHT})
        rule = f"start: {tags[0]} call {tags[1]}\ncall: %json {source}"
        return Grammar("lark", rule)
    except UserError as error:
        raise ApiError.from_user_error(error, param="tools") from error
