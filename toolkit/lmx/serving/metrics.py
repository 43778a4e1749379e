"""Metrics for Prometheus. Names are vLLM's with the prefix `lmx:`, where they mean the
same, so that its dashboards need one change."""

from collections.abc import Callable, Iterable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .choice import Choice
from .engine_thread import EngineState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
GAUGES = {
    "num_requests_running": "Requests that are decoded.",
    "num_requests_waiting": "Requests that wait or are prefilled.",
    "kv_cache_bytes": "Bytes of all keys and values, the prefix cache too.",
    "kv_cache_usage_perc": "Share of the memory for keys and values; 1 = all.",
}
COUNTERS = {
    "num_preemptions": "Requests that gave their place to others.",
    "spec_decode_num_drafts": "Verifications of draft tokens.",
    "spec_decode_num_draft_tokens": "Draft tokens.",
    "spec_decode_num_accepted_tokens": "Accepted draft tokens.",
}


class Metrics:
    """The metrics of a server.

    Args:
        model: the name that the model is served under.
        state: the present state of the engine.
    """

    def __init__(self, model: str, state: Callable[[], EngineState]):
        self._model, self._state = model, state
        disable_created_metrics()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts.")
        about = "Tokens of prompts, for which the cache was asked."
        self._queries = self._counter("prefix_cache_queries", about)
        about = "Tokens of prompts that the cache had."
        self._hits = self._counter("prefix_cache_hits", about)
        self._generated = self._counter("generation_tokens", "Tokens of completions.")
        about = "Completions by the reason of their end."
        self._success = self._counter("request_success", about, "finished_reason")
        about = "Answers with an error by their status."
        self._errors = self._counter("request_errors", about, "status")
        about = "From the request to the first token."
        self._ttft = self._histogram("time_to_first_token_seconds", about)
        name, about = "inter_token_latency_seconds", "Between two tokens."
        self._inter_token = self._histogram(name, about, TOKEN_SECONDS)
        about = "From the request to the last token."
        self._latency = self._histogram("e2e_request_latency_seconds", about)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        names = ("model_name", *labels)
        return Counter(f"lmx:{name}", about, names, registry=self._registry)

    def _histogram(
        self, name: str, about: str, buckets: tuple[float, ...] = SECONDS
    ) -> Histogram:
        options = {"buckets": buckets, "registry": self._registry}
        histogram = Histogram(f"lmx:{name}", about, ("model_name",), **options)
        return histogram.labels(self._model)

    def collect(self) -> Iterable[Metric]:
        """The metrics of the engine, for the registry."""
        state = self._state()
        values = {
            "num_requests_running": state.running,
            "num_requests_waiting": state.waiting,
            "kv_cache_bytes": state.kv_bytes,
            "kv_cache_usage_perc": state.kv_bytes / max(1, state.kv_memory),
            "num_preemptions": state.preemptions,
            "spec_decode_num_drafts": state.draft_rounds,
            "spec_decode_num_draft_tokens": state.draft_tokens,
            "spec_decode_num_accepted_tokens": state.accepted_tokens,
        }
        kinds = ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS))
        for kind, names in kinds:
            for name, about in names.items():
                metric = kind(f"lmx:{name}", about, labels=["model_name"])
                metric.add_metric([self._model], values[name])
                yield metric

    def record(self, choice: Choice, arrival: float) -> None:
        """Count a completion that has ended, or that its client has left.

        Args:
            arrival: time of the request.
        """
        reason = choice.finish_reason or "abort"
        self._success.labels(self._model, reason).inc()
        if choice.first:
            self._ttft.observe(choice.first - arrival)
            self._latency.observe(choice.last - arrival)
        for seconds in choice.intervals:
            self._inter_token.observe(seconds)

    def record_tokens(self, count: int) -> None:
        """Count tokens of completions, as they come."""
        self._generated.labels(self._model).inc(count)

    def record_prompt(self, tokens: int, cached: int) -> None:
        """Count a prompt."""
        self._prompt.labels(self._model).inc(tokens)
        self._queries.labels(self._model).inc(tokens)
        self._hits.labels(self._model).inc(cached)

    def record_error(self, status: int) -> None:
        """Count an answer with an error."""
        self._errors.labels(self._model, str(status)).inc()

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)
