"""The parameters of OpenAI's chat completions and completions, and those of vLLM.

A parameter that is not here is refused by its name, and so is a value of another type.
"""

import json
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ..config.validation import describe, path_of
from ..errors import shorten
from ..generation.sampling import Sampling
from .errors import ApiError
from .markdown import MAX_CHARACTERS

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 16, 1000
MAX_BIASES = 1024
"""Tokens of a logit_bias."""
MAX_DEPTH = 200
"""Levels of a JSON body; OpenAI allows fewer in a schema."""
KINDS = {
    "prompt": "text, token ids, or a list of either",
    "stop": "text or a list of texts",
}
"""What a parameter of several types may be."""
IGNORED = (
    *("user", "store", "metadata", "service_tier", "prompt_cache_key"),
    *("prompt_cache_retention", "safety_identifier", "modalities", "prediction"),
    "verbosity",
)
"""Parameters that change no completion: ids and storage of OpenAI's service, its price
tier, the only modality, a predicted output, and a length that its own models know."""
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty"),
)

Number = Annotated[float, Field(allow_inf_nan=False)]
Token = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Count = Annotated[int, Field(ge=1, le=1 << 31)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
StopTokens = Field(max_length=128, fail_fast=True)
Penalty = Annotated[Number, Field(ge=-2, le=2)]
# A list of a million wrong values is one error.
FAIL_FAST = Field(fail_fast=True)
Objects = Annotated[list[dict[str, Any]], FAIL_FAST]


class Parameters(BaseModel):
    """A JSON object of a body, of strict types."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    @classmethod
    def parse(cls, body: Any) -> Self:
        """The parameters of a JSON body.

        Raises:
            ApiError: a parameter is unknown, or has a wrong value.
        """
        if not isinstance(body, dict):
            raise ApiError(400, "the body is no JSON object")
        # An unknown name may explain what is missing, so it comes first.
        if unknown := next((key for key in body if key not in cls.model_fields), None):
            raise _unknown(unknown)
        try:
            return cls.model_validate(body)
        except ValidationError as invalid:
            error = invalid.errors(include_url=False, include_context=True)[0]
        if error["type"] == "extra_forbidden":
            raise _unknown(".".join(map(str, error["loc"])))
        path = path_of(error["loc"], body)
        if error["type"] == "missing":
            path = (*path, error["loc"][-1])
        param = ".".join(map(str, path))
        if param in KINDS and error["type"] != "value_error":
            raise ApiError(400, f"{param}: expected {KINDS[param]}", param=param)
        raise ApiError(400, shorten(f"{param}: {describe(error)}"), param=param)


class StreamOptions(Parameters):
    """What a stream says beside the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationParameters(Parameters):
    """The parameters that both endpoints have. None = as the server is configured.

    Attributes:
        PROMPT: the parameter with the prompt.
    """

    PROMPT: ClassVar[str]

    model: str | None = None
    max_tokens: Count | Literal[-1] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=1 << 31)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[Token, Annotated[Number, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | Annotated[list[str], FAIL_FAST] | None = None
    stop_token_ids: Annotated[list[TokenId], StopTokens] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None

    user: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    modalities: Annotated[list[Literal["text"]], FAIL_FAST] | None = None
    prediction: dict[str, Any] | None = None
    verbosity: str | None = None

    @field_validator("logit_bias", "stream_options", mode="before")
    @classmethod
    def _check_size(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_BIASES:
            raise ValueError(f"has more than {MAX_BIASES:,} keys")
        return value

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, value: str | list[str] | None) -> str | list[str] | None:
        strings = [value] if isinstance(value, str) else value or []
        if len(strings) > MAX_STOP_STRINGS:
            raise ValueError(f"has more than {MAX_STOP_STRINGS} strings")
        if not all(0 < len(text) <= MAX_STOP_CHARACTERS for text in strings):
            raise ValueError(f"a string has not 1 to {MAX_STOP_CHARACTERS} characters")
        return value

    @classmethod
    def parse(cls, body: Any) -> Self:
        """The parameters of a JSON body.

        Raises:
            ApiError: a parameter is unknown, has a wrong value, or needs another one.
        """
        parameters = super().parse(body)
        if parameters.stream_options and not parameters.stream:
            message = "stream_options needs stream"
            raise ApiError(400, message, param="stream_options")
        return parameters

    @property
    def stop_strings(self) -> list[str]:
        """The strings that end the completion."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def choices(self) -> int:
        """Completions of each prompt."""
        return self.n or 1

    @property
    def max_new_tokens(self) -> int | None:
        """The most tokens of a completion; None = as the server is configured."""
        return None if self.max_tokens == -1 else self.max_tokens

    def sampling(self, defaults: Sampling, seed: int) -> Sampling:
        """The settings of a completion.

        Args:
            defaults: of the model.
        """
        values = ((name, getattr(self, name)) for name in SAMPLING)
        given = {name: value for name, value in values if value is not None}
        if self.top_k == -1:
            given["top_k"] = 0  # vLLM's name of all tokens
        bias = tuple((int(i), float(v)) for i, v in (self.logit_bias or {}).items())
        return replace(defaults, **given, logit_bias=bias, seed=seed % 2**64)


class ChatCompletionParameters(GenerationParameters):
    """The body of `/v1/chat/completions`."""

    PROMPT = "messages"

    messages: Annotated[Objects, Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    thinking_budget: Annotated[int, Field(ge=0, le=1 << 31)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_completion_tokens or super().max_new_tokens

    @classmethod
    def parse(cls, body: Any) -> Self:
        """The parameters of a JSON body, with `tools` in place of `functions`.

        Raises:
            ApiError: a parameter is unknown, or has a wrong value.
        """
        if isinstance(body, dict) and not {*OLD_NAMES}.isdisjoint(body):
            body = _without_old_names(body)
        return super().parse(body)


Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Prompts = Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)
Texts = Annotated[list[str], Prompts]
TokenLists = Annotated[list[Tokens], Prompts]


class CompletionParameters(GenerationParameters):
    """The body of `/v1/completions`."""

    PROMPT = "prompt"

    prompt: str | Tokens | Texts | TokenLists
    max_tokens: Annotated[int, Field(ge=-1, le=1 << 31)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Literal[1] | None = None

    @classmethod
    def parse(cls, body: Any) -> Self:
        """The parameters of a JSON body.

        Raises:
            ApiError: a parameter is unknown, or has a wrong value.
        """
        parameters = super().parse(body)
        if parameters.max_tokens == 0 and not parameters.echo:
            raise ApiError(400, "max_tokens 0 needs echo", param="max_tokens")
        return parameters

    @property
    def prompts(self) -> list[str | list[int]]:
        """All prompts, as text or tokens."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return [*self.prompt]


class AdapterParameters(Parameters):
    """The body of `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM's."""

    lora_name: Annotated[str, Field(min_length=1, max_length=200)]
    lora_path: str | None = None


class TokenizeParameters(Parameters):
    """The body of `/tokenize`, as vLLM's: a prompt, or messages with tools."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: Objects | None = None
    tools: Objects | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeParameters(Parameters):
    """The body of `/detokenize`, as vLLM's."""

    model: str | None = None
    tokens: Annotated[list[TokenId], FAIL_FAST]


class MarkdownParameters(Parameters):
    """The body of `/markdown`."""

    text: Annotated[str, Field(max_length=MAX_CHARACTERS)]


OLD_NAMES = {"functions": "tools", "function_call": "tool_choice"}
"""Parameters of OpenAI's first function calls, and their names today."""


def _without_old_names(body: dict) -> dict:
    for old, name in OLD_NAMES.items():
        if body.get(old) is not None and body.get(name) is not None:
            raise ApiError(400, f"give either {name} or {old}", param=old)
    new = {key: value for key, value in body.items() if key not in OLD_NAMES}
    functions, choice = (body.get(old) for old in OLD_NAMES)
    if isinstance(functions, list):
        new["tools"] = [{"type": "function", "function": each} for each in functions]
    elif functions is not None:
        raise ApiError(400, "functions: expected a list", param="functions")
    if isinstance(choice, dict):
        choice = {"type": "function", "function": choice}
    return new if choice is None else new | {"tool_choice": choice}


def parse_body(data: bytes) -> Any:
    """The JSON value of a body.

    Raises:
        ApiError: it is not JSON in UTF-8, or nested too deeply.
    """
    try:
        text = data.decode()
        value = json.loads(text, parse_constant=_refuse_constant)
        if "\\u" in text:
            # Half of a surrogate pair is no text, and stands only in an escape.
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as error:
        message = f"the body is not JSON in UTF-8: {error}"
        raise ApiError(400, shorten(message)) from None
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner = (v for v in level if isinstance(v, dict | list))
        level = [c for v in inner for c in (v.values() if isinstance(v, dict) else v)]
    if level:
        raise ApiError(400, f"the body has more than {MAX_DEPTH} levels")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _unknown(name: str) -> ApiError:
    name = shorten(name, 100)
    message = f"Unrecognized request argument supplied: {name}"
    return ApiError(400, message, param=name, code="unknown_parameter")
