"""What the text of an answer must be: response formats and forced tool calls."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..errors import UserError
from ..generation.grammar import Grammar, parse_response_format
from ..generation.harmony import is_harmony
from ..generation.lark_grammar import LOOSE, TIGHT
from .errors import ApiError
from .harmony import RECIPIENT
from .protocol import ChatCompletionParameters, GenerationParameters
from .tool_formats import BARE, NO_TOOL_FORMAT

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


def _call_rules(tokenizer: Any, tools: Sequence[dict]) -> str | None:
    """Rules of a Lark grammar for a call of one of the functions; None = the model
    writes calls in another format than JSON.

    Raises:
        UserError: the parameters of a function are refused.
    """
    rules = [f"call: {' | '.join(f'call{n}' for n in range(len(tools)))}"]
    for number, function in enumerate(tool["function"] for tool in tools):
        name, parameters = function["name"], function.get("parameters")
        # Each schema has a root of its own, to which its references lead.
        grammar = Grammar.json_schema(parameters or ANY_ARGUMENTS, f"tools.{name}")
        around = _around_arguments(tokenizer, name)
        if around is None:
            return None
        # Models write calls so, and spaces would be counted.
        source = json.dumps(json.loads(grammar.source) | {"x-guidance": TIGHT})
        before, after = around
        rules.append(f"call{number}: {before} args{number} {after}")
        rules.append(f"args{number}: %json {source}")
    return "\n".join(rules)


def _around_arguments(tokenizer: Any, name: str) -> tuple[str, str] | None:
    """Terms before and after the arguments of a call; None = they are not JSON.

    Raises:
        UserError: the model cannot write the name.
    """
    start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
    mark = partial(_mark, tokenizer)
    if is_harmony(tokenizer):
        if not RECIPIENT.fullmatch(f"to=functions.{name}"):
            raise UserError(f"no name of a function in a header of Harmony: {name!r}")
        header = f"{mark('<|channel|>')} {_text(f'commentary to=functions.{name} ')}"
        body = f"{mark('<|constrain|>')} {_text('json')} {mark('<|message|>')}"
        return f"{mark('<|start|>')} {_text('assistant')} {header} {body}", ""
    key = "parameters" if start == BARE else "arguments"
    before = _text(f'{{"name": {_text(name)}, "{key}": ')
    if start == BARE:
        return before, '"}"'
    parser = getattr(tokenizer.tool_parser, "__module__", "").rpartition(".")[2]
    if parser == FORCED:
        return f'{mark(start)} "\\n" {before}', f'"}}" "\\n" {mark(end)}'
    return None


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _mark(tokenizer: Any, text: str) -> str:
    """The term of a mark. llguidance takes no token such as <tool_call> for text."""
    token = tokenizer.get_vocab().get(text)
    return _text(text) if token is None else f"<[{token}]>"


def _or_call(
    grammar: Grammar, parameters: ChatCompletionParameters, tokenizer: Any
) -> Grammar:
    """The grammar of an answer, or the mark of a call and any text.

    Raises:
        ApiError: the mark is no token of its own, so an answer may begin like it.
        UserError: the parameters of a function are refused.
    """
    if is_harmony(tokenizer):
        return replace(grammar, message="either")
    start = tokenizer.tool_call_start
    if start == BARE and grammar.kind == "json_schema":
        rules = _call_rules(tokenizer, parameters.tools)
        source = json.dumps(json.loads(grammar.source) | {"x-guidance": LOOSE})
        text = f"start: answer | call\nanswer: %json {source}\n{rules}"
        return Grammar("lark", text)
    # Not `convert_tokens_to_ids`: a text that is no token is the unknown token there.
    mark = tokenizer.get_vocab().get(start)
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
    if forced is None and not (grammar and tools and choice != "none"):
        return grammar
    try:
        if forced is None:
            return _or_call(grammar, parameters, tokenizer)
        if rules := _call_rules(tokenizer, forced):
            return Grammar("lark", f"start: call\n{rules}", message="call")
    except UserError as error:
        raise ApiError.from_user_error(error, param="tools") from error
    message = "lmx cannot force calls in the format of this model: use auto or none"
    if not tokenizer.has_tool_calling:
        message = NO_TOOL_FORMAT
    raise ApiError(400, message, param="tool_choice")
