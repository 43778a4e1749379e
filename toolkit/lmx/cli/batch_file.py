"""JSONL requests of `lmx generate --input-file`, generated in continuous batches."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..errors import UserError
from ..generation.generator import Generator
from ..generation.prompt import encode_prompt
from ..generation.sampling import Sampling
from ..run.fs import parse_json

KEYS = {
    "prompt": str,
    "messages": list,
    "max_tokens": int,
    "temperature": (int, float),
    "seed": int,
}


def parse_requests(text: str, *, place: str) -> list[dict]:
    """The records of a JSONL file; empty lines are skipped.

    Raises:
        UserError: with the line, or that there is none.
    """
    records = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        position = f"{place}:{number}"
        record = parse_json(line, position)
        if message := _fault(record):
            raise UserError(message, place=position)
        records.append(record | {"place": position})
    if not records:
        raise UserError("there are no requests", place=place)
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
    if record.get("messages") == []:
        return "messages is empty"
    if not all(map(_is_message, record.get("messages", []))):
        return "a message must be an object with the texts role and content"
    if ("prompt" in record) == ("messages" in record):
        return "give either prompt or messages"
    return None


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(name), str) for name in ("role", "content")
    )


def answer_records(
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
    requests = []
    for record in records:
        options = {k: record[k] for k in ("temperature", "seed") if k in record}
        try:
            prompt = encode_prompt(
                generator.tokenizer,
                record["messages"] if "messages" in record else record["prompt"],
                # Messages bring their own system message.
                system=None if "messages" in record else system,
                ignore_chat_template="prompt" in record and ignore_chat_template,
            )
            limit = record.get("max_tokens", max_tokens)
            settings = replace(sampling, **options)
            requests.append(
                generator.request(prompt, max_tokens=limit, sampling=settings)
            )
        except UserError as error:
            raise UserError(error.message, place=record["place"]) from error
    results = generator.generate_all(requests, stop=stop)
    for index, result in enumerate(results):
        yield {
            "index": index,
            "text": result.text,
            "prompt_tokens": result.prompt_tokens,
            "tokens": len(result.tokens),
            "finish_reason": result.finish_reason,
        }
