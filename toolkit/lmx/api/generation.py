"""`lmx.generate`: text from a model, one prompt, a chat, a stream or a batch."""

import os
from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated, Any, Literal, Unpack, overload

from pydantic import AfterValidator, Field

# That of Python 3.11 cannot be checked.
from typing_extensions import TypedDict

from ..config.draft import MAX_DRAFT_TOKENS
from ..config.quant_spec import MIN_KV_SIZE, KVCacheBits, KVPolicy
from ..errors import UserError
from ..generation.grammar import parse_response_format
from ..generation.kv_cache.eviction import kv_limit
from ..generation.outputs import GenerationResponse, GenerationResult
from ..generation.prompt import encode_prompt
from ..generation.sampling import Sampling
from ..generation.thinking import thinks
from .arguments import STRICT, Integer, PathLike, checked
from .model import Model, ModelLike, load


def _message(message: dict[str, Any]) -> dict[str, Any]:
    if missing := {"role", "content"} - message.keys():
        raise ValueError(f"a message needs {' and '.join(sorted(missing))}")
    return message


Messages = Annotated[
    list[Annotated[dict[str, Any], AfterValidator(_message)]], Field(min_length=1)
]
Prompt = str | Messages
Prompts = list[str] | list[Messages]
SAMPLING = [field.name for field in fields(Sampling)]
DEFAULTS: dict[str, Any] = {
    **{"max_tokens": 256, "stop": [], "system": None, "draft": None, "kv_bits": None},
    **{"num_draft_tokens": None, "ignore_chat_template": False},
    **{"max_kv_size": None, "kv_policy": None},
    **{"response_format": None, "thinking_budget": None},
}


class GenerateOptions(TypedDict, total=False):
    """Options of `lmx.generate`, named as those of the command `lmx generate`."""

    __pydantic_config__ = STRICT  # type: ignore[misc]

    max_tokens: Annotated[Integer, Field(ge=0, lt=2**31)]
    temperature: float
    top_p: float
    top_k: Integer
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: Integer
    stop: str | list[Annotated[str, Field(min_length=1)]]
    system: str | None
    draft: PathLike | None
    num_draft_tokens: Annotated[Integer, Field(ge=1, le=MAX_DRAFT_TOKENS)] | None
    kv_bits: KVCacheBits | None
    max_kv_size: Annotated[Integer, Field(ge=MIN_KV_SIZE)] | None
    kv_policy: KVPolicy | None
    ignore_chat_template: bool
    response_format: dict[str, Any] | None
    thinking_budget: Annotated[Integer, Field(ge=0)] | None


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


@checked
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
            list of texts or chats, which are generated together: number i has the
            seed `seed` + i.
        stream: yield the tokens of one prompt as they come.
        options: max_tokens (256); temperature (0 = greedy), top_p, top_k, min_p,
            repetition_penalty, presence_penalty, frequency_penalty and seed, see
            `generation.sampling.Sampling`; stop, strings that end the text; system, a
            system message; draft and num_draft_tokens, as in `lmx.load`; kv_bits (2 to
            6 or 8 = quantize the KV cache, 16 = not; default: as the
            model's config.json says); max_kv_size, the tokens whose keys and values
            layers with full attention keep, and kv_policy, which ones: "window" (the
            first 4 and the last ones; default) or "snapkv" (those that the end of the
            prompt attends to most); ignore_chat_template, use the text as it is;
            response_format, what the text has to match, as for OpenAI: {"type":
            "json_schema", "json_schema": {"schema": ...}}, {"type": "json_object"},
            {"type": "regex", "regex": ...} or {"choice": [...]}; thinking_budget, the
            most tokens of the chain of thought: with a response_format, a model that
            can do without thinks only if there is a budget.

    Returns:
        A result with `text`, `tokens` (ids without the end token), `prompt_tokens`,
        `finish_reason` ("stop" or "length"), `ttft_ms`, `prefill_tokens_per_second` and
        `decode_tokens_per_second`; a list of them for a list of prompts. A stream
        yields chunks with `text`, `token` and, at the end, `finish_reason`.

    Raises:
        UserError: the model does not load, a prompt cannot be encoded or is too long,
            or an option is out of its range.
    """
    settings: dict[str, Any] = DEFAULTS | options
    if settings["ignore_chat_template"] and settings["system"] is not None:
        raise UserError("system needs the chat template: omit ignore_chat_template")
    size, policy = settings.pop("max_kv_size"), settings.pop("kv_policy")
    limit = kv_limit(size, policy)
    sampling = Sampling(**{k: settings[k] for k in SAMPLING if k in settings})
    grammar = parse_response_format(settings["response_format"])
    loaded = model if isinstance(model, Model) else load(model)
    draft, count = settings.pop("draft"), settings.pop("num_draft_tokens")
    cache: dict[str, Any] = {"kv_bits": settings.pop("kv_bits"), "kv_limit": limit}
    name = None if draft is None else os.fspath(draft)
    stop = settings["stop"]
    stop = [stop] if isinstance(stop, str) else stop
    wanted: dict[str, Any] = {"sampling": sampling, "grammar": grammar}
    wanted |= {name: settings[name] for name in ("max_tokens", "thinking_budget")}
    is_chat = bool(prompt) and all(isinstance(part, dict) for part in prompt)
    if isinstance(prompt, list) and not is_chat:
        if stream:
            raise UserError("stream works with one prompt, not with a list")
        prompts = [_encode(loaded, each, settings) for each in prompt]
        generator = loaded.generator(name, count, **cache)
        requests = []
        for number, tokens in enumerate(prompts):
            wanted["sampling"] = sampling.with_seed_offset(number)
            requests.append(generator.request(tokens, **wanted))
        return list(generator.generate_all(requests, stop=stop))
    tokens = _encode(loaded, prompt, settings)
    generator = loaded.generator(name, count, **cache)
    if stream:
        return generator.stream(tokens, stop=stop, **wanted)
    return generator.generate(tokens, stop=stop, **wanted)


def _encode(model: Model, prompt: Any, settings: dict[str, Any]) -> list[int]:
    """The tokens of a text or of messages.

    Raises:
        UserError: it is neither, or the chat template rejects it.
    """
    ignores_template = settings["ignore_chat_template"]
    if isinstance(prompt, list) and ignores_template:
        raise UserError("messages need the chat template")
    return encode_prompt(
        model.tokenizer,
        prompt,
        system=settings["system"],
        thinking=thinks(settings["response_format"], settings["thinking_budget"]),
        ignore_chat_template=ignores_template,
    )
