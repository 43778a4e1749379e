"""The generator: prompts in, text out, whole or streamed."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from .. import cpu
from ..errors import UserError
from ..interfaces import SINGLE_PROCESS, Communicator
from ..models.token_ids import check_ids
from .engine import Engine
from .grammar import Grammar
from .grammar_matcher import GrammarCompiler
from .outputs import CompletionOutput, GenerationResponse, GenerationResult
from .parallel_engine import ParallelEngine
from .prompt import Messages, encode_chat, encode_text
from .sampling import Sampling
from .sequence import GenerationRequest
from .speculative.draft_length import SpeculativeStats
from .text_stream import TextStream
from .thinking import required_thinking

GREEDY = Sampling()
Unread = deque[GenerationResponse | UserError]


class Generator:
    """Generates text with an mlx-lm model.

    Streams of one generator that are read by turns are decoded together.

    Args:
        model: maps tokens [B, L] and a list of caches to logits [B, L, V].
        tokenizer: mlx-lm's TokenizerWrapper.
        keep_dequantized: on a Linux CPU, keep the weights of quantized layers in
            float32, if memory allows; see `cpu.keep_dequantized`.
        ranks: processes that hold the model together; see `ParallelEngine`.
        options: those of `Engine` and `Scheduler`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        keep_dequantized: bool = True,
        ranks: Communicator = SINGLE_PROCESS,
        **options,
    ):
        if keep_dequantized:
            cpu.keep_dequantized(model)
        self.model = model
        self.tokenizer = tokenizer
        self.grammars = GrammarCompiler(tokenizer)
        self._has_draft = options.get("make_proposer") is not None
        self.engine = (
            Engine(model, **options)
            if ranks.size == 1
            else ParallelEngine(model, ranks, self.grammars.compile, **options)
        )
        # The text of every open stream, and what of it was not read yet.
        self._streams: dict[GenerationRequest, tuple[TextStream, Unread]] = {}
        config = getattr(model, "args", None)
        self.max_positions = getattr(config, "max_position_embeddings", None)
        text = getattr(config, "text_config", None) or {}
        self.vocab_size = getattr(config, "vocab_size", None) or text.get("vocab_size")

    @property
    def speculative_stats(self) -> SpeculativeStats | None:
        """Statistics since the generator was last idle; None without a proposer."""
        return self.engine.stats if self._has_draft else None

    def request(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 256,
        sampling: Sampling = GREEDY,
        stop_tokens: Collection[int] | None = None,
        logprobs: bool = False,
        grammar: Grammar | None = None,
        thinking_budget: int | None = None,
    ) -> GenerationRequest:
        """A request that ends at the model's positions.

        Args:
            stop_tokens: tokens that end the completion; None = all end-of-sequence
                tokens of the tokenizer. The stop token comes last, with empty text.
            grammar: the completion has to match it, after a chain of thought that the
                prompt begins or that has a budget.
            thinking_budget: the most tokens of a chain of thought; None = no limit.

        Raises:
            UserError: the prompt is empty, or longer than the model's positions, or the
                grammar is refused, or the model has no chain of thought for a budget.
        """
        count = self.clamp_max_tokens(prompt, max_tokens)
        stop_tokens = self.resolve_stop_tokens(stop_tokens)
        kind = "raw" if logprobs else None
        compiled = grammar and self.grammars.compile(grammar)
        thinking = required_thinking(
            self.tokenizer, prompt, thinking_budget, grammar=grammar
        )
        return GenerationRequest(
            prompt,
            count,
            sampling,
            stop_tokens,
            kind,
            grammar=compiled,
            thinking=thinking,
        )

    def stream(
        self, prompt: Sequence[int], *, stop: Sequence[str] = (), **options: Any
    ) -> Iterator[GenerationResponse]:
        """Yield the completion token by token.

        Args:
            stop: strings that end the completion and are not part of it.
            options: those of `request`.

        Raises:
            UserError: see `request`; or the KV cache of `max_tokens` does not fit in
                memory.
        """
        request = self.request(prompt, **options)
        self.engine.require_memory(request)
        if self.engine.idle:
            self.engine.reset_stats()
        return self.submit(request, stop=stop)

    def submit(
        self, request: GenerationRequest, *, stop: Sequence[str] = ()
    ) -> Iterator[GenerationResponse]:
        """Start a request; returns its stream. The request ends if that is closed.

        Raises:
            UserError: from the stream, when the request fails.
        """
        if request.max_tokens < 1:
            return iter(())
        unread: Unread = deque()
        self._streams[request] = TextStream(self.tokenizer, request, stop), unread
        self.engine.add_request(request)
        return self._responses(request, unread)

    def _responses(
        self, request: GenerationRequest, unread: Unread
    ) -> Iterator[GenerationResponse]:
        try:
            while True:
                while not unread:
                    self._step()
                response = unread.popleft()
                if isinstance(response, UserError):
                    raise response
                yield response
                if response.finish_reason:
                    return
        finally:
            if self._streams.pop(request, None):
                self.engine.abort(request)

    def _step(self) -> None:
        """One step of the engine. A stop string ends its request at once."""
        try:
            outputs = self.engine.step()
        except BaseException:
            for _, unread in self._streams.values():
                unread.append(UserError("the request was interrupted"))
            self._streams.clear()
            raise
        for output in outputs:
            if output.request not in self._streams:
                continue
            text, unread = self._streams[output.request]
            unread.append(output.error or text.add(output))
            if output.error or text.finish_reason:
                self.engine.abort(output.request)
                del self._streams[output.request]

    def generate(
        self,
        prompt: Sequence[int],
        *,
        on_token: Callable[[GenerationResponse], object] = lambda response: None,
        **options,
    ) -> GenerationResult:
        """Generate a whole completion. `options` are those of `stream`."""
        stop_tokens = self.resolve_stop_tokens(options.get("stop_tokens"))
        output = CompletionOutput(len(prompt), stop_tokens)
        for response in self.stream(prompt, **options):
            output.add(response)
            on_token(response)
        return output.result()

    def generate_all(
        self,
        requests: Sequence[GenerationRequest],
        *,
        stop: Sequence[str] = (),
        on_token: Callable[[GenerationResponse], object] = lambda response: None,
    ) -> Iterator[GenerationResult]:
        """Yield the completions of requests in their order, each as soon as possible.

        Args:
            stop: strings that end a completion and are not part of it.
            on_token: gets all tokens of a completion, then those of the next one.

        Raises:
            UserError: the KV cache of a request does not fit in memory, or one failed.
        """
        for request in requests:
            self.engine.require_memory(request)
        with self.engine.sharing_prefixes():
            streams = [(each, self.submit(each, stop=stop)) for each in requests]
            for request, responses in streams:
                output = CompletionOutput(len(request.prompt), request.stop_tokens)
                for response in responses:
                    output.add(response)
                    on_token(response)
                # Requests that are decoded together are not timed.
                yield replace(
                    output.result(),
                    ttft_ms=None,
                    prefill_tokens_per_second=None,
                    decode_tokens_per_second=None,
                )

    def chat(self, prompt: str | Messages, **options) -> GenerationResult:
        """Reply to a chat: `generate` on the encoded messages."""
        return self.generate(self.encode_chat(prompt), **options)

    def encode_chat(self, prompt: str | Messages, **options: Any) -> list[int]:
        """Token ids of a chat with the generation prompt; see `prompt.encode_chat`."""
        return encode_chat(self.tokenizer, prompt, **options)

    def encode_text(self, text: str) -> list[int]:
        """Token ids of raw text; see `prompt.encode_text`."""
        return encode_text(self.tokenizer, text)

    def clamp_max_tokens(self, prompt: Sequence[int], max_tokens: int) -> int:
        """`max_tokens`, limited by the model's positions. The last needs no position.

        Raises:
            UserError: the prompt is empty, longer than the model's positions, or has an
                id that the model does not have.
        """
        if not len(prompt):
            raise UserError("the prompt is empty", hint="give at least one token")
        if self.vocab_size:
            check_ids(prompt, self.vocab_size, lambda i: self.tokenizer.decode([i]))
        room = max_tokens
        if self.max_positions is not None:
            room = self.max_positions - len(prompt) + 1
        if room < 1 <= max_tokens:
            raise UserError(
                f"the prompt has {len(prompt)} tokens, but the model supports "
                f"{self.max_positions} positions",
                hint="shorten the prompt",
            )
        return min(max_tokens, room)

    def resolve_stop_tokens(
        self, stop_tokens: Collection[int] | None
    ) -> frozenset[int]:
        """The given stop tokens, or the tokenizer's end-of-sequence tokens if None."""
        return frozenset(
            self.tokenizer.eos_token_ids if stop_tokens is None else stop_tokens
        )
