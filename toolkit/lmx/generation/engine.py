"""The generator: prompts in, text out, token by token or many prompts at once."""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from ..errors import UserError
from .decode_loop import BatchSampler, decode
from .detokenizer import StreamingDetokenizer
from .kv_cache import CacheState
from .outputs import GenerationResponse, GenerationResult
from .prefix_cache import PrefixCache
from .prompt import Messages, encode_chat, encode_text
from .sampling import Sampling
from .speculative.decoder import SpeculativeDecoder, SpeculativeStats
from .speculative.draft_length import DraftLengthController
from .speculative.proposer import Proposer
from .speculative.verification import Rule

GREEDY = Sampling()
BATCH_SIZE = 32
"""Prompts decoded together by `Generator.complete`."""


class Generator:
    """Generates with a model of mlx-lm and its cache.

    Args:
        model: maps tokens [B, L] and a cache to logits [B, L, V].
        tokenizer: mlx-lm's TokenizerWrapper.
        prefill_step_size: tokens of the prompt per forward pass.
        prefix_cache: what earlier answers have read, to begin from; None = keep nothing
            between calls.
        make_proposer: makes a proposer for every answer, to decode speculatively; answers
            with log-probabilities are decoded plainly.
        controller: how many tokens to guess; it learns from answer to answer.
        rule: how guesses are judged when sampling; see `verify`.
        sequential_verify: verify guesses one at a time; see `Speculator`.
        cache_options: those of `Session`.

    Attributes:
        speculation: how it went with the last answer, if there was a proposer.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        prefill_step_size: int = 512,
        prefix_cache: PrefixCache | None = None,
        make_proposer: Callable[[], Proposer] | None = None,
        draft_length: DraftLengthController | None = None,
        rule: Rule = "rejection",
        sequential_verify: bool = False,
        **cache_options,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.prefill_step_size = prefill_step_size
        self.prefix_cache = prefix_cache
        self.make_proposer = make_proposer
        self.draft_length = draft_length or DraftLengthController()
        self.rule = rule
        self.sequential_verify = sequential_verify
        self.speculative_stats: SpeculativeStats | None = None
        self._cache_options = cache_options
        arguments = getattr(model, "args", None)
        self.max_positions = getattr(arguments, "max_position_embeddings", None)

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
        """Yield the answer token by token.

        Args:
            stop_tokens: ids that end the answer; None = every end-of-sequence id of
                the tokenizer. The one that is hit comes last and has no text.
            stop: texts that end the answer and are no part of it.

        Raises:
            UserError: an empty prompt, or one longer than the model's positions.
        """
        count = self.clamp_max_tokens(prompt, max_tokens)
        session = self._session(prompt)
        if self.make_proposer and not logprobs:
            steps = self._speculative(session, prompt, count, sampling)
        else:
            steps = self._plain(session, prompt, count, sampling, logprobs)
        pieces = self._pieces(steps, count, self.resolve_stop_tokens(stop_tokens), stop)
        return self._remembered(pieces, prompt, session)

    def generate(
        self,
        prompt: Sequence[int],
        *,
        on_token: Callable[[GenerationResponse], object] = lambda piece: None,
        **options,
    ) -> GenerationResult:
        """Generate a whole answer; `options` are those of `stream`."""
        pieces, start = [], time.perf_counter()
        first = last = start
        for piece in self.stream(prompt, **options):
            last = time.perf_counter()
            first = first if pieces else last
            pieces.append(piece)
            on_token(piece)
        reason = pieces[-1].finish_reason if pieces else "length"
        tokens = [piece.token for piece in pieces]
        ended = tokens and tokens[-1] in self.resolve_stop_tokens(
            options.get("stop_tokens")
        )
        return GenerationResult(
            text="".join(piece.text for piece in pieces),
            tokens=tokens[:-1] if ended else tokens,
            prompt_tokens=len(prompt),
            finish_reason=reason,
            ttft_ms=1000 * (first - start) if pieces else None,
            prefill_tokens_per_second=_rate(len(prompt), first - start),
            decode_tokens_per_second=_rate(len(pieces) - 1, last - first),
        )

    def chat(self, prompt: str | Messages, **options) -> GenerationResult:
        """Answer a chat: `generate` on the encoded prompt."""
        return self.generate(self.encode_chat(prompt), **options)

    def batch_generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int = 256,
        stop_tokens: Collection[int] | None = None,
    ) -> list[str]:
        """Greedy answers to many prompts, in their order.

        Prompts of equal length are decoded together: no padding, so nothing about the
        answers changes but the order of the sums inside a matmul.
        """
        alike = defaultdict(list)
        for index, prompt in enumerate(prompts):
            alike[len(prompt), self.clamp_max_tokens(prompt, max_tokens)].append(index)
        stops, texts = self.resolve_stop_tokens(stop_tokens), {}
        for (_, count), indices in alike.items():
            for start in range(0, len(indices), BATCH_SIZE):
                batch = indices[start : start + BATCH_SIZE]
                rows = self._rows([prompts[i] for i in batch], count, stops)
                texts |= zip(batch, map(self._decode, rows), strict=True)
        return [texts[index] for index in range(len(prompts))]

    def encode_chat(
        self, prompt: str | Messages, *, thinking: bool = True
    ) -> list[int]:
        """The tokens of a chat up to where the answer begins; see `chat.encode`."""
        return encode_chat(self.tokenizer, prompt, thinking=thinking)

    def encode_text(self, text: str) -> list[int]:
        """The tokens of bare text; see `chat.encode_text`."""
        return encode_text(self.tokenizer, text)

    def clamp_max_tokens(self, prompt: Sequence[int], max_tokens: int) -> int:
        """How many tokens may be generated: the last one needs no position.

        Raises:
            UserError: an empty prompt, or one longer than the model's positions.
        """
        if not len(prompt):
            raise UserError("the prompt is empty", hint="give at least one token")
        room = max_tokens
        if self.max_positions is not None:
            room = self.max_positions - len(prompt) + 1
        if room < 1 <= max_tokens:
            raise UserError(
                f"the prompt has {len(prompt)} tokens; "
                f"the model has positions for {self.max_positions}",
                hint="shorten the prompt",
            )
        return min(max_tokens, room)

    def resolve_stop_tokens(
        self, stop_tokens: Collection[int] | None
    ) -> frozenset[int]:
        """Those that end an answer: the given ones, else the tokenizer's."""
        return frozenset(
            self.tokenizer.eos_token_ids if stop_tokens is None else stop_tokens
        )

    def new_cache(self) -> CacheState:
        """A session that has read nothing."""
        return CacheState(self.model, **self._cache_options)

    def _session(self, prompt: Sequence[int]) -> CacheState:
        if not self.prefix_cache:
            return self.new_cache()
        return self.prefix_cache.fetch(prompt, self.new_cache)[0]

    def _plain(self, session: CacheState, prompt, count: int, sampling, logprobs: bool):
        steps = decode(
            session,
            [prompt],
            count,
            BatchSampler(sampling, [prompt]),
            prefill_step_size=self.prefill_step_size,
            logprobs=logprobs,
        )
        for token, score in steps:
            yield token.item(), None if score is None else score.item()

    def _speculative(self, session: CacheState, prompt, count: int, sampling: Sampling):
        speculator = SpeculativeDecoder(
            session,
            self.make_proposer(),
            draft_length=self.draft_length,
            sampling=sampling,
            rule=self.rule,
            sequential_verify=self.sequential_verify,
            prefill_step_size=self.prefill_step_size,
        )
        self.speculative_stats = speculator.stats
        for token in speculator.decode(prompt, count):
            yield token, None

    def _remembered(self, pieces, prompt: Sequence[int], session: CacheState):
        """The pieces; when they end, however they do, what was read is kept."""
        tokens = list(prompt)
        try:
            for piece in pieces:
                tokens.append(piece.token)
                yield piece
        finally:
            pieces.close()
            if self.prefix_cache and session.length:
                # Guesses may have stood that nobody wanted any more.
                session.rollback(max(0, session.length - len(tokens)))
                self.prefix_cache.insert(tokens[: session.length], session)

    def _pieces(
        self, steps, count: int, stop_tokens: frozenset[int], stops: Sequence[str]
    ) -> Iterator[GenerationResponse]:
        spoken = StreamingDetokenizer(self.tokenizer, stop_tokens, stops)
        for number, (token, logprob) in enumerate(steps, 1):
            text, reason = spoken.add(token, last=number == count)
            yield GenerationResponse(text, token, logprob, reason)
            if reason:
                return

    def _rows(self, prompts, count: int, stops: frozenset[int]) -> list[list[int]]:
        answers = [[] for _ in prompts]
        unfinished = set(range(len(prompts)))
        steps = decode(
            self.new_cache(),
            prompts,
            count,
            BatchSampler(GREEDY, prompts),
            prefill_step_size=self.prefill_step_size,
        )
        for tokens, _ in steps:
            for row, token in enumerate(tokens.tolist()):
                if token in stops:
                    unfinished.discard(row)
                elif row in unfinished:
                    answers[row].append(token)
            if not unfinished:
                break
        return answers

    def _decode(self, tokens: list[int]) -> str:
        detokenizer = self.tokenizer.detokenizer
        for token in tokens:
            detokenizer.add_token(token)
        detokenizer.finalize()
        return detokenizer.text


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if tokens > 0 and seconds > 0 else None
