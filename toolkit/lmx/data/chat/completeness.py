"""Whether the text of a turn holds all that the data says in it.

Some templates print no tool calls, drop reasoning or cut the content. A model that is
trained on such a text learns to leave these out.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

REASONING = ("reasoning_content", "reasoning", "thinking")
# The tags of the chain of thought: those of Qwen and DeepSeek, Seed-OSS, EXAONE,
# Mistral, Cohere, Apertus and Gemma 4.
TAGS = {
    "<think>": "</think>",
    "<seed:think>": "</seed:think>",
    "<thought>": "</thought>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|inner_prefix|>": "<|inner_suffix|>",
    "<|channel>thought": "<channel|>",
}
OPENING, CLOSING = (
    f"(?:{'|'.join(map(re.escape, tags))})" for tags in (TAGS, TAGS.values())
)
TAG = re.compile(f"{OPENING}|{CLOSING}")


def missing_part(message: dict, target: str) -> str | None:
    """What a message of the assistant has and its text has not; None if it has all.

    The content, the reasoning, and the name, keys and values of every tool call must
    be in the text, each in a place of its own.

    Args:
        target: the text of the turn.
    """
    # What must be there: a name for messages, and texts of which one is enough.
    pieces: list[tuple[str, list[str]]] = []
    content = message["content"].strip()
    # Templates write the tags of the chain of thought in their own way.
    for text in [content] if content in target else TAG.split(content):
        if text.strip():
            pieces.append(("content", [text.strip()]))
    if reasoning := reasoning_of(message):
        pieces.append(("reasoning", [reasoning.strip()]))
    for call in message.get("tool_calls") or ():
        function = call["function"]
        pieces.append(("tool_calls", [function["name"]]))
        for value in _leaves(function.get("arguments")):
            # As templates print it: as text, and as JSON.
            forms = [str(value), json.dumps(value, default=str)]
            if isinstance(value, str):
                dumped = (json.dumps(value, ensure_ascii=a) for a in (False, True))
                forms = [text.strip() for text in (value, *(d[1:-1] for d in dumped))]
            if forms[0]:
                pieces.append(("tool_calls", forms))
    # A short piece may be a part of a longer one, which has another place.
    for name, forms in sorted(pieces, key=lambda piece: -len(piece[1][0])):
        form = next((form for form in forms if form in target), None)
        if form is None:
            return name
        target = target.replace(form, "\0", 1)
    return None


def reasoning_of(message: dict) -> str | None:
    """The chain of thought that a message has apart from its content."""
    texts = (message.get(name) for name in REASONING)
    return next((t for t in texts if isinstance(t, str) and t.strip()), None)


def _leaves(value: Any) -> Iterator[Any]:
    """The keys and the values of objects and lists, at any depth."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield key
            yield from _leaves(part)
    elif isinstance(value, list):
        for part in value:
            yield from _leaves(part)
    else:
        yield value
