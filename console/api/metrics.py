"""``/metrics`` for Prometheus.

Every number comes from one true read of the router, the owner of all of them, so a scrape tells the
same whichever web worker it lands on, and counters never jump back between two of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_GET
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from console.access import open_to_all
from console.services import fleet
from engine.errors import QuarterdeckError
from engine.latency import EDGES_S
from engine.messages import FleetSnapshot, RankView, WorkerView

RANK_GAUGES = {
    "running": "Requests that hold a slot",
    "waiting": "Requests that wait for a slot",
    "kv_used": "Tokens in KV blocks that live requests hold",
    "kv_total": "Tokens that the KV pool holds",
    "tokens_per_s": "Output tokens per second, over the last seconds",
    "step_s": "Seconds of the newest step",
    "rss_bytes": "Resident memory",
    "epoch": "Epoch of the weights in use",
    "seen_at": "Unix time of the newest heartbeat",
}
RANK_COUNTERS = {
    "prompt_tokens": "Prompt tokens scheduled since the rank's start",
    "cached_tokens": "Prompt tokens that came from the prefix cache since the rank's start",
    "output_tokens": "Tokens sampled since the rank's start",
    "retractions": "Requests retracted for want of KV since the rank's start",
}
RANK_HISTOGRAMS = {
    "ttft": ("time_to_first_token", "Seconds from the receipt of a request to its first token"),
    "itl": ("inter_token_latency", "Seconds between two tokens of one request"),
}
WORKER_GAUGES = {
    "streams": "Open requests of this client",
    "lag_s": "Lag of its event loop in seconds",
    "rss_bytes": "Resident memory",
}


@require_GET
@open_to_all
async def metrics(request: HttpRequest) -> HttpResponse:
    try:
        snapshot = await fleet.read_snapshot()
    except QuarterdeckError:
        snapshot = None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(FleetCollector(snapshot))
    return HttpResponse(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)


class FleetCollector(Collector):
    """One snapshot as metric families; without one, only ``quarterdeck_engine_up 0``."""

    def __init__(self, snapshot: FleetSnapshot | None) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        snapshot = self._snapshot
        state = snapshot.engine.state if snapshot else "unreachable"
        up = GaugeMetricFamily(
            "quarterdeck_engine_up", "The engine takes requests", labels=["state"]
        )
        up.add_metric([state], float(state in ("running", "degraded", "mixed")))
        yield up
        if snapshot is not None:
            yield from _of_ranks(snapshot.ranks)
            yield from _delays(snapshot.ranks)
            yield from _of_workers(snapshot.workers)
            yield from _of_router(snapshot.counters)


def _of_ranks(ranks: list[RankView]) -> Iterator[Metric]:
    labels = ["dp", "tp"]
    for name, text in RANK_GAUGES.items():
        gauge = GaugeMetricFamily(f"quarterdeck_rank_{name}", text, labels=labels)
        for rank in ranks:
            gauge.add_metric([str(rank.dp), str(rank.tp)], float(getattr(rank, name)))
        yield gauge
    for name, text in RANK_COUNTERS.items():
        counter = CounterMetricFamily(f"quarterdeck_rank_{name}", text, labels=labels)
        for rank in ranks:
            counter.add_metric([str(rank.dp), str(rank.tp)], float(getattr(rank, name)))
        yield counter


def _delays(ranks: list[RankView]) -> Iterator[Metric]:
    """Of the ranks that lead a group and have reported."""
    edges = [*map(str, EDGES_S), "+Inf"]
    for field, (name, text) in RANK_HISTOGRAMS.items():
        family = HistogramMetricFamily(f"quarterdeck_rank_{name}_seconds", text, labels=["dp"])
        for rank in ranks:
            histogram = getattr(rank, field)
            if histogram.counts:
                buckets = list(zip(edges, accumulate(histogram.counts), strict=True))
                family.add_metric([str(rank.dp)], buckets, histogram.sum_s)
        yield family


def _of_workers(workers: list[WorkerView]) -> Iterator[Metric]:
    for name, text in WORKER_GAUGES.items():
        gauge = GaugeMetricFamily(f"quarterdeck_worker_{name}", text, labels=["kind", "id"])
        for worker in workers:
            gauge.add_metric([worker.kind, worker.id], float(getattr(worker, name)))
        yield gauge


def _of_router(counters: dict[str, int]) -> Iterator[Metric]:
    live = GaugeMetricFamily("quarterdeck_live_requests", "Requests between reservation and end")
    live.add_metric([], float(counters.get("live_requests", 0)))
    yield live
    events = CounterMetricFamily(
        "quarterdeck_router_events", "What the router counted since its start", labels=["event"]
    )
    for name, value in sorted(counters.items()):
        if name != "live_requests":
            events.add_metric([name], float(value))
    yield events
