"""The channels of Harmony as the states of mlx-lm's parser.

The analysis is a chain of thought, and what calls a function is a call. All other
messages are content: the final one, and those before a call, which users see.
"""

import json
import re
from typing import Any

from ..errors import UserError

RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
START, MESSAGE, END = "<|channel|>commentary to=functions.", "<|message|>", "<|call|>"
HEADER, BODY = "header", "body"
ENDS = ("<|end|>", END, "<|return|>", "<|start|>")
TRANSITIONS = {HEADER: [(MESSAGE, BODY)], BODY: [(mark, HEADER) for mark in ENDS]}


class HarmonyMachine:
    """Splits a completion into its channels, as mlx-lm's TextStateMachine does.

    A state is the name of the channel, the state of mlx-lm's machine of headers and
    bodies, and the header so far. Headers have a name that no message has.

    Args:
        machine: of mlx-lm, with `TRANSITIONS`.
        has_tools: a call without tools is content.
    """

    def __init__(self, machine: Any, *, has_tools: bool):
        self._machine, self._has_tools = machine, has_tools

    def make_state(self, initial: str) -> tuple:
        """The state at the start of a completion, which begins with a header."""
        return HEADER, self._machine.make_state(HEADER), ""

    def split(self, state: tuple, text: str) -> tuple[tuple, list[tuple[str, str]]]:
        """The next state, and the channels with their texts, in order."""
        name, inner, header = state
        inner, parts = self._machine.split(inner, text)
        segments = []
        for kind, part in parts:
            if kind == HEADER:
                header = part if name != HEADER else header + part
                name, part = HEADER, ""
            elif name == HEADER:
                name, head = self._channel(header)
                part = head + part
            segments.append((name, part))
        return (name, inner, header), segments

    def flush(self, state: tuple) -> tuple[tuple, str, str]:
        """The last text, which might have been the beginning of a mark.

        A header without marks is content: the model, or its prompt, has no channels.
        """
        name, inner, header = state
        inner, rest, _ = self._machine.flush(inner)
        text = header + rest
        if name == HEADER and "<|" not in text and text != "<":
            return (name, inner, ""), text, "normal"
        return (name, inner, header), rest, name

    def _channel(self, header: str) -> tuple[str, str]:
        """The state of a message, and the text that begins it."""
        function = RECIPIENT.search(header)
        if function and self._has_tools:
            return "tool", f"{function[1]}{MESSAGE}"
        channels = CHANNEL.findall(header)
        is_thought = channels[-1:] == ["analysis"] and not function
        return "reasoning" if is_thought else "normal", ""


def parse_call(text: str, tools: Any = None) -> dict:
    """The call in a message: the function, a mark, and its arguments as JSON.

    Raises:
        UserError: it is none.
    """
    name, mark, arguments = text.partition(MESSAGE)
    if not mark or not isinstance(values := json.loads(arguments or "{}"), dict):
        raise UserError("no tool call", place="completion")
    return {"name": name, "arguments": values}
