"""What every means of speed gains on this machine, one on top of the other."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .. import cpu
from ..errors import UserError
from ..generation.batching import BatchGenerator, GenerationRequest
from ..generation.decode_loop import BatchSampler, decode
from ..generation.engine import GREEDY, Generator
from ..generation.kv_cache import CacheState
from ..generation.speculative.draft_length import DraftLengthController
from ..generation.speculative.proposer import Proposer
from ..models.loader import LoadedModel

WITHOUT_CACHE = 8
"""Tokens decoded without a cache, each of which reads the whole text again."""
BITS, GROUP, CACHE_BITS = 4, 64, 8


@dataclass(frozen=True)
class AblationStep:
    """One rung.

    Attributes:
        compared_with: the rung that this one adds something to.
        rate: tokens per second, of all requests together.
        bytes: read for a token at least: weights and cache, shared by a batch.
        note: why it could not be measured.
    """

    name: str
    compared_with: str | None
    rate: float | None = None
    bytes: float | None = None
    note: str | None = None


class SpeedAblation:
    """Measures the rungs; the same prompts on all of them.

    Args:
        loaded: a dense model is rounded to 4 bits on the way, and stays so.
        prompts: as many as the batch has rows; the first alone where there is none.
        tokens: decoded of every prompt.
        propose, controller: for the last rung, as a `Generator` takes them.
        repeats: runs, of which the fastest counts.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        propose: Callable[[], Proposer],
        controller: DraftLengthController,
        repeats: int = 3,
    ):
        self.loaded, self.model = loaded, loaded.model
        self.prompts, self.tokens = prompts, tokens
        self.guessing = {"make_proposer": propose, "draft_length": controller}
        self.repeats = repeats

    def climb(self, traffic: float) -> list[dict]:
        """All rungs.

        Args:
            traffic: bytes per second that this machine reads.

        Returns:
            Of each: `step`, `tokens_per_second`, `compared_with`, `speedup` over that
            one, `cumulative` over the first, `roofline_tokens_per_second` (traffic over
            the bytes of a token), `roofline_share`, and `note`.
        """
        rates, rows = {}, []
        for step in self._steps():
            rates[step.name] = step.rate
            roofline = traffic / step.bytes if step.bytes else None
            rows.append(
                {
                    "step": step.name,
                    "tokens_per_second": step.rate,
                    "compared_with": step.compared_with,
                    "speedup": _ratio(step.rate, rates.get(step.compared_with)),
                    "cumulative": _ratio(step.rate, next(iter(rates.values()))),
                    "roofline_tokens_per_second": roofline,
                    "roofline_share": _ratio(step.rate, roofline),
                    "note": step.note,
                }
            )
        return rows

    def _steps(self) -> Iterator[AblationStep]:
        rate = self._best(self._without_cache, WITHOUT_CACHE)
        yield AblationStep("no cache", None, rate, self._bytes(1))
        yield AblationStep("cache", "no cache", *self._alone())
        best = "cache"
        if self._round():
            best = "4-bit weights"
            yield AblationStep(best, "cache", *self._alone())
        try:
            yield AblationStep("8-bit cache", best, *self._alone(kv_bits=CACHE_BITS))
        except UserError as error:
            yield AblationStep("8-bit cache", best, note=error.message)
        rows = len(self.prompts)
        static, useful = f"batch of {rows}, static", sum(self._lengths())
        rate = self._best(self._static, useful)
        yield AblationStep(static, best, rate, self._bytes(rows))
        try:
            rate = self._best(self._continuous, useful)
            name = f"batch of {rows}, continuous"
            yield AblationStep(name, static, rate, self._bytes(rows))
        except UserError as error:
            yield AblationStep("batch, continuous", static, note=error.message)
        yield AblationStep("speculative", best, *self._alone(**self.guessing))

    def _alone(self, **options) -> tuple[float, float]:
        """Tokens per second of one request, and the bytes of a token."""
        generator = Generator(self.model, self.loaded.tokenizer, **options)
        asked = {"max_tokens": self.tokens, "stop_tokens": ()}
        runs = [generator.generate(self.prompts[0], **asked) for _ in self._runs()]
        rate = max(run.decode_tokens_per_second for run in runs[1:])
        return rate, self._bytes(1, kv_bits=options.get("kv_bits"))

    def _runs(self) -> range:
        return range(self.repeats + 1)

    def _best(self, work: Callable[[], float], tokens: int) -> float:
        """Tokens per second of the fastest run after the first."""
        return tokens / min([work() for _ in self._runs()][1:])

    def _without_cache(self) -> float:
        text = mx.array([self.prompts[0]], mx.int32)
        start = time.perf_counter()
        for _ in range(WITHOUT_CACHE):
            token = mx.argmax(self.model(text)[:, -1], axis=-1).astype(mx.int32)
            text = mx.concatenate([text, token[:, None]], axis=1)
            mx.eval(text)
        return time.perf_counter() - start

    def _lengths(self) -> list[int]:
        """Answers of a batch end one after the other, the last at `tokens`."""
        rows = len(self.prompts)
        return [max(1, self.tokens * (row + 1) // rows) for row in range(rows)]

    def _static(self) -> float:
        """Seconds of decoding until the longest answer ends; none leaves before."""
        choose = BatchSampler(GREEDY, self.prompts)
        session = CacheState(self.model)
        steps = decode(
            session, self.prompts, self.tokens, choose, prefill_step_size=512
        )
        next(steps)[0].tolist()
        start = time.perf_counter()
        for tokens, _ in steps:
            tokens.tolist()
        return time.perf_counter() - start

    def _continuous(self) -> float:
        """Seconds of decoding the same answers, each of which leaves when it ends."""
        batcher = BatchGenerator(self.model, max_batch_size=len(self.prompts))
        for prompt, length in zip(self.prompts, self._lengths(), strict=True):
            batcher.submit(GenerationRequest(prompt, length))
        waiting = {id(prompt) for prompt in self.prompts}
        start = time.perf_counter()
        while not batcher.idle:
            said = {id(request.prompt) for request, *_ in batcher.step()}
            if waiting:
                waiting -= said
                start = time.perf_counter()
        return time.perf_counter() - start

    def _round(self) -> bool:
        """Round a dense model to 4 bits where its layers have whole groups."""
        if "quantization" in self.loaded.config:
            return False

        def fits(_: str, module: nn.Module) -> bool:
            has_weight = hasattr(module, "to_quantized") and "weight" in module
            return has_weight and module.weight.shape[-1] % GROUP == 0

        nn.quantize(self.model, GROUP, BITS, class_predicate=fits)
        mx.eval(self.model.parameters())
        cpu.enable(self.model)
        return True

    def _bytes(self, rows: int, kv_bits: int | None = None) -> float:
        """Read for a token: its share of the weights, and its own cache."""
        session = CacheState(self.model, kv_bits=kv_bits)
        length = len(self.prompts[0]) + self.tokens // 2
        session.forward(mx.zeros((1, length), mx.int32))
        session.evaluate()
        held = sum(map(_read, session.layer_caches))
        return weight_bytes(self.model, self.loaded.config) / rows + held


def weight_bytes(model: Any, config: dict) -> int:
    """Bytes of the weights that one token reads: all but embeddings and idle experts.

    An embedding that is the head, too, is read whole.
    """
    config = config | config.get("text_config", {})
    tied = config.get("tie_word_embeddings", True)
    active, experts = config.get("num_experts_per_tok"), _experts(config)
    total = 0
    for path, value in tree_flatten(model.parameters()):
        if "embed" in path and not tied:
            continue
        is_expert = active and experts and value.ndim == 3 and len(value) == experts
        total += value.nbytes * active // experts if is_expert else value.nbytes
    return total


def _read(cache: Any) -> float:
    """Bytes of a cache that the next token reads; buffers have room for more."""
    keys = getattr(cache, "keys", None)
    if keys is None:
        return cache.nbytes
    room = (keys if isinstance(keys, mx.array) else keys[0]).shape[-2]
    positions = min(cache.offset, getattr(cache, "max_size", cache.offset))
    return cache.nbytes * positions / room


def _experts(config: dict) -> int | None:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((config[name] for name in names if config.get(name)), None)


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None
