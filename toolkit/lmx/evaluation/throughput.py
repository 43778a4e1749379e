"""How fast a model generates, by prompt length, batch size and proposer."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..generation.batching import BatchGenerator, GenerationRequest
from ..generation.engine import GREEDY, Generator
from ..generation.outputs import GenerationResult
from ..generation.speculative.decoder import SpeculativeStats
from ..generation.speculative.parity import check_parity
from .latency import percentiles

RATES = ("prefill_tokens_per_second", "decode_tokens_per_second")
BenchmarkArms = dict[str, Callable[[], Generator]]
"""Columns by name: each makes a generator for a case. The first decodes plainly."""


@dataclass(frozen=True)
class TimedRun:
    """One timed answer, or one timed batch.

    Attributes:
        first: milliseconds to the first token, of every row.
        prefill, decode: tokens per second, of all rows together. In a batch, decoding
            is what follows the last row's first token.
    """

    first: list[float]
    prefill: float
    decode: float


@dataclass(frozen=True)
class BenchmarkPlan:
    """What is measured: every length of prompt with every number of rows.

    Attributes:
        tokens: decoded of every prompt, past any end of sequence.
        repeats: runs of every case, after one that does not count.
    """

    lengths: Sequence[int]
    batches: Sequence[int]
    tokens: int
    repeats: int
    check_parity: bool = False
    """Compare an answer of every proposer with plain decoding."""


def sample_text() -> str:
    """Text of no model in particular: our own source code."""
    files = sorted((Path(__file__).parents[1] / "generation").glob("*.py"))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def prompts(tokens: Sequence[int], length: int, rows: int) -> list[list[int]]:
    """Stretches of a text, one for every row, from the start again where it ends."""
    step = max(1, len(tokens) // rows)
    starts = (row * step for row in range(rows))
    return [[tokens[(s + n) % len(tokens)] for n in range(length)] for s in starts]


def run_benchmark(
    tokens: Sequence[int], plan: BenchmarkPlan, ways: BenchmarkArms
) -> Iterator[dict]:
    """The figures of every case and column, as they are known.

    Columns take turns, so that a machine that warms up favours none. Batches are
    decoded plainly: verifying needs the rows that a batch fills.

    Args:
        tokens: the text that prompts are cut from.

    Yields:
        `prompt_tokens`, `batch_size`, `decoder`, `ttft_ms`, `prefill_tokens_per_second`
        and `decode_tokens_per_second` (each {p50, p90, p99}), `peak_memory_gb`,
        `speedup` over the first column and, with a proposer, `acceptance_rate`,
        `accepted_length` and perhaps `parity`.
    """
    for length in plan.lengths:
        for rows in plan.batches:
            texts = prompts(tokens, length, rows)
            chosen = list(ways.items())[: None if rows == 1 else 1]
            measured = [BenchmarkArm(name, make()) for name, make in chosen]
            for number in range(plan.repeats + 1):
                for column in measured[:: -1 if number % 2 else 1]:
                    column.run(texts, plan.tokens, counts=number > 0)
            for column in measured:
                figures = column.figures(measured[0], exactly=plan.check_parity)
                case = {"prompt_tokens": length, "batch_size": rows}
                yield case | {"decoder": column.name} | figures


class BenchmarkArm:
    """The runs of one way to decode."""

    def __init__(self, name: str, generator: Generator):
        self.name = name
        self._generator = generator
        self._runs: list[TimedRun] = []
        self._peak = 0.0
        self._speculation = SpeculativeStats()
        # Prompt and answer of the last run of one row.
        self._last: tuple[list[int], GenerationResult] | None = None

    def run(self, texts: list[list[int]], tokens: int, *, counts: bool) -> None:
        """Decode once; the first time is a warm-up."""
        mx.reset_peak_memory()
        if len(texts) == 1:
            done = self._alone(texts[0], tokens, counts)
        else:
            done = run_batch(self._generator.model, texts, [tokens] * len(texts))
        self._peak = max(self._peak, mx.get_peak_memory() / 1e9)
        if counts:
            self._runs.append(done)

    def _alone(self, prompt: list[int], tokens: int, counts: bool) -> TimedRun:
        done = self._generator.generate(prompt, max_tokens=tokens, stop_tokens=())
        if counts and self._generator.make_proposer:
            self._speculation.merge(self._generator.speculative_stats)
        self._last = prompt, done
        rates = (getattr(done, rate) for rate in RATES)
        return TimedRun([done.ttft_ms], *rates)

    @property
    def _decode(self) -> dict[str, float]:
        return percentiles([run.decode for run in self._runs], more_is_better=True)

    def figures(self, first: "BenchmarkArm", *, exactly: bool) -> dict:
        """What `bench` yields of a column."""
        prefill = [run.prefill for run in self._runs]
        figures = {
            "ttft_ms": percentiles([ms for run in self._runs for ms in run.first]),
            RATES[0]: percentiles(prefill, more_is_better=True),
            RATES[1]: self._decode,
            "peak_memory_gb": self._peak,
            "speedup": self._decode["p50"] / first._decode["p50"],
        }
        if not self._generator.make_proposer:
            return figures
        figures["acceptance_rate"] = self._speculation.acceptance_rate
        figures["accepted_length"] = self._speculation.accepted_length
        if exactly:
            prompt, done = self._last
            fresh = self._generator.new_cache()
            found = check_parity(fresh, prompt, done.tokens, GREEDY)
            figures["parity"] = found.to_json()
        return figures


def run_batch(model: Any, texts: list[list[int]], tokens: Sequence[int]) -> TimedRun:
    """Time a batch in which row n decodes `tokens[n]` tokens, 2 or more."""
    batcher, first, steps = BatchGenerator(model, max_batch_size=len(texts)), {}, []
    start = time.perf_counter()
    for text, count in zip(texts, tokens, strict=True):
        batcher.submit(GenerationRequest(text, count))
    while not batcher.idle:
        found = batcher.step()
        steps.append((time.perf_counter() - start, len(found)))
        for request, *_ in found:
            first.setdefault(request, steps[-1][0])
    last, end = max(first.values()), steps[-1][0]
    late = sum(count for moment, count in steps if moment > last)
    prefill = sum(map(len, texts)) / last
    return TimedRun([1000 * s for s in first.values()], prefill, late / (end - last))
