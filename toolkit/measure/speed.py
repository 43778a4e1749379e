"""How fast a model generates: time to the first token, prefill and decode rates."""

from collections.abc import Sequence

from ..generate.answers import Generation
from ..generate.engine import Generator

PERCENTILES = (50, 90, 99)


def measure_speed(
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

    def run(prompt) -> Generation:
        return generator.generate(prompt, max_tokens=max_tokens, stop_tokens=())

    run(prompts[0])
    runs = [run(prompt) for _ in range(repeats) for prompt in prompts]
    return {
        "ttft_ms": _tail([r.ttft_ms for r in runs]),
        "prefill_tokens_per_second": _tail(
            [r.prefill_tokens_per_second for r in runs], more_is_better=True
        ),
        "decode_tokens_per_second": _tail(
            [r.decode_tokens_per_second for r in runs], more_is_better=True
        ),
    }


def _tail(values: list[float], *, more_is_better: bool = False) -> dict[str, float]:
    import numpy as np

    return {
        f"p{p}": float(np.percentile(values, 100 - p if more_is_better else p))
        for p in PERCENTILES
    }
