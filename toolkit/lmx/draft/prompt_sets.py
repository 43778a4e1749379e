"""What a draft is tried on: held-out prompts by their kind, and some to be copied.

How many guesses stand depends on what is written more than on anything else, so a draft
is told of by suites: chats, texts that go on (of code, where the rows are code), and
copying, where what is to be said stands in the prompt, as in edits.
"""

from collections.abc import Iterable
from typing import Any

from ..data.record_formats import DataRecord
from ..generation.prompt import encode_chat, encode_text
from .dataset import Prompt, prompt_from_row, select_prompts

CHAT, TEXT, COPYING = "chat", "text", "copying"
AGAIN = "Say that again."

PromptSets = dict[str, list[Prompt]]


def prompt_sets(
    rows: Iterable[DataRecord], tokenizer: Any, *, count: int, longest: int
) -> PromptSets:
    """The first prompts of every kind that the rows have, and copying.

    Args:
        count: of all suites together, which share it; at least one of each.
        longest: tokens; longer prompts are left out.
    """
    found: PromptSets = {CHAT: [], TEXT: [], COPYING: []}
    for row in rows:
        asks = {CHAT if row.text is None else TEXT: prompt_from_row, COPYING: _copied}
        for kind, ask in asks.items():
            if len(found[kind]) < count:
                found[kind] += select_prompts(
                    [row], tokenizer, count=1, longest=longest, ask=ask
                )
    kept = {kind: own for kind, own in found.items() if own}
    return {kind: own[: max(1, count // len(kept))] for kind, own in kept.items()}


def _copied(row: DataRecord, tokenizer: Any) -> list[int]:
    """A prompt that has all of what is to be said."""
    if row.text is not None:
        # The half that is the prompt elsewhere, and half of it again.
        half = row.text[: len(row.text) // 2]
        return encode_text(tokenizer, f"{half}\n{half[: len(half) // 2]}")
    turns = row.messages or (
        {"role": "user", "content": row.prompt},
        {"role": "assistant", "content": row.completion},
    )
    said = [n for n, turn in enumerate(turns) if turn["role"] == "assistant"]
    if not turns[said[-1]]["content"]:
        # It calls a tool, and there is nothing to say again.
        return []
    again = {"role": "user", "content": AGAIN}
    return encode_chat(tokenizer, [*turns[: said[-1] + 1], again])
