"""Metrics for Prometheus, with vLLM's names where the meaning is the same."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ragkv.engine.reuse import EngineStatus
from ragkv.report.account import ReuseReport

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_SOURCES = {
    "sink": "sink",
    "exact": "history_exact",
    "repaired": "history_repaired",
    "reused": "reused",
    "version": "version",
    "recomputed": "recomputed",
    "fresh": "fresh",
}
"""Fields of a report by source of prompt tokens."""


class _Engines(Collector):
    """Bytes and hits by tier, and healed tokens, read at each scrape."""

    def __init__(self, status: Callable[[], Iterable[EngineStatus]]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Yield the sums over the namespaces."""
        held, hits, healed = Counts[str](), Counts[str](), 0
        for status in self._status():
            healed += status.healed_tokens
            for tier in status.tiers:
                hits[tier.name] += tier.hits
                if tier.nbytes is not None:
                    held[tier.name] += tier.nbytes
        what = "Tokens of chunks computed exactly while no request ran."
        yield CounterMetricFamily("ragkv:healed_tokens", what, value=healed)
        nbytes = GaugeMetricFamily("ragkv:tier_bytes", "Bytes of KV by tier.", labels=["tier"])
        served = CounterMetricFamily("ragkv:tier_hits", "Hits by tier.", labels=["tier"])
        for family, counts in ((nbytes, held), (served, hits)):
            for name, count in counts.items():
                family.add_metric([name], count)
            yield family


class ServerMetrics:
    """One application's metrics, in its own registry.

    Parameters
    ----------
    running, waiting
        Return the current number of answers.
    status
        Returns the status of all namespaces' engines.
    """

    def __init__(
        self,
        running: Callable[[], float],
        waiting: Callable[[], float],
        status: Callable[[], Iterable[EngineStatus]],
    ) -> None:
        self._registry = CollectorRegistry()
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From the engine's call to the first token."
        )
        self._token = self._histogram(
            "inter_token_latency_seconds", "Mean time between an answer's tokens."
        )
        self._answer = self._histogram(
            "e2e_request_latency_seconds", "From the engine's call to the last token."
        )
        self._wait = self._histogram("request_queue_time_seconds", "Waiting for the model.")
        self._repair = self._histogram("repair_seconds", "Parts of the first token's time.", "step")
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts.")
        self._generated = self._counter("generation_tokens", "Tokens of answers.")
        self._sources = self._counter(
            "prompt_tokens_by_source", "Tokens of prompts by source.", "source"
        )
        self._misses = self._counter("chunk_misses", "Known chunks without reuse.", "reason")
        self._finished = self._counter("request_success", "Ended answers.", "finished_reason")
        self._handovers = self._counter("handovers", "Prompts with rows for vLLM.", "outcome")
        self._errors = self._counter("request_errors", "Refused and failed requests.", "code")
        for name, what, count in (
            ("num_requests_running", "Answers that are being generated.", running),
            ("num_requests_waiting", "Answers that wait for the model.", waiting),
        ):
            Gauge(f"ragkv:{name}", what, registry=self._registry).set_function(count)
        self._registry.register(_Engines(status))

    def _histogram(self, name: str, what: str, *labels: str) -> Histogram:
        return Histogram(f"ragkv:{name}", what, labels, registry=self._registry, buckets=_SECONDS)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"ragkv:{name}", what, labels, registry=self._registry)

    def record_answer(self, report: ReuseReport, finish_reason: str) -> None:
        """Count a whole answer."""
        self._first_token.observe(report.ttft_s)
        self._answer.observe(report.total_s)
        if report.decode.tokens > 1:
            self._token.observe(report.decode.ms_per_token / 1000)
        for step, seconds in report.steps.items():
            histogram = self._wait if step == "wait" else self._repair.labels(step)
            histogram.observe(seconds)
        self._prompt.inc(report.tokens.prompt)
        self._generated.inc(report.decode.tokens)
        for source, name in _SOURCES.items():
            self._sources.labels(source).inc(getattr(report.tokens, name))
        for miss in report.misses:
            self._misses.labels(miss.reason).inc()
        self._finished.labels(finish_reason).inc()
        if report.tokens.handed_over or report.not_loaded:
            self._handovers.labels(report.not_loaded or "loaded").inc()

    def record_abort(self, answers: int = 1) -> None:
        """Count answers whose client has left."""
        self._finished.labels("abort").inc(answers)

    def record_error(self, code: str) -> None:
        """Count a refused or failed request."""
        self._errors.labels(code).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
