"""Prompts of a JSONL file, answered together, one JSON line for every row."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import UserError
from ..generation.batching import BatchGenerator, GenerationRequest
from ..generation.detokenizer import StreamingDetokenizer
from ..generation.engine import Generator
from ..generation.sampling import Sampling

KEYS = {
    "prompt": str,
    "messages": list,
    "max_tokens": int,
    "temperature": (int, float),
    "seed": int,
}


@dataclass(eq=False)
class BatchRequest:
    """A request and its answer so far."""

    index: int
    request: GenerationRequest
    spoken: StreamingDetokenizer
    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None

    def to_json(self) -> dict:
        """The answer."""
        return {
            "index": self.index,
            "text": self.text,
            "prompt_tokens": len(self.request.prompt),
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
        }


def parse_requests(text: str, *, place: str) -> list[dict]:
    """The rows of a JSONL file; empty lines are none.

    Raises:
        UserError: naming the line.
    """
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(
                f"this is not JSON: {error}", place=f"{place}:{number}"
            ) from error
        if fault := _fault(row):
            raise UserError(fault, place=f"{place}:{number}")
        rows.append(row | {"place": f"{place}:{number}"})
    return rows


def _fault(row: Any) -> str | None:
    if not isinstance(row, dict):
        return "a row is an object"
    for name, value in row.items():
        if name not in KEYS:
            return f"unknown key {name!r}; a row has {', '.join(KEYS)}"
        if not isinstance(value, KEYS[name]) or isinstance(value, bool):
            return f"{name} is {value!r}"
    if row.get("max_tokens", 0) < 0:
        return "max_tokens must be 0 or more"
    if not all(map(_is_message, row.get("messages", []))):
        return "a message is an object with a role and a content, both texts"
    if ("prompt" in row) == ("messages" in row):
        return "give either prompt or messages"
    return None


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(name), str) for name in ("role", "content")
    )


def generate_requests(
    generator: Generator,
    rows: Sequence[dict],
    *,
    max_tokens: int,
    sampling: Sampling,
    stop: Sequence[str] = (),
    system: str | None = None,
    raw: bool = False,
) -> Iterator[dict]:
    """Answer rows of `parse`; each comes when it and all before it are finished.

    Args:
        max_tokens, sampling: of rows that do not say otherwise.
        system: of rows with a prompt.
        raw: continue prompts, without a chat template.

    Raises:
        UserError: a prompt that the model cannot read.
    """
    batcher = BatchGenerator(
        generator.model, prefill_step_size=generator.prefill_step_size
    )
    ends, pending, waiting = generator.resolve_stop_tokens(None), [], {}
    for index, row in enumerate(rows):
        own = {name: row[name] for name in ("temperature", "seed") if name in row}
        try:
            prompt = _encoded(generator, row, system, raw)
            count = generator.clamp_max_tokens(
                prompt, row.get("max_tokens", max_tokens)
            )
            request = GenerationRequest(prompt, count, replace(sampling, **own), ends)
        except UserError as error:
            raise UserError(error.message, place=row["place"]) from error
        spoken = StreamingDetokenizer(generator.tokenizer, ends, stop)
        pending.append(BatchRequest(index, request, spoken))
        waiting[request] = pending[-1]
        batcher.submit(request)
        if count <= 0:
            pending[-1].finish_reason = "length"
    pending.reverse()
    while pending:
        while pending and pending[-1].finish_reason:
            yield pending.pop().to_json()
        for request, token, last in batcher.step():
            _take(waiting[request], token, last, batcher)


def _take(row: BatchRequest, token: int, last: bool, batcher: BatchGenerator) -> None:
    if row.finish_reason:
        return
    text, row.finish_reason = row.spoken.add(token, last=last)
    row.text += text
    row.tokens += token not in row.request.stop_tokens
    if row.finish_reason:
        batcher.cancel(row.request)


def _encoded(
    generator: Generator, row: dict, system: str | None, raw: bool
) -> list[int]:
    if "messages" in row:
        return generator.encode_chat(row["messages"])
    if raw:
        return generator.encode_text(row["prompt"])
    messages = [{"role": "user", "content": row["prompt"]}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return generator.encode_chat(messages)
