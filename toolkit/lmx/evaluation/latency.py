"""How fast a model generates: time to the first token, prefill and decode rates."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..config.text_files import read_text
from ..errors import UserError
from ..generation.engine import Engine
from ..generation.generator import GREEDY, Generator
from ..generation.kv_cache.sequence import CacheState
from ..generation.outputs import GenerationResult
from ..generation.sequence import GenerationRequest
from ..generation.speculative.draft_length import SpeculativeStats
from .memory_bandwidth import shortest_time
from .parity import check_parity

PERCENTILES = (50, 90, 99)
RATES = ("prefill_tokens_per_second", "decode_tokens_per_second")
# Bytes of a corpus.
MAX_CORPUS = 1 << 28
SAMPLE_TEXT = Path(__file__).with_name("sample_text.txt")
BenchmarkArms = dict[str, Callable[[], Generator]]
"""Makers of generators by name. The first one decodes without drafting."""


def measure_latency(
    arms: BenchmarkArms,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int = 64,
    repeats: int = 3,
) -> dict[str, dict]:
    """Time every prompt `repeats` times with every arm, after one warm-up run.

    Every run decodes exactly `max_tokens` (at least 2), past any end of sequence.

    Returns:
        The entries of report.json: `generation` of the first arm, each rate as
        {p50, p90, p99} (see `percentiles`), and `speculation` of the others by name.
    """
    measured = [BenchmarkArm(name, make()) for name, make in arms.items()]
    for number in range(repeats + 1):
        for arm in measured:
            for prompt in prompts[: None if number else 1]:
                arm.decode([[*prompt]], max_tokens, is_warmup=number == 0)
    first, *others = (arm.result(measured[0], with_parity=False) for arm in measured)
    names = ("acceptance_rate", "accepted_length", "speedup")
    return {
        "generation": {name: first[name] for name in ("ttft_ms", *RATES)},
        "speculation": {
            arm.name: {name: result[name] for name in names}
            for arm, result in zip(measured[1:], others, strict=True)
        },
    }


def percentiles(
    values: Sequence[float], *, more_is_better: bool = False
) -> dict[str, float]:
    """{p50, p90, p99}: the value that 50, 90 or 99 percent are at least as good as."""
    return {
        f"p{p}": float(np.percentile(values, 100 - p if more_is_better else p))
        for p in PERCENTILES
    }


def measure_verify_cost(model: Any, *, prompt_length: int) -> float:
    """Time of one more token in a forward pass, as a fraction of a decoding step.

    The mean over passes of 2 to 9 tokens, after a prompt of this length.
    """
    cache = CacheState(model)
    cache.forward(mx.zeros((1, prompt_length), mx.int32))
    cache.evaluate()

    def seconds(count: int) -> float:
        tokens = mx.zeros((1, count), mx.int32)

        def verify() -> None:
            cache.checkpoint()
            mx.eval(cache.forward(tokens))
            cache.rollback(count)

        verify()
        return shortest_time(verify)

    step = seconds(1)
    extra = [(seconds(1 + count) - step) / count for count in (1, 2, 4, 8)]
    return float(np.mean(extra)) / step


def sample_text(corpus: str | Path | None = None) -> str:
    """The text of a file; None = a fixed English text of 900 tokens.

    Raises:
        UserError: the file cannot be read, or is empty.
    """
    text = read_text(Path(corpus or SAMPLE_TEXT), "corpus", max_bytes=MAX_CORPUS)
    if not text.strip():
        raise UserError("the corpus has no text", place=str(corpus))
    return text


def cut_prompts(tokens: Sequence[int], length: int, count: int) -> list[list[int]]:
    """Prompts with equally spaced starts in a text, which repeats after its end."""
    stride = max(1, len(tokens) // count)
    starts = (number * stride for number in range(count))
    return [[tokens[(s + n) % len(tokens)] for n in range(length)] for s in starts]


@dataclass(frozen=True)
class BenchmarkPlan:
    """What `run_benchmark` measures: every prompt length with every batch size.

    Attributes:
        max_tokens: decoded per prompt, past any end of sequence.
        repeats: runs of every case, after one warm-up run.
        check_parity: compare one completion of every proposer with plain decoding.
    """

    prompt_lengths: Sequence[int]
    batch_sizes: Sequence[int]
    max_tokens: int
    repeats: int
    check_parity: bool = False


@dataclass(frozen=True)
class TimedRun:
    """One timed completion, or one timed batch.

    Attributes:
        ttft_ms: milliseconds to the first token of every sequence.
        prefill, decode: tokens per second of all sequences together. In a batch,
            decoding starts after the first token of the last sequence.
    """

    ttft_ms: list[float]
    prefill: float
    decode: float


def run_benchmark(
    tokens: Sequence[int], plan: BenchmarkPlan, arms: BenchmarkArms
) -> Iterator[dict]:
    """Measure every case with every arm; yields each result when it is known.

    Arms alternate, so that a machine that warms up favors none. Batches are decoded
    without drafting: a batch already uses what verification of draft tokens would.

    Args:
        tokens: the text that prompts are cut from.

    Yields:
        `prompt_tokens`, `batch_size`, `decoder`, `ttft_ms`, `prefill_tokens_per_second`
        and `decode_tokens_per_second` (each {p50, p90, p99}), `peak_memory_gb`,
        `speedup` over the first arm and, with a proposer, `acceptance_rate`,
        `accepted_length` and perhaps `parity`.
    """
    for length in plan.prompt_lengths:
        for size in plan.batch_sizes:
            prompts = cut_prompts(tokens, length, size)
            makers = list(arms.items())[: None if size == 1 else 1]
            measured = [BenchmarkArm(name, make()) for name, make in makers]
            for number in range(plan.repeats + 1):
                for arm in measured[:: -1 if number % 2 else 1]:
                    arm.decode(prompts, plan.max_tokens, is_warmup=number == 0)
            for arm in measured:
                result = arm.result(measured[0], with_parity=plan.check_parity)
                case = {"prompt_tokens": length, "batch_size": size}
                yield case | {"decoder": arm.name} | result


class BenchmarkArm:
    """The runs of one generator on one case."""

    def __init__(self, name: str, generator: Generator):
        self.name = name
        self._generator = generator
        self._runs: list[TimedRun] = []
        self._peak_memory_gb = 0.0
        self._stats = SpeculativeStats()
        # Prompt and completion of the last run without a batch.
        self._last: tuple[list[int], GenerationResult] | None = None

    def decode(
        self, prompts: list[list[int]], max_tokens: int, *, is_warmup: bool
    ) -> None:
        """Decode all prompts once."""
        mx.reset_peak_memory()
        if len(prompts) == 1:
            result = self._generator.generate(
                prompts[0], max_tokens=max_tokens, stop_tokens=()
            )
            if self._generator.speculative_stats and not is_warmup:
                self._stats.merge(self._generator.speculative_stats)
            self._last = prompts[0], result
            rates = (getattr(result, rate) for rate in RATES)
            run = TimedRun([result.ttft_ms], *rates)
        else:
            lengths = [max_tokens] * len(prompts)
            run = run_batch(self._generator.model, prompts, lengths)
        self._peak_memory_gb = max(self._peak_memory_gb, mx.get_peak_memory() / 1e9)
        if not is_warmup:
            self._runs.append(run)

    @property
    def _decode_rates(self) -> dict[str, float]:
        return percentiles([run.decode for run in self._runs], more_is_better=True)

    def result(self, first: "BenchmarkArm", *, with_parity: bool) -> dict:
        """What `run_benchmark` yields of an arm, compared with the first one."""
        prefill = [run.prefill for run in self._runs]
        result = {
            "ttft_ms": percentiles([ms for run in self._runs for ms in run.ttft_ms]),
            RATES[0]: percentiles(prefill, more_is_better=True),
            RATES[1]: self._decode_rates,
            "peak_memory_gb": self._peak_memory_gb,
            "speedup": self._decode_rates["p50"] / first._decode_rates["p50"],
        }
        if not self._generator.speculative_stats:
            return result
        result["acceptance_rate"] = self._stats.acceptance_rate
        result["accepted_length"] = self._stats.accepted_length
        if with_parity:
            prompt, last = self._last
            cache = self._generator.engine.new_cache()
            report = check_parity(cache, prompt, last.tokens, GREEDY)
            result["parity"] = report.to_json()
        return result


def run_batch(
    model: Any, prompts: list[list[int]], max_tokens: Sequence[int]
) -> TimedRun:
    """Time a batch in which prompt n decodes `max_tokens[n]` tokens, 2 or more."""
    engine = Engine(model, max_batch_size=len(prompts))
    first_times: dict[GenerationRequest, float] = {}
    steps = []
    start = time.perf_counter()
    for prompt, count in zip(prompts, max_tokens, strict=True):
        engine.add_request(GenerationRequest(prompt, count))
    while not engine.idle:
        outputs = engine.step()
        steps.append((time.perf_counter() - start, len(outputs)))
        for output in outputs:
            first_times.setdefault(output.request, steps[-1][0])
    last_first, end = max(first_times.values()), steps[-1][0]
    decoded = sum(count for seconds, count in steps if seconds > last_first)
    return TimedRun(
        [1000 * seconds for seconds in first_times.values()],
        sum(map(len, prompts)) / last_first,
        decoded / (end - last_first),
    )
