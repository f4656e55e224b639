"""`GET /metrics`: what the daemon counts, with names, units and help, for Prometheus.

Everything is read when it is asked for, from plain numbers that their owners keep. Labels have
few values, all known beforehand: no session, no chunk, no text of a client.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from ramakv import __version__
from ramakv.actors.backend import BackendActor
from ramakv.actors.journal import Journal
from ramakv.core.breaker import BreakerState
from ramakv.core.tallies import EventTallies, Histogram
from ramakv.web.operable import Operable

OUTCOMES = {
    200: "ok",
    400: "bad_request",
    401: "unauthorized",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    409: "conflict",
    413: "too_large",
    500: "internal",
    503: "unavailable",
}
"""What an event's status means, as the label `outcome` says it."""

UNREAD = "unread"
"""The label `type` of what never came to be an event."""

REFERENCES = ((1, "1"), (2, "2"), (4, "3-4"), (8, "5-8"), (16, "9-16"), (64, "17-64"))
REFERENCES_ABOVE = "65+"
"""The label `references`: so many up to the bound, and those above all bounds."""

OPEN_METRICS = "application/openmetrics-text"

_process = ProcessCollector(registry=None)

Figures = Mapping[tuple[str, ...], float]
"""Values by their labels' values."""


async def render(daemon: Operable, accept: str = "") -> tuple[bytes, str]:
    """Write all figures; returns the body and its content type.

    `accept` is the request's header: OpenMetrics where that is asked for, else the text format.
    """
    spread = await daemon.refcount.spread()
    # Not the whole header: some of what it can say ends in an error of the library.
    encode, content_type = choose_encoder(OPEN_METRICS if OPEN_METRICS in accept.lower() else "")
    return encode(_Snapshot(daemon, spread.chunks)), content_type


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """All metrics, as the encoders ask for them."""

    daemon: Operable
    spread: Counter[int]

    def collect(self) -> Iterator[Metric]:
        """Read every figure once."""
        yield _gauge(
            "ramakv_build_info",
            "Always 1; the labels say what runs.",
            {(__version__, platform.python_version()): 1},
            "version",
            "python",
        )
        yield from _events(self.daemon.answered)
        yield from _sessions(self.daemon)
        yield from _chunks(self.spread)
        yield from _evictions(self.daemon)
        yield from _prefetches(self.daemon)
        yield from _backend(self.daemon.backend)
        yield from _store(self.daemon.journal)
        yield from _process.collect()


def _events(tallies: EventTallies) -> Iterator[Metric]:
    by_type = {name: tally.statuses for name, tally in tallies.by_type.items()}
    yield _counter(
        "ramakv_events_total",
        "Events answered, by type and outcome; type unread is what never came to be an event.",
        {
            (type_, OUTCOMES.get(status, "other")): count
            for type_, statuses in {**by_type, UNREAD: tallies.unread}.items()
            for status, count in statuses.items()
        },
        "type",
        "outcome",
    )
    yield _histogram(
        "ramakv_event_duration_seconds",
        "From a decoded event to its answer, waits for its session included.",
        {(name,): tally.seconds for name, tally in tallies.by_type.items()},
        "type",
    )


def _sessions(daemon: Operable) -> Iterator[Metric]:
    router, found = daemon.router, daemon.router.statistics()
    in_turn = router.turns.in_turn
    yield _gauge(
        "ramakv_sessions",
        "Sessions by state: in_turn and paused (between turns) hold references, suspended do not.",
        {
            ("in_turn",): in_turn,
            ("paused",): router.active_sessions - in_turn,
            ("suspended",): router.suspended_sessions,
        },
        "state",
    )
    yield _gauge("ramakv_sessions_awake", "Sessions with an actor in memory.", found["awake"])
    yield _gauge(
        "ramakv_mailbox_messages",
        "Messages that wait, by actor: for the sessions those under way are included.",
        {
            ("sessions",): router.unfinished,
            ("refcount",): daemon.refcount.statistics()["mailbox"],
            ("journal",): daemon.journal.statistics()["waiting"],
        },
        "actor",
    )


def _chunks(spread: Counter[int]) -> Iterator[Metric]:
    yield _gauge(
        "ramakv_chunks_referenced",
        "Chunks that sessions or forks reference.",
        spread.total(),
    )
    yield _gauge(
        "ramakv_chunks_shared",
        "Chunks with more than one reference.",
        spread.total() - spread[1],
    )
    yield _gauge(
        "ramakv_chunk_references",
        "References to chunks, each owner's once; more than chunks by what is shared.",
        sum(references * chunks for references, chunks in spread.items()),
    )
    found: dict[tuple[str, ...], int] = {
        (label,): 0 for label in (*(label for _, label in REFERENCES), REFERENCES_ABOVE)
    }
    for references, chunks in spread.items():
        label = next((label for most, label in REFERENCES if references <= most), REFERENCES_ABOVE)
        found[label,] += chunks
    yield _gauge("ramakv_chunks", "Chunks by how many references they have.", found, "references")


