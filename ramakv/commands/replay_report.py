"""What a replay found: counts, latencies, faults; as JSON and as a table."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ENGINE_PREFIX = "engine_"
ERROR_TEXTS_MAX = 5


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one call."""

    error: str | None = None
    answered: bool = True
    """Whether the other side said anything at all."""
    hot: int = 0
    disk: int = 0
    missing: int = 0


@dataclass(slots=True)
class Report:
    """What a replay found, so far.

    A call counts once it is over. Its latency counts only if it succeeded: a refusal is often
    quicker than the work. One latency is eight bytes, so the trace bounds the memory.
    """

    requests: int = 0
    """Turns that are over."""
    seconds: float = 0.0
    calls: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    latencies: dict[str, array[float]] = field(default_factory=dict)
    error_texts: dict[str, int] = field(default_factory=dict)
    """The first few distinct errors and how often each came."""
    hot: int = 0
    disk: int = 0
    missing: int = 0
    behind_seconds: float = 0.0
    """How late, at most, a request was admitted. Zero at full speed, where nothing is due."""
    stopped: str | None = None
    """Why the replay ended before its trace, unless it was interrupted."""
    interrupted: bool = False

    @property
    def errors(self) -> int:
        """How many calls failed, to the daemon and to the engine."""
        return self.failed.total()

    @property
    def exit_code(self) -> int:
        """The exit code that this report stands for."""
        if self.interrupted:
            return 130
        return 1 if self.errors or self.stopped else 0

    def record(self, kind: str, seconds: float, answer: Answer) -> None:
        """Count one call that is over."""
        self.calls[kind] += 1
        if answer.error is not None:
            self.failed[kind] += 1
            text = f"{kind}: {answer.error}"
            if text in self.error_texts or len(self.error_texts) < ERROR_TEXTS_MAX:
                self.error_texts[text] = self.error_texts.get(text, 0) + 1
            return
        if kind not in self.latencies:
            self.latencies[kind] = array("d")
        self.latencies[kind].append(seconds)
        self.hot += answer.hot
        self.disk += answer.disk
        self.missing += answer.missing

    def to_json(self) -> dict[str, Any]:
        """The report as plain values, ready for JSON.

        `events` counts the daemon's events and `engine_calls` the engine's; types that were
        never sent, and percentiles of types that never succeeded, are absent.
        """
        return {
            "requests": self.requests,
            "events": {k: n for k, n in self.calls.items() if not k.startswith(ENGINE_PREFIX)},
            "engine_calls": {
                k.removeprefix(ENGINE_PREFIX): n
                for k, n in self.calls.items()
                if k.startswith(ENGINE_PREFIX)
            },
            "errors": self.errors,
            "errors_by_type": dict(self.failed),
            "error_texts": [{"text": t, "count": n} for t, n in self.error_texts.items()],
            "seconds": round(self.seconds, 6),
            "latency_ms": {
                kind: dict(zip(("p50", "p99"), _p50_p99_ms(values), strict=True))
                for kind, values in self.latencies.items()
            },
            "chunks": {"hot": self.hot, "disk": self.disk, "missing": self.missing},
            "behind_seconds": round(self.behind_seconds, 6),
            "stopped": self.stopped,
            "interrupted": self.interrupted,
        }


def percentile(ordered: Sequence[float], share: float) -> float:
    """The nearest-rank percentile: the least value that `share` of all values do not exceed."""
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1]


def render(report: Report) -> Group:
    """Draw a report for a terminal."""
    table = Table(title="replay", title_justify="left")
    table.add_column("call")
    for heading in ("sent", "failed", "p50 ms", "p99 ms"):
        table.add_column(heading, justify="right")
    for kind, sent in report.calls.items():
        values = report.latencies.get(kind)
        p50, p99 = (f"{ms:.2f}" for ms in _p50_p99_ms(values)) if values else ("-", "-")
        table.add_row(kind, str(sent), str(report.failed[kind]), p50, p99)
    return Group(table, *(Text(line) for line in _lines(report)))


def _lines(report: Report) -> Iterable[str]:
    rate = report.requests / report.seconds if report.seconds else 0.0
    yield (
        f"{report.requests} requests in {report.seconds:.1f} s ({rate:.0f} a second), "
        f"{report.errors} errors"
    )
    looked_for = report.hot + report.disk + report.missing
    if looked_for:
        yield (
            f"chunks: {report.hot} hot ({report.hot / looked_for:.1%}), "
            f"{report.disk} on disk, {report.missing} missing"
        )
    if report.behind_seconds >= 1:
        yield f"the replay fell {report.behind_seconds:.1f} s behind the trace"
    for text, count in report.error_texts.items():
        yield f"  {count} x {text}"
    if report.errors > sum(report.error_texts.values()):
        yield "  other errors are counted, not shown"
    if report.stopped is not None:
        yield f"stopped early: {report.stopped}"
    if report.interrupted:
        yield "interrupted"


def _p50_p99_ms(values: Iterable[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return round(percentile(ordered, 0.50) * 1000, 3), round(percentile(ordered, 0.99) * 1000, 3)
