"""The generator: prompts in, text out, streamed or for many prompts at once."""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from .. import cpu
from ..errors import UserError
from ..models.token_ids import check_ids
from .decode_loop import BatchSampler, decode
from .detokenizer import StreamingDetokenizer
from .kv_cache import CacheState, KVBits
from .outputs import GenerationResponse, GenerationResult
from .prefix_cache import PrefixCache
from .prompt import Messages, encode_chat, encode_text
from .sampling import Sampling
from .speculative.decoder import SpeculativeDecoder, SpeculativeStats
from .speculative.draft_length import DraftLengthController
from .speculative.proposer import MakeProposer

GREEDY = Sampling()
BATCH_SIZE = 32
"""Prompts decoded together by `Generator.batch_generate`."""


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
            UserError: the prompt is empty, or longer than the model's positions.
        """
        max_tokens = self.clamp_max_tokens(prompt, max_tokens)
        if self.prefix_cache:
            cache, _ = self.prefix_cache.fetch(prompt, self.new_cache)
        else:
            cache = self.new_cache()
        if self.make_proposer and not logprobs:
            steps = self._speculative(cache, prompt, max_tokens, sampling)
        else:
            steps = self._standard(cache, prompt, max_tokens, sampling, logprobs)
        stop_tokens = self.resolve_stop_tokens(stop_tokens)
        responses = self._detokenize(steps, max_tokens, stop_tokens, stop)
        return self._store_prefix(responses, prompt, cache)

    def generate(
        self,
        prompt: Sequence[int],
        *,
        on_token: Callable[[GenerationResponse], object] = lambda response: None,
        **options,
    ) -> GenerationResult:
        """Generate a whole completion. `options` are those of `stream`."""
        responses, start = [], time.perf_counter()
        first = last = start
        for response in self.stream(prompt, **options):
            last = time.perf_counter()
            first = first if responses else last
            responses.append(response)
            on_token(response)
        tokens = [response.token for response in responses]
        stop_tokens = self.resolve_stop_tokens(options.get("stop_tokens"))
        if tokens and tokens[-1] in stop_tokens:
            tokens = tokens[:-1]
        return GenerationResult(
            text="".join(response.text for response in responses),
            tokens=tokens,
            prompt_tokens=len(prompt),
            finish_reason=responses[-1].finish_reason if responses else "length",
            ttft_ms=1000 * (first - start) if responses else None,
            prefill_tokens_per_second=_rate(len(prompt), first - start),
            decode_tokens_per_second=_rate(len(responses) - 1, last - first),
        )

    def chat(self, prompt: str | Messages, **options) -> GenerationResult:
        """Reply to a chat: `generate` on the encoded messages."""
        return self.generate(self.encode_chat(prompt), **options)

    def batch_generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int = 256,
        stop_tokens: Collection[int] | None = None,
    ) -> list[str]:
        """Greedy completions of many prompts, in their order.

        Prompts of equal length are decoded together. Without padding, the only
        difference to single prompts is the summation order inside a matmul.
        """
        groups = defaultdict(list)
        for index, prompt in enumerate(prompts):
            groups[len(prompt), self.clamp_max_tokens(prompt, max_tokens)].append(index)
        stop_tokens, texts = self.resolve_stop_tokens(stop_tokens), {}
        for (_, count), indices in groups.items():
            for start in range(0, len(indices), BATCH_SIZE):
                batch = indices[start : start + BATCH_SIZE]
                completions = self._decode_batch(
                    [prompts[index] for index in batch], count, stop_tokens
                )
                texts |= zip(batch, map(self._detokenize_all, completions), strict=True)
        return [texts[index] for index in range(len(prompts))]

    def encode_chat(
        self,
        prompt: str | Messages,
        *,
        thinking: bool = True,
        tools: Sequence[dict] | None = None,
    ) -> list[int]:
        """Token ids of a chat with the generation prompt; see `prompt.encode_chat`."""
        return encode_chat(self.tokenizer, prompt, thinking=thinking, tools=tools)

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

    def new_cache(self) -> CacheState:
        """An empty cache for this model."""
        return CacheState(
            self.model,
            kv_bits=self.kv_bits,
            quantized_kv_start=self.quantized_kv_start,
        )

    def _standard(
        self, cache: CacheState, prompt, max_tokens: int, sampling, logprobs: bool
    ) -> Iterator[tuple[int, float | None]]:
        steps = decode(
            cache,
            [prompt],
            max_tokens,
            BatchSampler(sampling, [prompt]),
            prefill_step_size=self.prefill_step_size,
            logprobs=logprobs,
        )
        for token, logprob in steps:
            yield token.item(), None if logprob is None else logprob.item()

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

    def _detokenize(
        self, steps, max_tokens: int, stop_tokens: frozenset[int], stop: Sequence[str]
    ) -> Iterator[GenerationResponse]:
        detokenizer = StreamingDetokenizer(self.tokenizer, stop_tokens, stop)
        for n, (token, logprob) in enumerate(steps, 1):
            text, finish_reason = detokenizer.add(token, last=n == max_tokens)
            yield GenerationResponse(text, token, logprob, finish_reason)
            if finish_reason:
                return

    def _decode_batch(
        self, prompts, max_tokens: int, stop_tokens: frozenset[int]
    ) -> list[list[int]]:
        """Greedy completions of prompts of equal length, without stop tokens."""
        completions = [[] for _ in prompts]
        unfinished = set(range(len(prompts)))
        steps = decode(
            self.new_cache(),
            prompts,
            max_tokens,
            BatchSampler(GREEDY, prompts),
            prefill_step_size=self.prefill_step_size,
        )
        for tokens, _ in steps:
            for index, token in enumerate(tokens.tolist()):
                if token in stop_tokens:
                    unfinished.discard(index)
                elif index in unfinished:
                    completions[index].append(token)
            if not unfinished:
                break
        return completions

    def _detokenize_all(self, tokens: list[int]) -> str:
        detokenizer = self.tokenizer.detokenizer
        for token in tokens:
            detokenizer.add_token(token)
        detokenizer.finalize()
        return detokenizer.text


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if tokens > 0 and seconds > 0 else None
