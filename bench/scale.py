"""Scale: what it costs to hold many sessions."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench import contenders, generator
from bench.contenders import Contender
from bench.generator import Plan
from bench.processes import rss_bytes
from bench.results import ScalePoint
from bench.runner import SEEDING_CONNECTIONS, Case, Runner
from bench.schedule import one_each
from bench.store_floor import seed
from bench.targets import DISTINCT_CHUNKS, DISTINCT_SESSIONS, RAMAKV, among
from bench.workload import Workload

CONNECTIONS = 64
MANY_CHUNKS, MANY_CHANGED = 20, 2
"""With 100,000 sessions: 200 chunks each would be 4 GB."""


def distinct_chunks(runner: Runner) -> None:
    """Measure memory and start with 10,000 sessions of 200 distinct chunks."""
    workload = Workload(sessions=DISTINCT_SESSIONS, chunks=DISTINCT_CHUNKS)
    folder = _seeded(runner, workload)
    points: list[ScalePoint] = []

    def measure() -> None:
        with contenders.daemon(folder) as ours:
            if points:
                points[0].start_seconds.append(ours.start_seconds)
                points[0].start_cpu_seconds.append(ours.start_cpu_seconds)
                return
            points.append(_point(runner, workload, ours, folder))
            items = one_each(workload, "turn_start")
            plan = Plan(ours.url("turn_start"), items, SEEDING_CONNECTIONS, False)
            generator.play(plan)
            points[0].awake_rss_kb_per_session = _kb_per_session(runner, workload, ours)

    starts = runner.options.starts
    runner.alternate(f"{workload.sessions:,} sessions", [Case("start", measure)], rounds=starts)
    runner.results.scale += points
    shutil.rmtree(folder)


def many_sessions(runner: Runner) -> None:
    """Measure turn_ends spread over all sessions, by how many there are, and the memory."""
    with ExitStack() as stack:
        cases = []
        for sessions in runner.options.scale_sessions:
            workload = replace(
                runner.options.workload,
                sessions=sessions,
                chunks=MANY_CHUNKS,
                changed=MANY_CHANGED,
            )
            folder = _seeded(runner, workload)
            ours = stack.enter_context(contenders.daemon(folder))
            runner.results.scale.append(_point(runner, workload, ours, folder))
            load = partial(
                runner.closed_loop, among(sessions), ours, "turn_end", CONNECTIONS,
                workload=workload,
            )  # fmt: skip
            cases.append(Case(among(sessions), load))
        runner.alternate("scale", cases)


def _seeded(runner: Runner, workload: Workload) -> Path:
    folder = runner.folder / f"scale-{workload.sessions}-{workload.chunks}"
    folder.mkdir()
    seed(folder / "sessions.db", workload)
    return folder


def _point(runner: Runner, workload: Workload, ours: Contender, folder: Path) -> ScalePoint:
    assert ours.pid is not None
    return ScalePoint(
        workload.sessions,
        workload.chunks,
        workload.hash_chars,
        [ours.start_seconds],
        (folder / "sessions.db").stat().st_size / 1e6,
        rss_bytes(ours.pid) / 1e6,
        _kb_per_session(runner, workload, ours),
        start_cpu_seconds=[ours.start_cpu_seconds],
    )


def _kb_per_session(runner: Runner, workload: Workload, ours: Contender) -> float:
    assert ours.pid is not None
    return (rss_bytes(ours.pid) - _empty_rss(runner)) / workload.sessions / 1000


def _empty_rss(runner: Runner) -> float:
    """Return what a daemon without sessions has in RAM; measured once."""
    known = runner.results.machine.get("empty_rss_mb")
    if known is None:
        with contenders.daemon(runner.folder / "empty", RAMAKV) as empty:
            assert empty.pid is not None
            known = rss_bytes(empty.pid) / 1e6
        runner.results.machine["empty_rss_mb"] = known
    return float(known) * 1e6
