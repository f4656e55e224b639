"""Runs cases in turn, round after round, and keeps what they find."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from bench import generator, wrk
from bench.contenders import Contender
from bench.generator import Plan
from bench.results import Results
from bench.schedule import Item, one_each
from bench.workload import Workload
from bench.wrk import LoadError

SEEDING_CONNECTIONS = 16


class Case(NamedTuple):
    """One thing to measure once in each round."""

    what: str
    measure: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How long, how often and how much."""

    quick: bool
    rounds: int
    seconds: int
    connections: tuple[int, ...]
    workload: Workload
    scale_sessions: tuple[int, ...]
    starts: int
    trace: Path | None
    trace_requests: int | None
    trace_speed: float
    peer: str | None = None
    peer_pid: int | None = None
    sections: tuple[str, ...] = ()


@dataclass(slots=True)
class Runner:
    """Alternates cases; a case that fails is noted, and not tried again."""

    options: Options
    results: Results
    folder: Path
    console: Console
    _progress: Progress = field(init=False)
    _seeds: Iterator[int] = field(default_factory=lambda: count(1))

    def __post_init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
        )

    @contextmanager
    def showing_progress(self) -> Iterator[None]:
        """Show bars while the block runs."""
        with self._progress:
            yield

    def alternate(self, section: str, cases: Sequence[Case], rounds: int | None = None) -> None:
        """Run each case once in each round; every other round goes backwards."""
        rounds = rounds or self.options.rounds
        left = list(cases)
        bar = self._progress.add_task(section, total=rounds * len(cases))
        for number in range(rounds):
            for case in left[:: -1 if number % 2 else 1]:
                self._progress.update(bar, description=f"{section}: {case.what}")
                try:
                    case.measure()
                except LoadError as error:
                    self.fail(f"{case.what}: {error}")
                    left.remove(case)
                self._progress.advance(bar)
        self._progress.update(bar, description=section, completed=rounds * len(cases))
        if not self.console.is_terminal:
            self.console.print(f"{section}: done")

    def fail(self, what: str) -> None:
        """Note what went wrong: the run will have failed."""
        self.results.failures.append(what)
        self.console.print(f"[red]failed[/red] {what}", highlight=False)

    def seed(self) -> int:
        """Return a number that no other load of this run has."""
        return next(self._seeds)

    # What cases do -----------------------------------------------------------------------

    def closed_loop(
        self,
        scenario: str,
        contender: Contender,
        kind: str,
        connections: int,
        *,
        in_array: int = 0,
        seconds: int | None = None,
        workload: Workload | None = None,
    ) -> None:
        """Load a contender with wrk."""
        workload = workload or self.options.workload
        seconds = seconds or self.options.seconds
        load = wrk.write_load(self.folder, workload, kind, in_array)
        before = contender.usage()
        loaded = wrk.run(contender.url(kind), load, connections, seconds, self.seed())
        events = loaded.requests * load.events_per_request
        values = {
            "per_second": loaded.per_second * load.events_per_request,
            **loaded.latencies,
        }
        used = contender.usage().since(before, events)
        self.results.add(scenario, contender.name, connections, values | used, loaded.curve)

    def play(
        self,
        scenario: str,
        contender: Contender,
        kind: str,
        items: Sequence[Item],
        connections: int,
        *,
        open_loop: bool,
    ) -> None:
        """Load a contender with a plan."""
        before = contender.usage()
        found = generator.play(Plan(contender.url(kind), items, connections, open_loop))
        used = contender.usage().since(before, found["events"])
        points = {key: found[key] for key in ("per_second", "p50_ms", "p99_ms", "p999_ms")}
        by_kind = {f"{kind} p99_ms": value for kind, value in found["p99_ms_of"].items()}
        self.results.add(
            scenario, contender.name, connections, points | by_kind | used, found["curve"]
        )

    def fill(self, contender: Contender, sessions: int | None = None) -> None:
        """Give a contender the workload's sessions, or some: it is warm then. Raises LoadError."""
        items = one_each(self.options.workload, "turn_end")[:sessions]
        generator.play(Plan(contender.url("turn_end"), items, SEEDING_CONNECTIONS, False))
