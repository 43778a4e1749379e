"""JSONL requests of `lmx generate --input-file`, generated in continuous batches."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, model_validator

from ..config.validation import FileConfig
from ..errors import UserError
from ..files.json_files import parse_json
from ..generation.generator import Generator
from ..generation.grammar import Grammar, parse_response_format
from ..generation.prompt import encode_prompt
from ..generation.sampling import Sampling
from ..generation.thinking import thinks


class _Message(FileConfig):
    role: str
    content: str


class _Request(FileConfig):
    """A line of the file: a prompt or messages, with options."""

    model_config = ConfigDict(extra="forbid")

    prompt: str = ""
    messages: Annotated[list[_Message], Field(min_length=1)] = []  # noqa: RUF012
    max_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: float = 0.0
    seed: int = 0
    response_format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _require_one_input(self) -> Self:
        if len(self.model_fields_set & {"prompt", "messages"}) != 1:
            raise ValueError("give either prompt or messages")
        return self


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
        _Request.read(record, place=position)
        grammar = parse_response_format(
            record.get("response_format"), f"{position}: response_format"
        )
        records.append(record | {"place": position, "grammar": grammar})
    if not records:
        raise UserError("there are no requests", place=place)
    return records


def answer_records(
    generator: Generator,
    records: Sequence[dict],
    *,
    max_tokens: int,
    sampling: Sampling,
    grammar: Grammar | None = None,
    thinking_budget: int | None = None,
    stop: Sequence[str] = (),
    system: str | None = None,
    ignore_chat_template: bool = False,
) -> Iterator[dict]:
    """Yield the responses in the order of the requests, each as soon as possible.

    Args:
        records: those of `parse_requests`.
        max_tokens, sampling, grammar: defaults for requests without their own.
        thinking_budget: see `Generator.stream`.
        system: system message for requests with a prompt.
        ignore_chat_template: use prompts as they are.

    Raises:
        UserError: a prompt cannot be encoded or is too long, or a grammar is refused.
    """
    requests = []
    for number, record in enumerate(records):
        options = {k: record[k] for k in ("temperature", "seed") if k in record}
        own = record["grammar"] or grammar
        try:
            prompt = encode_prompt(
                generator.tokenizer,
                record["messages"] if "messages" in record else record["prompt"],
                # Messages bring their own system message.
                system=None if "messages" in record else system,
                thinking=thinks(own, thinking_budget),
                ignore_chat_template="prompt" in record and ignore_chat_template,
            )
            limit = record.get("max_tokens", max_tokens)
            settings = replace(sampling.with_seed_offset(number), **options)
            requests.append(
                generator.request(
                    prompt,
                    max_tokens=limit,
                    sampling=settings,
                    grammar=own,
                    thinking_budget=thinking_budget,
                )
            )
        except UserError as error:
            raise UserError(
                error.message, place=record["place"], hint=error.hint
            ) from error
    results = generator.generate_all(requests, stop=stop)
    for index, result in enumerate(results):
        yield {
            "index": index,
            "text": result.text,
            "prompt_tokens": result.prompt_tokens,
            "tokens": len(result.tokens),
            "finish_reason": result.finish_reason,
        }
