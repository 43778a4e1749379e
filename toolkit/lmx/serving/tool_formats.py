"""Tool calls that mlx-lm has no parser for: JSON, in marks or without.

Llama 3.1 to 3.3 write `{"name": ..., "parameters": {...}}`, several with `;` between.
Granite 3 writes `<|tool_call|>[{"name": ..., "arguments": {...}}]`, and Phi-4-mini the
same with `<|/tool_call|>` after it. gpt-oss calls by a channel; see `harmony`.
"""

import json
from collections.abc import Callable
from typing import Any

from ..errors import UserError
from ..generation.harmony import is_harmony
from . import harmony

BARE = '{"'
"""The start of a call without marks."""
NO_TOOL_FORMAT = (
    "the chat template of this model has no tool calls that lmx knows; models such as "
    "Qwen3, Llama 3.1 and Granite have"
)


def add_tool_format(tokenizer: Any) -> None:
    """Let mlx-lm's tokenizer know the calls of these models by their chat template."""
    if is_harmony(tokenizer):
        # Each of them ends a turn, in whatever config a conversion has.
        ends = tokenizer.convert_tokens_to_ids(["<|return|>", "<|call|>"])
        tokenizer._eos_token_ids.update(ends)
        tokenizer._tool_call_start = harmony.START
        tokenizer._tool_call_end = harmony.END
        tokenizer._tool_parser = harmony.parse_call
        return
    template = tokenizer.chat_template
    if tokenizer.has_tool_calling or not isinstance(template, str):
        return
    if '"parameters": ' in template and "<|start_header_id|>" in template:
        start, end = BARE, ""
    elif "<|tool_call|>" in template and "<|start_of_role|>" in template:
        start, end = "<|tool_call|>", ""
    elif "<|/tool|>" in template and "<|/tool_call|>" in tokenizer.get_vocab():
        start, end = "<|tool_call|>", "<|/tool_call|>"
    else:
        return
    tokenizer._tool_call_start, tokenizer._tool_call_end = start, end
    tokenizer._tool_parser = _parser(start if start == BARE else "")


def _parser(start: str) -> Callable[[str, Any], list[dict]]:
    """A parser as mlx-lm's: it gets the text between the marks.

    Args:
        start: what belongs to the calls of the mark before.
    """
    decoder = json.JSONDecoder()

    def parse(text: str, tools: Any = None) -> list[dict]:
        rest, calls = (start + text).strip(), []
        while rest:
            value, end = decoder.raw_decode(rest)
            calls += value if isinstance(value, list) else [value]
            rest = rest[end:].lstrip(" \n;")
        return [_call(call) for call in calls]

    return parse


def _call(value: Any) -> dict:
    """The name and the arguments of a call.

    Raises:
        UserError: it is none.
    """
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        arguments = value.get("arguments", value.get("parameters"))
        if isinstance(arguments, dict):
            return {"name": value["name"], "arguments": arguments}
    raise UserError("no tool call", place="completion")
