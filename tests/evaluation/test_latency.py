"""Speed measurements of generators with known timings."""

from types import SimpleNamespace

import pytest
from lmx.evaluation.latency import measure_latency
from lmx.generation.speculative.draft_length import SpeculativeStats


class Clocked:
    """A generator whose n-th run takes n units of time. Two rounds of two draft tokens
    per completion; n tokens are accepted."""

    def __init__(self, make_proposer=None):
        self.calls = []
        self.make_proposer = make_proposer

    def generate(self, prompt, *, max_tokens, stop_tokens):
        self.calls.append((prompt, max_tokens, stop_tokens))
        n = len(self.calls) - 1
        self.speculative_stats = SpeculativeStats()
        for accepted in (min(n, 2), min(2, max(0, n - 2))):
            self.speculative_stats.add_round(2, accepted)
        return SimpleNamespace(
            ttft_ms=float(n) if n else 1e9,
            prefill_tokens_per_second=100.0 * n,
            decode_tokens_per_second=10.0 * n,
        )


def test_latency_percentiles_skip_the_warmup():
    generator, prompts = Clocked(), [[1], [2, 2]]
    arms = {"standard": lambda: generator}
    speed = measure_latency(arms, prompts, max_tokens=9, repeats=50)
    assert speed["speculation"] == {}
    assert len(generator.calls) == 101
    assert generator.calls[1:5] == [(p, 9, ()) for p in prompts * 2]
    rates = speed["generation"]
    assert rates["ttft_ms"] == pytest.approx({"p50": 50.5, "p90": 90.1, "p99": 99.01})
    # The p99 of a rate is its slow end: 99% of the runs reach it.
    assert rates["decode_tokens_per_second"] == pytest.approx(
        {"p50": 505.0, "p90": 109.0, "p99": 19.9}
    )
    assert rates["prefill_tokens_per_second"]["p50"] == pytest.approx(5050)


def test_speculation_stats_skip_the_warmup():
    generator = Clocked(make_proposer=print)
    arms = {"standard": Clocked, "draft": lambda: generator}
    speed = measure_latency(arms, [[1], [2], [3]], max_tokens=9, repeats=1)
    result = speed["speculation"]["draft"]
    assert [call[0] for call in generator.calls] == [[1], [1], [2], [3]]
    # The completions accept 1, 2 and 3 tokens in six rounds. A token counts as
    # verified only if the tokens before it are accepted.
    assert result["accepted_length"] == pytest.approx((6 + 6) / 6)
    assert result["acceptance_rate"] == pytest.approx(6 / (6 + 4))
    assert result["speedup"] == pytest.approx(1.0)