def _evictions(daemon: Operable) -> Iterator[Metric]:
    tallies, found = daemon.refcount.evictions, daemon.refcount.statistics()
    yield _counter(
        "ramakv_evictions_queued_total",
        "Chunks whose eviction became due: nobody referenced them any more.",
        tallies.queued,
    )
    yield _counter(
        "ramakv_evictions_total",
        "Evictions that ended: done, withdrawn (referenced again), superseded (released anew), "
        "left (to LMCache's LRU, by residency), forgiven (lost in a restart of LMCache), "
        "dead (refused for good).",
        _by_outcome(tallies, "done", "withdrawn", "superseded", "left", "forgiven", "dead"),
        "outcome",
    )
    yield _counter(
        "ramakv_evictions_retried_total",
        "Chunks that were queued again after their evict failed.",
        tallies.retried,
    )
    yield _gauge(
        "ramakv_evictions_waiting", "Chunks that wait to be evicted.", found["evictions_waiting"]
    )
    yield _gauge(
        "ramakv_evictions_in_flight",
        "Chunks in evicts that LMCache has not answered yet.",
        found["evictions_in_flight"],
    )
    yield _gauge(
        "ramakv_outbox_oldest_seconds",
        "How long the eviction that is owed longest has been, since the start at most; 0: none.",
        daemon.refcount.oldest_eviction_seconds,
    )


def _prefetches(daemon: Operable) -> Iterator[Metric]:
    tallies = daemon.backend.prefetches
    yield _counter(
        "ramakv_prefetches_total",
        "Prefetches: accepted by LMCache, failed, late (their turn had begun), skipped (LMCache "
        "was not to be asked, or too many waited).",
        _by_outcome(tallies, "accepted", "failed", "late", "skipped"),
        "outcome",
    )
    yield _counter("ramakv_prefetch_chunks_total", "Chunks of accepted prefetches.", tallies.chunks)
    if daemon.hot is not None:
        yield _counter(
            "ramakv_turn_chunks_total",
            "Chunks that turns began with, where the daemon knows their tier.",
            {("hot",): daemon.hot.hot, ("other",): daemon.hot.wanted - daemon.hot.hot},
            "tier",
        )


def _backend(backend: BackendActor) -> Iterator[Metric]:
    found: Any = backend.statistics()
    yield _counter(
        "ramakv_backend_calls_total",
        "Calls to LMCache, by how they ended.",
        {
            (call, *outcome): count
            for call, tally in backend.call_tallies.items()
            for outcome, count in _by_outcome(
                tally, "ok", "rejected", "timeout", "unavailable"
            ).items()
        },
        "call",
        "outcome",
    )
    yield _histogram(
        "ramakv_backend_call_duration_seconds",
        "From sending a call to LMCache to its answer.",
        {(call,): tally.seconds for call, tally in backend.call_tallies.items()},
        "call",
    )
    yield _gauge(
        "ramakv_backend_degraded",
        "1 while no prefetch is to be expected: breaker not closed, LMCache full, or not called.",
        backend.is_degraded,
    )
    yield _gauge(
        "ramakv_backend_breaker_state",
        "1 for the state that the breaker is in.",
        {(state.value,): state.value == found["breaker"] for state in BreakerState},
        "state",
    )
    yield _counter(
        "ramakv_backend_breaker_openings_total",
        "How often the breaker opened.",
        found["breaker_openings"],
    )
    yield _gauge(
        "ramakv_backend_tokens", "Calls that may be made at once, now.", max(0.0, found["tokens"])
    )
    yield _gauge(
        "ramakv_prefetching_paused",
        "1 while an operator has paused prefetching.",
        backend.is_paused,
    )
    yield _gauge(
        "ramakv_prefetches_waiting",
        "Prefetches that wait for their turn.",
        found["prefetches_waiting"],
    )


def _store(journal: Journal) -> Iterator[Metric]:
    found = journal.statistics()
    yield _counter("ramakv_commits_total", "Steps of sessions made durable.", found["commits"])
    yield _histogram(
        "ramakv_transaction_commits",
        "Commits in one transaction; bookkeeping alone is 0 of them.",
        {(): journal.tallies.sizes},
    )
    yield _histogram(
        "ramakv_transaction_duration_seconds",
        "How long a transaction took, with its fsync.",
        {(): journal.tallies.seconds},
    )
    yield _counter(
        "ramakv_transactions_failed_total",
        "Transactions that could not be made: the events in them were refused.",
        journal.tallies.failed,
    )
    yield _gauge(
        "ramakv_dead_letters",
        "Evictions in the database that LMCache refused for good.",
        found["dead_letters"],
    )
    yield _counter(
        "ramakv_dead_letters_dropped_total",
        "Dead letters that were dropped: there were too many.",
        found["dead_letters_dropped"],
    )


def _by_outcome(tallies: Any, *outcomes: str) -> Figures:
    assert {field.name for field in fields(tallies)} >= set(outcomes)
    return {(outcome,): getattr(tallies, outcome) for outcome in outcomes}


def _counter(name: str, help_: str, values: Figures | float, *labels: str) -> Metric:
    return _filled(CounterMetricFamily(name, help_, labels=labels), values)


def _gauge(name: str, help_: str, values: Figures | float, *labels: str) -> Metric:
    return _filled(GaugeMetricFamily(name, help_, labels=labels), values)


def _filled(family: Any, values: Figures | float) -> Metric:
    for labels, value in values.items() if isinstance(values, Mapping) else [((), values)]:
        family.add_metric(labels, value)
    metric: Metric = family
    return metric


def _histogram(
    name: str, help_: str, found: Mapping[Sequence[str], Histogram], *labels: str
) -> Metric:
    family = HistogramMetricFamily(name, help_, labels=labels)
    for values, histogram in found.items():
        family.add_metric(values, _buckets(histogram), histogram.sum)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    bounds: Iterable[str] = (*(str(float(bound)) for bound in histogram.bounds), "+Inf")
    return list(zip(bounds, accumulate(histogram.counts), strict=True))
