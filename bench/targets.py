"""The targets, and whether a run met them. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from bench.measure import median
from bench.results import Results

RAMAKV, QUART, ASGI, PEER = "ramakv", "Quart-Trio", "ASGI", "peer"
FAST, SLOW, HANGING = "ramakv, fast LMCache", "ramakv, 200 ms LMCache", "ramakv, hanging LMCache"
ARRAYS = "turn_end in arrays of 32"
HEALTH_BESIDE_HEALTH, HEALTH_BESIDE_TURN_END = "health beside health", "health beside turn_end"
TRACE = "agent trace, evictions"
PREFETCH_ACK_SECONDS = 0.1
SMALL_SCALE, LARGE_SCALE = 1_000, 100_000
DISTINCT_SESSIONS, DISTINCT_CHUNKS = 10_000, 200


def among(sessions: int) -> str:
    """Name the scenario of turn_ends spread over so many sessions."""
    return f"turn_end, {sessions:,} sessions"


@dataclass(frozen=True, slots=True)
class Target:
    """One promise: a value from the results and its bound."""

    what: str
    sign: Literal["≥", "≤"]
    bound: float
    value: Callable[[Results], float]
    unit: str = "×"
    needs: str = "not part of this run"
    """Why there may be no value."""


class Verdict(NamedTuple):
    """What became of a target."""

    target: Target
    value: float
    met: bool | None
    """None where it was not measured."""

    @property
    def word(self) -> str:
        if self.met is None:
            return f"not measured ({self.target.needs})"
        return "met" if self.met else "not met"


def _against(key: str, scenario: str, theirs: str) -> Callable[[Results], float]:
    return lambda found: found.ratio(key, (scenario, RAMAKV, 64), (scenario, theirs, 64))


def _between(
    key: str, ours: tuple[str, str, int], theirs: tuple[str, str, int]
) -> Callable[[Results], float]:
    return lambda found: found.ratio(key, ours, theirs)


def _figure(
    key: str, scenario: str, contender: str, connections: int
) -> Callable[[Results], float]:
    return lambda found: found.value(scenario, contender, connections, key)


def _rss_per_session(found: Results) -> float:
    point = found.scale_point(DISTINCT_SESSIONS, DISTINCT_CHUNKS)
    if point is None:
        return math.nan
    return max(point.rss_kb_per_session, point.awake_rss_kb_per_session or 0.0)


def _start_seconds(found: Results) -> float:
    point = found.scale_point(DISTINCT_SESSIONS, DISTINCT_CHUNKS)
    return math.nan if point is None else median(point.start_seconds)


_WITH_PEER = "needs --peer"

TARGETS = (
    Target("health req/s, 64 connections, against bare Quart-Trio on stock Hypercorn, same "
           "decoder", "≥", 2.0, _against("per_second", "health", QUART)),
    Target("turn_start req/s (200 chunks), against such a handler that returns the same bytes",
           "≥", 1.5, _against("per_second", "turn_start", QUART)),
    Target("session_map req/s (200 chunks), against such a handler that returns the same bytes",
           "≥", 1.5, _against("per_second", "session_map", QUART)),
    Target("turn_end req/s, durable, against such a handler with the same body", "≥", 1.5,
           _against("per_second", "turn_end", QUART)),
    Target("turn_end req/s against the peer", "≥", 1.5,
           _against("per_second", "turn_end", PEER), needs=_WITH_PEER),
    Target("turn_end p99 against the peer", "≤", 0.7,
           _against("p99_ms", "turn_end", PEER), needs=_WITH_PEER),
    Target("turn_end events/s in arrays of 32 over 16 connections, against single ones", "≥", 5.0,
           _between("per_second", (ARRAYS, RAMAKV, 16), ("turn_end", RAMAKV, 64))),
    Target("fsyncs per turn_end, 64 connections", "≤", 0.10,
           _figure("fsyncs_per_event", "turn_end", RAMAKV, 64), unit=""),
    Target("turn_end p99 with an LMCache that takes 200 ms per call, against a fast one", "≤", 1.2,
           _between("p99_ms", ("turn_end", SLOW, 64), ("turn_end", FAST, 64))),
    Target("turn_start p99 with an LMCache that hangs: prefetch_ack_seconds + 20 ms", "≤",
           PREFETCH_ACK_SECONDS * 1000 + 20,
           _figure("p99_ms", "turn_start, open loop", HANGING, 64), unit=" ms"),
    Target("health p99 while 64 connections send turn_end, against 64 that send health", "≤", 2.0,
           _between("p99_ms", (HEALTH_BESIDE_TURN_END, RAMAKV, 64),
                    (HEALTH_BESIDE_HEALTH, RAMAKV, 64))),
    Target("turn_end rate with 100,000 sessions against 1,000", "≥", 0.9,
           _between("per_second", (among(LARGE_SCALE), RAMAKV, 64),
                    (among(SMALL_SCALE), RAMAKV, 64))),
    Target("RSS per session of 200 distinct chunks (64-character hashes)", "≤", 40.0,
           _rss_per_session, unit=" KB"),
    Target("start-up with 10,000 such sessions", "≤", 2.5, _start_seconds, unit=" s"),
    Target("evict calls to LMCache per released chunk, agent trace", "≤", 0.05,
           _figure("evict_calls_per_chunk", TRACE, RAMAKV, 64), unit=""),
)  # fmt: skip


def check(results: Results) -> list[Verdict]:
    """Return a verdict on each target."""
    verdicts = []
    for target in TARGETS:
        value = target.value(results)
        met: bool | None = None
        if not math.isnan(value):
            met = value >= target.bound if target.sign == "≥" else value <= target.bound
        verdicts.append(Verdict(target, value, met))
    return verdicts
