"""How fast a model generates: time to the first token, prefill and decode rates."""

from collections.abc import Sequence

from ..generation.engine import Generator
from ..generation.outputs import GenerationResult
from ..generation.speculative.decoder import SpeculativeStats

PERCENTILES = (50, 90, 99)


def measure_latency(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int = 64,
    repeats: int = 3,
) -> dict[str, dict[str, float]]:
    """Time every prompt `repeats` times, after one warm-up that does not count.

    Every run decodes exactly `max_tokens` (at least 2), past any end of sequence.

    Returns:
        `ttft_ms`, `prefill_tokens_per_second`, `decode_tokens_per_second`, each as
        {p50, p90, p99}: the value that so many percent of the runs are no worse than.
    """

    def run(prompt) -> GenerationResult:
        return generator.generate(prompt, max_tokens=max_tokens, stop_tokens=())

    run(prompts[0])
    runs = [run(prompt) for _ in range(repeats) for prompt in prompts]
    return {
        "ttft_ms": percentiles([r.ttft_ms for r in runs]),
        "prefill_tokens_per_second": percentiles(
            [r.prefill_tokens_per_second for r in runs], more_is_better=True
        ),
        "decode_tokens_per_second": percentiles(
            [r.decode_tokens_per_second for r in runs], more_is_better=True
        ),
    }


def percentiles(
    values: Sequence[float], *, more_is_better: bool = False
) -> dict[str, float]:
    """{p50, p90, p99}: the value that so many percent are no worse than."""
    import numpy as np

    return {
        f"p{p}": float(np.percentile(values, 100 - p if more_is_better else p))
        for p in PERCENTILES
    }


def measure_speculation(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int = 64,
    plain: float,
) -> dict[str, float | list[float] | None]:
    """How much a generator's proposer gains, after one warm-up that does not count.

    Args:
        plain: tokens per second decoded without it.

    Returns:
        `acceptance_rate` (share of the guesses that stood), `accepted_length` (both None
        where nothing was guessed), `acceptance_rate_by_position`, a list, and `speedup`.
    """
    total, rates = SpeculativeStats(), []
    for number, prompt in enumerate([prompts[0], *prompts]):
        run = generator.generate(prompt, max_tokens=max_tokens, stop_tokens=())
        if number:
            rates.append(run.decode_tokens_per_second)
            total.merge(generator.speculative_stats)
    return {
        "acceptance_rate": total.acceptance_rate,
        "acceptance_rate_by_position": total.acceptance_rate_by_position,
        "accepted_length": total.accepted_length,
        "speedup": percentiles(rates)["p50"] / plain,
    }
