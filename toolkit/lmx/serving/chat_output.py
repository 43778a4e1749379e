"""The text of an assistant as content, chain of thought and tool calls."""

import json
import uuid
from collections.abc import Sequence
from typing import Any

from ..errors import UserError, library_errors
from ..generation.harmony import is_harmony
from .harmony import TRANSITIONS, HarmonyMachine
from .tool_arguments import TEXT_FORMATS, texts_only, typed

FIELDS = {"normal": "content", "reasoning": "reasoning_content"}
"""The field of a message for every state of mlx-lm's parser; others are not shown."""
TOOL = "tool"


class ChatOutputParser:
    """Reads a completion with mlx-lm's markers of the model, as it comes.

    Args:
        tokenizer: mlx-lm's TokenizerWrapper.
        tools: JSON schemas of the functions that may be called; without any, a call is
            text.
        in_reasoning: whether the prompt ends inside the chain of thought.

    Attributes:
        calls: how many calls were complete.
    """

    def __init__(
        self, tokenizer: Any, tools: Sequence[dict] | None, *, in_reasoning: bool
    ):
        from mlx_lm.generate import TextStateMachine, make_text_state_machine

        self._tokenizer, self._tools = tokenizer, tools
        initial = "reasoning" if in_reasoning else "normal"
        if is_harmony(tokenizer):
            machine = TextStateMachine(TRANSITIONS)
            self._machine = HarmonyMachine(machine, has_tools=bool(tools))
        else:
            marked = tokenizer if tools else _WithoutTools(tokenizer)
            self._machine = make_text_state_machine(marked)
        self._state = self._machine.make_state(
            tokenizer.response_initial_state or initial
        )
        self._call: str | None = None
        self.calls = 0

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text belongs to the chain of thought."""
        return self._state[0] == "reasoning"

    def add_text(self, text: str, *, last: bool, cut: bool = False) -> list[dict]:
        """The fields of a message that some more text gives, in their order.

        Args:
            last: whether the completion ends here.
            cut: whether it ends by a limit or a stop string. A call that has begun is
                text then: some parsers take the half of a call for a whole one.
        """
        self._state, segments = self._machine.split(self._state, text)
        if last:
            self._state, rest, name = self._machine.flush(self._state)
            segments.append((name, rest))
        fields: list[dict] = []
        for name, part in segments:
            if name == TOOL:
                self._call = (self._call or "") + part
                continue
            if self._call is not None:
                fields += self._finish_call()
            if part and name in FIELDS:
                fields.append({FIELDS[name]: part})
        if last and self._call is not None:
            is_open = bool(self._tokenizer.tool_call_end)
            fields += self._finish_call(is_open=is_open, is_cut=is_open and cut)
        # Neighbours of the same name are one.
        joined: list[dict] = []
        for field in fields:
            if joined and joined[-1].keys() == field.keys():
                (name,) = field
                joined[-1] = {name: joined[-1][name] + field[name]}
            else:
                joined.append(field)
        return joined

    def _finish_call(
        self, *, is_open: bool = False, is_cut: bool = False
    ) -> list[dict]:
        """The calls in the text between the markers; the text itself if it has none.

        Args:
            is_open: the marker of the end has not come.
        """
        text, self._call = self._call, None
        start, end = self._tokenizer.tool_call_start, self._tokenizer.tool_call_end
        as_text = [{"content": start + text + ("" if is_open else end or "")}]
        if is_cut:
            return as_text
        try:
            # The parsers fail in many ways when the model has written no call.
            with library_errors("no tool call", place="completion"):
                parser, tools = self._tokenizer.tool_parser, self._tools or []
                module = getattr(parser, "__module__", "").rpartition(".")[2]
                has_texts = module in TEXT_FORMATS
                calls = parser(text, texts_only(tools) if has_texts else tools)
                calls = calls if isinstance(calls, list) else [calls]
                functions = []
                for call in calls:
                    arguments = call.get("arguments") or {}
                    if has_texts:
                        arguments = typed(call["name"], arguments, tools)
                    if not isinstance(arguments, str):
                        arguments = json.dumps(
                            arguments, ensure_ascii=False, allow_nan=False
                        )
                    functions.append({"name": call["name"], "arguments": arguments})
        except UserError:
            return as_text
        fields = []
        for call, function in zip(calls, functions, strict=True):
            name = call.get("id") or f"call_{uuid.uuid4().hex[:24]}"
            head = {"index": self.calls, "id": name, "type": "function"}
            fields.append({"tool_calls": [head | {"function": function}]})
            self.calls += 1
        return fields


class _WithoutTools:
    """A tokenizer whose markers of tool calls are text."""

    has_tool_calling = False

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
