"""Requests of the endpoint as requests of the engine, and their answers."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import UserError, library_errors
from ..generation.engine import Engine
from ..generation.grammar import Grammar
from ..generation.grammar_matcher import CompiledGrammar
from ..generation.prompt import SystemMessages
from ..generation.sequence import GenerationRequest, TokenOutput
from ..generation.thinking import NO_THINKING, Thinking, thinking_of
from .answers import Answer, ChatAnswer
from .chat_output import ChatOutputParser
from .choice import Choice, Piece
from .engine_thread import EngineFailed, EngineThread, ServedModel
from .errors import OVERLOADED, SERVER, ApiError, no_model
from .metrics import Metrics
from .output_formats import answer_grammar, chat_grammar, grammar_parameter
from .prompts import (
    EncodedPrompt,
    checked_tools,
    encode_messages,
    encode_prompts,
    require_length,
)
from .protocol import (
    ChatCompletionParameters,
    CompletionParameters,
    DetokenizeParameters,
    GenerationParameters,
    TokenizeParameters,
)
from .tool_formats import add_tool_format

KEEP_ALIVE_SECONDS = 15.0
"""A stream without a token for so long says that it lives; proxies close it else."""
MAX_SCORES = 1 << 17
"""Log-probabilities of the prompts of a request: half a second of the event loop."""
LONG_TEXT = 20_000
"""Characters from which a text takes long to encode, some 30 ms."""


@dataclass(frozen=True)
class ServiceSettings:
    """How the server answers.

    Attributes:
        model: the name that the model is served under.
        max_tokens: of completions whose requests name no limit.
        max_requests: completions that run or wait; more are refused.
        timeout: seconds that a request may take.
        system_messages: see `encode_chat`.
        thinking_budget: tokens of a chain of thought at most, for requests without
            their own limit; None = no limit.
    """

    model: str
    max_tokens: int = 4096
    max_requests: int = 256
    timeout: float = 600.0
    system_messages: SystemMessages = "merge"
    thinking_budget: int | None = None


@dataclass(eq=False)
class Job:
    """A request that is answered.

    Attributes:
        arrival, deadline: its time, and that at which it is ended.
    """

    parameters: GenerationParameters
    prompts: Sequence[EncodedPrompt]
    choices: Sequence[Choice]
    answer: Answer
    arrival: float
    deadline: float

    @property
    def splits_steps(self) -> bool:
        """Whether every token has a chunk of its own, with its counts."""
        options = self.parameters.stream_options
        return bool(options and options.continuous_usage_stats)


class CompletionService:
    """Answers requests with an engine.

    Args:
        served: the model; its engine belongs to `thread`.
    """

    def __init__(
        self,
        thread: EngineThread,
        served: ServedModel,
        settings: ServiceSettings,
        metrics: Metrics,
    ):
        self.thread, self.settings, self.metrics = thread, settings, metrics
        self._generator, self._sampling = served.generator, served.sampling
        self._load_adapter = served.load_adapter
        self._tokenizer = served.generator.tokenizer
        add_tool_format(self._tokenizer)
        longest = max(map(len, self._tokenizer.get_vocab()))
        self._max_characters = self.max_positions and self.max_positions * longest
        # They do not stop the event loop. Short texts do not wait for long ones, and
        # nobody else for a grammar. Tokenizers in Python take one thread only.
        self._encoder = ThreadPoolExecutor(1, "tokenizer")
        self._long_encoder = self._encoder
        if hasattr(self._tokenizer, "backend_tokenizer"):
            self._long_encoder = ThreadPoolExecutor(1, "long texts")
        self._compiler = ThreadPoolExecutor(1, "grammars")
        self._preparing = 0  # completions whose prompt or grammar is not ready

    @property
    def models(self) -> dict[str, str | None]:
        """The base model and its adapters by name, with the model they belong to."""
        base = self.settings.model
        return {base: None} | dict.fromkeys(self._adapters, base)

    @property
    def _adapters(self) -> list[str]:
        # Another thread adds and removes them. A request that comes too late fails.
        return [*self._generator.engine.adapters.numbers]

    async def add_adapter(self, name: str, path: str) -> None:
        """Load an adapter, which requests name as their model.

        Raises:
            ApiError: it does not load, or the name is in use.
        """
        if name in self.models:
            raise ApiError(400, f"there is a model {name!r} already", param="lora_name")

        def add(engine: Engine) -> None:
            # The system refuses some paths before there is a folder to read.
            with library_errors("the adapter does not load", place=path):
                engine.adapters.add(name, self._load_adapter(path))

        try:
            await self.thread.run_on_engine(add)
        except UserError as error:
            raise ApiError.from_user_error(error, param="lora_path") from error

    async def remove_adapter(self, name: str) -> None:
        """Drop an adapter.

        Raises:
            ApiError: there is none of this name, or requests are running with it.
        """
        if name not in self._adapters:
            message = f"The adapter {name!r} does not exist"
            raise ApiError(404, message, param="lora_name", code="model_not_found")
        try:
            await self.thread.run_on_engine(lambda engine: engine.remove_adapter(name))
        except UserError as error:
            raise ApiError(409, error.message, param="lora_name") from error

    @property
    def max_positions(self) -> int | None:
        """Tokens that a prompt and its completion may have; None = no limit."""
        return self._generator.max_positions

    async def chat(self, body: Any) -> Job:
        """Prepare the answer to a body of `/v1/chat/completions`.

        Raises:
            ApiError: the request is refused.
        """
        arrival = time.monotonic()
        parameters = ChatCompletionParameters.parse(body)
        if parameters.top_logprobs and not parameters.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs", param="top_logprobs")
        model, adapter = self._require_model(parameters.model)
        tools = checked_tools(parameters)
        size = require_length(parameters, self._max_characters)
        async with self._prepares(parameters.choices):
            grammar = chat_grammar(parameters, self._tokenizer)
            encode = partial(self._encode_chat, parameters, tools)
            prompt = await self._encode(encode, size)
            thinking = self._thinking(parameters, prompt, grammar)
            compiled = await self._compile(grammar, parameters)

        def parser() -> ChatOutputParser:
            return ChatOutputParser(
                self._tokenizer, tools, in_reasoning=prompt.in_reasoning
            )

        top = parameters.top_logprobs or 0
        choices = self._choices(
            parameters,
            [prompt],
            adapter=adapter,
            grammar=compiled,
            thinking=thinking,
            top_logprobs=top if parameters.logprobs else None,
            parser=parser,
            single_call=parameters.parallel_tool_calls is False,
        )
        answer = ChatAnswer(model, choices, [len(prompt.tokens)])
        deadline = arrival + self.settings.timeout
        return Job(parameters, [prompt], choices, answer, arrival, deadline)

    async def complete(self, body: Any) -> Job:
        """Prepare the answer to a body of `/v1/completions`.

        Raises:
            ApiError: the request is refused.
        """
        arrival = time.monotonic()
        parameters = CompletionParameters.parse(body)
        model, adapter = self._require_model(parameters.model)
        size = require_length(parameters, self._max_characters)
        async with self._prepares(len(parameters.prompts) * parameters.choices):
            encode = partial(encode_prompts, self._tokenizer, parameters)
            prompts = await self._encode(encode, size)
            compiled = await self._compile(answer_grammar(parameters), parameters)
        scored = parameters.choices * sum(len(prompt.offsets) for prompt in prompts)
        if scored * (1 + (parameters.logprobs or 0)) > MAX_SCORES:
            message = f"{scored:,} tokens of prompts are too many for their logprobs"
            raise ApiError(400, message, param="logprobs")
        choices = self._choices(
            parameters,
            prompts,
            adapter=adapter,
            grammar=compiled,
            top_logprobs=parameters.logprobs,
        )
        lengths = [len(prompt.tokens) for prompt in prompts]
        answer = Answer(model, choices, lengths)
        deadline = arrival + self.settings.timeout
        return Job(parameters, prompts, choices, answer, arrival, deadline)

    async def tokenize(self, body: Any) -> list[int]:
        """The tokens of a body of `/tokenize`.

        Raises:
            ApiError: the request is refused.
        """
        parameters = TokenizeParameters.parse(body)
        self._require_model(parameters.model)
        prompt, messages = parameters.prompt, parameters.messages
        if (prompt is None) == (messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        if prompt is not None:
            special = parameters.add_special_tokens is not False
            encode = partial(self._tokenizer.encode, add_special_tokens=special)
            async with self._prepares(1):
                return await self._encode(lambda: list(encode(prompt)), len(prompt))
        if parameters.add_special_tokens is not None:
            message = "the chat template adds the special tokens of messages"
            raise ApiError(400, message, param="add_special_tokens")
        names = ("messages", "tools", "chat_template_kwargs")
        given = {name: getattr(parameters, name) for name in names}
        chat = ChatCompletionParameters.parse(given)
        tools = checked_tools(chat)
        size = require_length(chat, self._max_characters)
        async with self._prepares(1):
            encode = partial(self._encode_chat, chat, tools)
            return (await self._encode(encode, size)).tokens

    async def detokenize(self, body: Any) -> str:
        """The text of a body of `/detokenize`.

        Raises:
            ApiError: the request is refused.
        """
        parameters = DetokenizeParameters.parse(body)
        self._require_model(parameters.model)
        tokens = parameters.tokens
        for token in tokens:
            self._require_token(token, "tokens")
        decode = partial(self._tokenizer.decode, tokens)
        async with self._prepares(1):
            return await self._encode(decode, len(tokens))

    async def finish(self, job: Job) -> None:
        """Wait for the whole answer.

        Raises:
            ApiError: a completion failed, or the time is over.
        """
        async for piece in self.pieces(job):
            if piece:
                job.answer.add_piece(piece)

    async def pieces(self, job: Job) -> AsyncIterator[Piece | None]:
        """The pieces of all completions, as they come; None = there is none yet.

        Raises:
            ApiError: a completion failed, or the time is over.
        """
        by_request = {choice.request: choice for choice in job.choices}
        # Others may have come while the prompt was encoded.
        self._require_room(len(by_request))
        subscription = self.thread.submit([*by_request])
        try:
            while by_request:
                outputs = await self._next(subscription.outputs, job.deadline)
                if outputs is None:
                    yield None
                    continue
                # The tokens of every request, or every token by itself.
                groups: dict[Any, list[TokenOutput]] = {}
                for index, output in enumerate(outputs):
                    key = index if job.splits_steps else output.request
                    groups.setdefault(key, []).append(output)
                for group in groups.values():
                    request = group[0].request
                    if not (choice := by_request.get(request)):
                        continue
                    tokens = choice.tokens
                    piece = choice.add_outputs(group)
                    self.metrics.record_tokens(choice.tokens - tokens)
                    if piece.finish_reason:
                        del by_request[request]
                        # It may have ended by its text, of which the engine knows not.
                        self.thread.abort(request)
                    yield piece
        finally:
            for request in by_request:
                self.thread.abort(request)
            for index, prompt in enumerate(job.prompts):
                own = (c for c in job.choices if c.prompt_index == index)
                self.metrics.record_prompt(len(prompt.tokens), next(own).cached_tokens)
            for choice in job.choices:
                self.metrics.record(choice, job.arrival)

    async def _next(
        self, queue: asyncio.Queue, deadline: float
    ) -> list[TokenOutput] | None:
        now = time.monotonic()
        if now >= deadline:
            raise self._too_long()
        try:
            # Not `wait_for`: it may return in place of ending when it is cancelled.
            async with asyncio.timeout(min(KEEP_ALIVE_SECONDS, deadline - now)):
                outputs = await queue.get()
        except TimeoutError:
            return None
        if isinstance(outputs, EngineFailed):
            raise ApiError(500, "the engine failed; see the log", kind=SERVER)
        for output in outputs:
            if output.error:
                if output.request.adapter not in (None, *self._adapters):
                    raise no_model(output.request.adapter)
                raise ApiError.from_user_error(output.error)
        return outputs

    async def _compile(
        self, grammar: Grammar | None, parameters: GenerationParameters
    ) -> CompiledGrammar | None:
        if grammar is None:
            return None
        try:
            compile_ = self._generator.grammars.compile
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._compiler, compile_, grammar)
        except UserError as error:
            raise ApiError.from_user_error(
                error, param=grammar_parameter(parameters)
            ) from error

    def _encode_chat(
        self,
        parameters: ChatCompletionParameters,
        tools: Sequence[dict] | None,
    ) -> EncodedPrompt:
        return encode_messages(
            self._tokenizer,
            parameters,
            tools,
            system_messages=self.settings.system_messages,
        )

    def _thinking(
        self,
        parameters: ChatCompletionParameters,
        prompt: EncodedPrompt,
        grammar: Grammar | None,
    ) -> Thinking | None:
        """The chain of thought that a budget or a grammar has to know of."""
        budget = parameters.thinking_budget
        if budget is None:
            budget = self.settings.thinking_budget
        if not prompt.thinks or (budget is None and not grammar):
            return None
        thinking = thinking_of(self._tokenizer, prompt.tokens, budget, grammar=grammar)
        if thinking is None and parameters.thinking_budget is not None:
            raise ApiError(400, NO_THINKING, param="thinking_budget")
        return thinking

    async def _encode(self, function: Callable[[], Any], size: int) -> Any:
        """What a function of `size` characters returns, from another thread."""
        loop = asyncio.get_running_loop()
        encoder = self._long_encoder if size > LONG_TEXT else self._encoder
        return await loop.run_in_executor(encoder, function)

    def _require_model(self, name: str | None) -> tuple[str, str | None]:
        """The model of a request, and its adapter, which stays so if it is dropped."""
        name = name or self.settings.model
        if name not in self.models:
            raise no_model(name)
        return name, name if name != self.settings.model else None

    def _require_token(self, token: int, param: str) -> None:
        size = self._generator.vocab_size
        if size and token >= size:
            message = f"the model has no token {token}: 0 to {size - 1}"
            raise ApiError(400, message, param=param)

    @asynccontextmanager
    async def _prepares(self, count: int) -> AsyncIterator[None]:
        """Count completions as open while they are prepared, if there is room."""
        self._require_room(count)
        self._preparing += count
        try:
            async with asyncio.timeout(self.settings.timeout):
                yield
        except TimeoutError:
            raise self._too_long() from None
        finally:
            self._preparing -= count

    def _too_long(self) -> ApiError:
        message = f"the request took more than {self.settings.timeout:g} seconds"
        return ApiError(408, message, code="timeout")

    def _require_room(self, count: int) -> None:
        if count > self.settings.max_requests:
            message = (
                f"the request has {count:,} completions, and this server takes "
                f"{self.settings.max_requests}"
            )
            raise ApiError(400, message, param="n")
        busy = self.thread.open_requests + self._preparing
        if busy + count > self.settings.max_requests:
            raise ApiError(
                429,
                f"{busy} completions run or wait, and at most "
                f"{self.settings.max_requests} may",
                code="overloaded",
                kind=OVERLOADED,
                headers={"Retry-After": "1"},
            )

    def _choices(
        self,
        parameters: GenerationParameters,
        prompts: Sequence[EncodedPrompt],
        *,
        adapter: str | None,
        grammar: CompiledGrammar | None,
        thinking: Thinking | None = None,
        top_logprobs: int | None,
        parser: Callable[[], ChatOutputParser] | None = None,
        single_call: bool = False,
    ) -> list[Choice]:
        """The completions of prompts.

        Args:
            top_logprobs: of so many most likely tokens; None = no log-probabilities.
            parser: makes the parser of each.
        """
        for name in parameters.logit_bias or {}:
            self._require_token(int(name), f"logit_bias.{name}")
        for token in parameters.stop_token_ids or ():
            self._require_token(token, "stop_token_ids")
        seed = parameters.seed
        seed = secrets.randbits(63) if seed is None else seed
        positions = self._generator.max_positions
        limit = parameters.max_new_tokens
        prompt_only = limit == 0
        limit = self.settings.max_tokens if limit is None else max(1, limit)
        stop_tokens = self._generator.resolve_stop_tokens(
            frozenset() if parameters.ignore_eos else None
        )
        stop_tokens = frozenset(stop_tokens) | {*(parameters.stop_token_ids or ())}
        choices = []
        for prompt_index, prompt in enumerate(prompts):
            tokens = prompt.tokens
            if positions is not None and len(tokens) > positions:
                raise ApiError(
                    400,
                    f"This model's maximum context length is {positions} tokens, and "
                    f"the prompt has {len(tokens)}",
                    param=parameters.PROMPT,
                    code="context_length_exceeded",
                )
            try:
                count = self._generator.clamp_max_tokens(tokens, limit)
            except UserError as error:
                place = parameters.PROMPT
                raise ApiError.from_user_error(error, param=place) from error
            most, least = 0 if prompt_only else count, parameters.min_tokens or 0
            if least > most:
                message = f"min_tokens is {least}, and a completion has at most {most}"
                raise ApiError(400, f"{message} here", param="min_tokens")
            for _ in range(parameters.choices):
                sampling = parameters.sampling(self._sampling, seed + len(choices))
                try:
                    request = GenerationRequest(
                        tokens,
                        count,
                        sampling,
                        stop_tokens,
                        logprobs=None if top_logprobs is None else "raw",
                        top_logprobs=top_logprobs or 0,
                        prompt_logprobs=bool(prompt.offsets),
                        priority=parameters.priority or 0,
                        adapter=adapter,
                        grammar=grammar,
                        thinking=thinking,
                        min_tokens=least,
                    )
                except UserError as error:
                    raise ApiError.from_user_error(error) from error
                choices.append(
                    Choice(
                        index=len(choices),
                        prompt_index=prompt_index,
                        request=request,
                        tokenizer=self._tokenizer,
                        stop=parameters.stop_strings,
                        parser=parser() if parser else None,
                        single_call=single_call,
                        prompt=prompt,
                        prompt_only=prompt_only,
                    )
                )
        return choices
