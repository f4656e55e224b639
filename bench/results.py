"""What a run found: figures with every round, and how they are read. The schema is versioned."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from bench.measure import median, ratio

SCHEMA = "ramakv-bench/1"

Values = dict[str, float]


class Figure(msgspec.Struct):
    """One thing measured, round after round."""

    scenario: str
    contender: str
    connections: int
    rounds: list[Values] = []
    """Per round: per_second (events), p50_ms, p99_ms, p999_ms (of requests), cpu_us (of the
    server, per event), rss_mb, fsyncs_per_event, transactions_per_event; whatever was had."""
    curves: list[list[float]] = []
    """Per round: milliseconds at `bench.measure.CURVE_PERCENTILES`."""

    def column(self, key: str) -> list[float]:
        """Return one value of each round; nan where it was not measured."""
        return [values.get(key, math.nan) for values in self.rounds]

    def median(self, key: str) -> float:
        """Return a value's median over the rounds, or nan."""
        return median(self.column(key))


class ScalePoint(msgspec.Struct):
    """A daemon that holds so many sessions."""

    sessions: int
    chunks: int
    hash_chars: int
    start_seconds: list[float]
    """From the command to the first answered health, for each start."""
    database_mb: float
    rss_mb: float
    """After the start."""
    rss_kb_per_session: float
    """After the start, less what a daemon without sessions has."""
    awake_rss_kb_per_session: float | None = None
    """The same, once every session had an event."""
    start_cpu_seconds: list[float] = []
    """The CPU time of each start: steadier where others use the machine."""


class Results(msgspec.Struct):
    """All of a run. What is not in it was not measured."""

    schema: str = SCHEMA
    machine: dict[str, Any] = {}
    options: dict[str, Any] = {}
    figures: list[Figure] = []
    scale: list[ScalePoint] = []
    failures: list[str] = []

    def figure(self, scenario: str, contender: str, connections: int) -> Figure | None:
        """Find a figure."""
        wanted = (scenario, contender, connections)
        for each in self.figures:
            if (each.scenario, each.contender, each.connections) == wanted:
                return each
        return None

    def add(
        self,
        scenario: str,
        contender: str,
        connections: int,
        values: Values,
        curve: list[float] | None = None,
    ) -> None:
        """Add a round to a figure."""
        figure = self.figure(scenario, contender, connections)
        if figure is None:
            figure = Figure(scenario, contender, connections)
            self.figures.append(figure)
        figure.rounds.append({k: v for k, v in values.items() if not math.isnan(v)})
        if curve is not None:
            figure.curves.append(curve)

    def value(self, scenario: str, contender: str, connections: int, key: str) -> float:
        """Return the median of a figure's values, or nan."""
        figure = self.figure(scenario, contender, connections)
        return math.nan if figure is None else figure.median(key)

    def ratio(self, key: str, ours: tuple[str, str, int], theirs: tuple[str, str, int]) -> float:
        """Return the median over the rounds of one figure's values by another's, or nan."""
        our, their = self.figure(*ours), self.figure(*theirs)
        if our is None or their is None:
            return math.nan
        return ratio(our.column(key), their.column(key))

    def scale_point(self, sessions: int, chunks: int) -> ScalePoint | None:
        """Find a point of the scale."""
        for point in self.scale:
            if (point.sessions, point.chunks) == (sessions, chunks):
                return point
        return None


def load(path: Path) -> Results:
    """Read results. Raises ValueError where they are none, or of another version."""
    results = msgspec.json.decode(path.read_bytes(), type=Results)
    if results.schema != SCHEMA:
        raise ValueError(f"{path}: schema {results.schema}, expected {SCHEMA}")
    return results


def save(results: Results, path: Path) -> None:
    """Write results as JSON that can be read by eye, numbers to six digits."""
    found = _rounded(msgspec.to_builtins(results))
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return value
