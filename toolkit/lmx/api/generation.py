"""`lmx.generate`: text from a model, one prompt, a chat, a stream or a batch."""

import os
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Literal, TypedDict, Unpack, overload

from ..config.draft import MAX_DRAFT_TOKENS
from ..config.quant_spec import KV_CACHE_BITS
from ..errors import UserError
from ..generation.engine import Generator
from ..generation.outputs import GenerationResponse, GenerationResult
from ..generation.prompt import encode_prompt
from ..generation.requests import generate_requests, make_request
from ..generation.sampling import Sampling
from .model import Model, ModelLike, load

Messages = list[dict[str, str]]
Prompt = str | Messages
Prompts = list[str] | list[Messages]
SAMPLING = [field.name for field in fields(Sampling)]


class GenerateOptions(TypedDict, total=False):
    """Options of `lmx.generate`, named as those of the command `lmx generate`."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    stop: list[str]
    system: str | None
    draft: str | os.PathLike[str] | None
    num_draft_tokens: int | None
    kv_bits: int | None
    ignore_chat_template: bool


@overload
def generate(
    model: Model | ModelLike,
    prompt: Prompt,
    *,
    stream: Literal[False] = False,
    **options: Unpack[GenerateOptions],
) -> GenerationResult: ...


@overload
def generate(
    model: Model | ModelLike,
    prompt: Prompts,
    *,
    stream: Literal[False] = False,
    **options: Unpack[GenerateOptions],
) -> list[GenerationResult]: ...


@overload
def generate(
    model: Model | ModelLike,
    prompt: Prompt,
    *,
    stream: Literal[True],
    **options: Unpack[GenerateOptions],
) -> Iterator[GenerationResponse]: ...


def generate(
    model: Model | ModelLike,
    prompt: Prompt | Prompts,
    *,
    stream: bool = False,
    **options: Unpack[GenerateOptions],
) -> GenerationResult | list[GenerationResult] | Iterator[GenerationResponse]:
    """Generate text. A text is asked as a user's message, with the chat template.

    Args:
        model: a `Model`, or what `lmx.load` takes, which is then loaded in every call.
        prompt: a text; the messages of a chat, [{"role": ..., "content": ...}]; or a
            list of texts or chats, which are generated together.
        stream: yield the tokens of one prompt as they come.
        options: max_tokens (256); temperature (0 = greedy), top_p, top_k, min_p,
            repetition_penalty, presence_penalty, frequency_penalty and seed, see
            `generation.sampling.Sampling`; stop, strings that end the text; system, a
            system message; draft and num_draft_tokens, as in `lmx.load`; kv_bits (2, 4
            or 8 = quantize the KV cache of one prompt, 16 = not; default: as the
            model's config.json says); ignore_chat_template, use the text as it is.

    Returns:
        A result with `text`, `tokens` (ids without the end token), `prompt_tokens`,
        `finish_reason` ("stop" or "length"), `ttft_ms`, `prefill_tokens_per_second` and
        `decode_tokens_per_second`; a list of them for a list of prompts. A stream
        yields chunks with `text`, `token` and, at the end, `finish_reason`.

    Raises:
        UserError: the model does not load, a prompt cannot be encoded or is too long,
            or an option is out of its range.
    """
    settings = _checked(dict(options))
    loaded = model if isinstance(model, Model) else load(model)
    draft, count = settings.pop("draft"), settings.pop("num_draft_tokens")
    kv_bits = settings.pop("kv_bits")
    name = None if draft is None else os.fspath(draft)
    sampling = Sampling(**{k: settings[k] for k in SAMPLING if k in settings})
    max_tokens, stop = settings["max_tokens"], settings["stop"]
    if _is_batch(prompt):
        if stream or name or kv_bits:
            option = "stream" if stream else "draft" if name else "kv_bits"
            raise UserError(f"{option} works with one prompt, not with a list")
        generator = Generator(loaded.module, loaded.tokenizer)
        requests = [
            make_request(generator, tokens, max_tokens, sampling)
            for tokens in (_encode(loaded, each, settings) for each in prompt)
        ]
        return list(generate_requests(generator, requests, stop=stop))
    tokens = _encode(loaded, prompt, settings)
    generator = loaded.generator(name, count, kv_bits=kv_bits, sample=tokens)
    wanted = {"max_tokens": max_tokens, "sampling": sampling, "stop": stop}
    if stream:
        return generator.stream(tokens, **wanted)
    return generator.generate(tokens, **wanted)


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """The options with their defaults.

    Raises:
        UserError: one is unknown or out of its range.
    """
    known = GenerateOptions.__annotations__
    if unknown := [name for name in options if name not in known]:
        raise UserError(
            f"unknown option {unknown[0]!r}", hint=f"available: {', '.join(known)}"
        )
    defaults = dict.fromkeys(("system", "draft", "num_draft_tokens", "kv_bits"))
    defaults |= {"max_tokens": 256, "stop": [], "ignore_chat_template": False}
    options = defaults | options
    if isinstance(options["stop"], str):
        options["stop"] = [options["stop"]]
    count = options["num_draft_tokens"]
    faults = {
        f"max_tokens must be 0 or more, got {options['max_tokens']}": (
            options["max_tokens"] < 0
        ),
        f"kv_bits must be 2, 4, 8 or 16, got {options['kv_bits']}": (
            options["kv_bits"] not in (None, *KV_CACHE_BITS)
        ),
        "a stop string is empty": not all(options["stop"]),
        f"num_draft_tokens must be 1 to {MAX_DRAFT_TOKENS}, got {count}": (
            count is not None and not 1 <= count <= MAX_DRAFT_TOKENS
        ),
        "system needs the chat template: leave out ignore_chat_template": (
            options["ignore_chat_template"] and options["system"] is not None
        ),
    }
    for message, is_fault in faults.items():
        if is_fault:
            raise UserError(message)
    return options


def _is_batch(prompt: Any) -> bool:
    """Whether it is a list of prompts, not one prompt."""
    if not isinstance(prompt, list):
        return False
    return not prompt or not all(isinstance(part, dict) for part in prompt)


def _encode(model: Model, prompt: Any, settings: dict[str, Any]) -> list[int]:
    """The tokens of a text or of messages.

    Raises:
        UserError: it is neither, or the chat template rejects it.
    """
    ignores_template = settings["ignore_chat_template"]
    if isinstance(prompt, list) and ignores_template:
        raise UserError("messages need the chat template")
    if not isinstance(prompt, str) and not (prompt and _is_chat(prompt)):
        raise UserError(
            f"a prompt is a text or a list of messages, got {type(prompt).__name__}",
            hint='a message is {"role": "user", "content": "..."}',
        )
    return encode_prompt(
        model.tokenizer,
        prompt,
        system=settings["system"],
        ignore_chat_template=ignores_template,
    )


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(
        isinstance(message, dict) and "role" in message and "content" in message
        for message in prompt
    )
