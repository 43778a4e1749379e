"""JSONL requests of `lmx generate --input-file`, generated in continuous batches."""

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
    """A request and its output so far."""

    index: int
    request: GenerationRequest
    detokenizer: StreamingDetokenizer
    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None

    def to_json(self) -> dict:
        """The response."""
        return {
            "index": self.index,
            "text": self.text,
            "prompt_tokens": len(self.request.prompt),
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
        }

    def add(self, token: int, is_last: bool, batcher: BatchGenerator) -> None:
        """Append a token; a stop string ends the request early."""
        if self.finish_reason:
            return
        text, self.finish_reason = self.detokenizer.add(token, last=is_last)
        self.text += text
        self.tokens += token not in self.request.stop_tokens
        if self.finish_reason:
            batcher.cancel(self.request)


def parse_requests(text: str, *, place: str) -> list[dict]:
    """The records of a JSONL file; empty lines are skipped.

    Raises:
        UserError: with the line.
    """
    records = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        position = f"{place}:{number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError(f"not JSON: {error}", place=position) from error
        if message := _fault(record):
            raise UserError(message, place=position)
        records.append(record | {"place": position})
    return records


def _fault(record: Any) -> str | None:
    if not isinstance(record, dict):
        return "a request must be an object"
    for name, value in record.items():
        if name not in KEYS:
            return f"unknown key {name!r}; a request has {', '.join(KEYS)}"
        if not isinstance(value, KEYS[name]) or isinstance(value, bool):
            return f"{name} has the wrong type: {value!r}"
    if record.get("max_tokens", 0) < 0:
        return "max_tokens must be 0 or more"
    if not all(map(_is_message, record.get("messages", []))):
        return "a message must be an object with the texts role and content"
    if ("prompt" in record) == ("messages" in record):
        return "give either prompt or messages"
    return None


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(name), str) for name in ("role", "content")
    )


def generate_requests(
    generator: Generator,
    records: Sequence[dict],
    *,
    max_tokens: int,
    sampling: Sampling,
    stop: Sequence[str] = (),
    system: str | None = None,
    ignore_chat_template: bool = False,
) -> Iterator[dict]:
    """Yield the responses in the order of the requests, each as soon as possible.

    Args:
        records: those of `parse_requests`.
        max_tokens, sampling: defaults for requests without their own.
        system: system message for requests with a prompt.
        ignore_chat_template: use prompts as they are.

    Raises:
        UserError: a prompt cannot be encoded or is too long.
    """
    batcher = BatchGenerator(
        generator.model, prefill_step_size=generator.prefill_step_size
    )
    stop_tokens = generator.resolve_stop_tokens(None)
    pending: list[BatchRequest] = []
    by_request: dict[GenerationRequest, BatchRequest] = {}
    for index, record in enumerate(records):
        options = {k: record[k] for k in ("temperature", "seed") if k in record}
        try:
            prompt = _encode(generator, record, system, ignore_chat_template)
            limit = record.get("max_tokens", max_tokens)
            count = generator.clamp_max_tokens(prompt, limit)
            settings = replace(sampling, **options)
            request = GenerationRequest(prompt, count, settings, stop_tokens)
        except UserError as error:
            raise UserError(error.message, place=record["place"]) from error
        detokenizer = StreamingDetokenizer(generator.tokenizer, stop_tokens, stop)
        pending.append(BatchRequest(index, request, detokenizer))
        by_request[request] = pending[-1]
        batcher.submit(request)
        if count <= 0:
            pending[-1].finish_reason = "length"
    pending.reverse()
    while pending:
        while pending and pending[-1].finish_reason:
            yield pending.pop().to_json()
        for request, token, is_last in batcher.step():
            by_request[request].add(token, is_last, batcher)


def _encode(
    generator: Generator, record: dict, system: str | None, ignore_chat_template: bool
) -> list[int]:
    if "messages" in record:
        return generator.encode_chat(record["messages"])
    if ignore_chat_template:
        return generator.encode_text(record["prompt"])
    messages = [{"role": "user", "content": record["prompt"]}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return generator.encode_chat(messages)
