"""The generator: a prompt in, text out, whole or streamed."""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from typing import Any

from .. import cpu
from ..cpu.memory import available_memory
from ..errors import WILL_NOT_FIT, UserError
from ..models.token_ids import check_ids
from .decode_loop import BatchSampler, decode
from .detokenizer import StreamingDetokenizer
from .kv_cache import CacheState, KVBits
from .outputs import CompletionOutput, GenerationResponse, GenerationResult
from .prefix_cache import PrefixCache
from .prompt import Messages, encode_chat, encode_text
from .sampling import Sampling
from .speculative.decoder import SpeculativeDecoder, SpeculativeStats
from .speculative.draft_length import DraftLengthController
from .speculative.proposer import MakeProposer

GREEDY = Sampling()
MIN_CHECKED = 4096
"""Fewer tokens take less memory than the model itself."""


class Generator:
    """Generates text with an mlx-lm model.

    Args:
        model: maps tokens [B, L] and a list of caches to logits [B, L, V].
        tokenizer: mlx-lm's TokenizerWrapper.
        prefill_step_size: prompt tokens per forward pass.
        prefix_cache: reuses prompt prefixes of earlier calls; None = no reuse.
        make_proposer: makes a draft-token proposer for every completion from its
            cache, for speculative decoding. Requests with `logprobs` are decoded
            without it.
        draft_length: chooses the number of draft tokens; adapts over all completions.
        sequential_verify: verify draft tokens one at a time; see `SpeculativeDecoder`.
        kv_bits, quantized_kv_start: as for `CacheState`.
        keep_dequantized: on a Linux CPU, keep the weights of quantized layers in
            float32, if memory allows; see `cpu.keep_dequantized`.

    Attributes:
        speculative_stats: statistics of the last completion; None without a proposer.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        prefill_step_size: int = 512,
        prefix_cache: PrefixCache | None = None,
        make_proposer: MakeProposer | None = None,
        draft_length: DraftLengthController | None = None,
        sequential_verify: bool = False,
        kv_bits: KVBits = None,
        quantized_kv_start: int = 0,
        keep_dequantized: bool = True,
    ):
        if keep_dequantized:
            cpu.keep_dequantized(model)
        self.model = model
        self.tokenizer = tokenizer
        self.prefill_step_size = prefill_step_size
        self.prefix_cache = prefix_cache
        self.make_proposer = make_proposer
        self.draft_length = draft_length or DraftLengthController()
        self.sequential_verify = sequential_verify
        self.kv_bits = kv_bits
        self.quantized_kv_start = quantized_kv_start
        self.speculative_stats: SpeculativeStats | None = None
        config = getattr(model, "args", None)
        self.max_positions = getattr(config, "max_position_embeddings", None)
        text = getattr(config, "text_config", None) or {}
        self.vocab_size = getattr(config, "vocab_size", None) or text.get("vocab_size")

    def stream(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 256,
        sampling: Sampling = GREEDY,
        stop_tokens: Collection[int] | None = None,
        stop: Sequence[str] = (),
        logprobs: bool = False,
    ) -> Iterator[GenerationResponse]:
        """Yield the completion token by token.

        Args:
            stop_tokens: tokens that end the completion; None = all end-of-sequence
                tokens of the tokenizer. The stop token comes last, with empty text.
            stop: strings that end the completion and are not part of it.

        Raises:
            UserError: the prompt is empty, or longer than the model's positions, or
                the KV cache of `max_tokens` does not fit in memory.
        """
        max_tokens = self.clamp_max_tokens(prompt, max_tokens)
        self.require_memory([len(prompt) + max_tokens])
        if self.prefix_cache:
            cache, _ = self.prefix_cache.fetch(prompt, self.new_cache)
        else:
            cache = self.new_cache()
        if self.make_proposer and not logprobs:
            steps = self._speculative(cache, prompt, max_tokens, sampling)
        else:
            steps = decode(
                cache,
                prompt,
                max_tokens,
                BatchSampler(sampling, [prompt]),
                prefill_step_size=self.prefill_step_size,
                logprobs=logprobs,
            )
        stop_tokens = self.resolve_stop_tokens(stop_tokens)
        detokenizer = StreamingDetokenizer(self.tokenizer, prompt, stop_tokens, stop)
        responses = self._detokenize(steps, max_tokens, detokenizer)
        return self._store_prefix(responses, prompt, cache)

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

    def require_memory(self, lengths: Sequence[int]) -> None:
        """Refuse sequences whose KV caches, at these lengths, do not fit in memory.

        Raises:
            UserError: with the bytes.
        """
        if sum(lengths) < MIN_CHECKED:
            return
        needed, available = self._bytes_per_token * sum(lengths), available_memory()
        if needed > available:
            raise UserError(
                f"the KV cache of {sum(lengths):,} tokens takes {needed / 1e9:,.1f} "
                f"GB, and {available / 1e9:,.1f} GB of memory are available",
                hint=f"{int(available / self._bytes_per_token):,} tokens fit: lower "
                "max_tokens, or quantize the cache (kv_bits)",
                code=WILL_NOT_FIT,
            )

    @cached_property
    def _bytes_per_token(self) -> float:
        return self.new_cache().bytes_per_token()

    def resolve_stop_tokens(
        self, stop_tokens: Collection[int] | None
    ) -> frozenset[int]:
        """The given stop tokens, or the tokenizer's end-of-sequence tokens if None."""
        return frozenset(
            self.tokenizer.eos_token_ids if stop_tokens is None else stop_tokens
        )

    def new_cache(self) -> CacheState:
        """An empty cache for this model."""
        return CacheState(
            self.model,
            kv_bits=self.kv_bits,
            quantized_kv_start=self.quantized_kv_start,
        )

    def _speculative(
        self, cache: CacheState, prompt, max_tokens: int, sampling: Sampling
    ) -> Iterator[tuple[int, None]]:
        decoder = SpeculativeDecoder(
            cache,
            self.make_proposer(cache),
            draft_length=self.draft_length,
            sampling=sampling,
            sequential_verify=self.sequential_verify,
            prefill_step_size=self.prefill_step_size,
        )
        self.speculative_stats = decoder.stats
        for token in decoder.decode(prompt, max_tokens):
            yield token, None

    def _store_prefix(self, responses, prompt: Sequence[int], cache: CacheState):
        """Pass the responses on; then put the cache in the prefix cache.

        The caller may abandon the stream early. After an exception, such as
        KeyboardInterrupt, the layers of the cache may have different lengths.
        """
        tokens, is_whole = list(prompt), True
        try:
            for response in responses:
                tokens.append(response.token)
                yield response
        except GeneratorExit:
            raise
        except BaseException:
            is_whole = False
            raise
        finally:
            responses.close()
            if is_whole and self.prefix_cache and cache.length:
                # The cache may contain accepted draft tokens that were never yielded.
                cache.rollback(max(0, cache.length - len(tokens)))
                self.prefix_cache.insert(tokens[: cache.length], cache)

    @staticmethod
    def _detokenize(
        steps, max_tokens: int, detokenizer: StreamingDetokenizer
    ) -> Iterator[GenerationResponse]:
        for n, (token, logprob) in enumerate(steps, 1):
            text, finish_reason = detokenizer.add(token, last=n == max_tokens)
            yield GenerationResponse(text, token, logprob, finish_reason)
            if finish_reason:
                return
