"""The scenarios: which contenders get which load, side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from bench import contenders, generator, store_floor, wrk
from bench.contenders import Contender
from bench.generator import Plan
from bench.processes import SERVER_CORE, on_core, python
from bench.runner import Case, Runner
from bench.schedule import Item, agent_load, open_loop, synthetic_agents
from bench.targets import (
    ARRAYS,
    ASGI,
    FAST,
    HANGING,
    HEALTH_BESIDE_HEALTH,
    HEALTH_BESIDE_TURN_END,
    PREFETCH_ACK_SECONDS,
    QUART,
    RAMAKV,
    SLOW,
    TRACE,
)
from bench.workload import KINDS
from ramakv.commands.trace import read_trace

IN_ARRAY, ARRAY_CONNECTIONS = 32, 16
ARRAY_SECONDS_MIN = 2
"""Less, and a slow machine answers no request at all: 16 arrays are 512 events."""
CONNECTIONS = 64
MANY = 128
"""With more connections, the slowest contender needs longer until it has answered each once."""
PROBE_RATE, PROBE_CONNECTIONS = 100.0, 64
"""Enough connections that a probe never waits for the answer to another."""
TURN_STARTS_A_SECOND = 100.0
OPEN_LOOP_SHARE = 0.5
WARMING_EVENTS = 200
QUICK_AGENTS, AGENTS = 20, 60
STORE = "SQLite alone"


@dataclass(frozen=True, slots=True)
class Stage:
    """Servers that run side by side."""

    ours: Contender
    quart: Contender
    asgi: Contender | None
    peers: tuple[Contender, ...]


@contextmanager
def stage(runner: Runner) -> Iterator[Stage]:
    """Run a daemon with the workload's sessions, the floors, and name the peer."""
    options = runner.options
    with ExitStack() as stack:
        ours = stack.enter_context(
            contenders.daemon(runner.folder / "noop", sessions=options.workload)
        )
        replies = contenders.replies_of(ours, options.workload)
        floors = [
            stack.enter_context(contenders.floor(runner.folder, name, replies))
            for name in ((QUART,) if options.quick else (QUART, ASGI))
        ]
        for each in (ours, *floors):
            runner.fill(each, WARMING_EVENTS)
        peers: tuple[Contender, ...] = ()
        if options.peer is not None:
            peers = (contenders.peer(options.peer, options.peer_pid),)
            runner.fill(peers[0])
        yield Stage(ours, floors[0], floors[1] if len(floors) > 1 else None, peers)


def closed_loops(runner: Runner, on: Stage) -> None:
    """Measure each kind of event at each number of connections, beside floors and peer."""
    for connections in runner.options.connections:
        cases = []
        for kind in KINDS:
            floors = [on.quart]
            if connections == CONNECTIONS and on.asgi is not None:
                floors.append(on.asgi)
            for contender in (on.ours, *floors, *on.peers):
                load = partial(
                    runner.closed_loop,
                    kind,
                    contender,
                    kind,
                    connections,
                    seconds=runner.options.seconds * (2 if connections > MANY else 1),
                )
                cases.append(Case(f"{kind}, {contender.name}", load))
        if connections == CONNECTIONS:
            cases += _array_cases(runner, on)
            if not runner.options.quick:
                cases.append(Case(f"turn_end, {STORE}", partial(_load_store, runner)))
        runner.alternate(f"{connections} connections", cases)


def _array_cases(runner: Runner, on: Stage) -> list[Case]:
    seconds = max(runner.options.seconds, ARRAY_SECONDS_MIN)
    load = partial(runner.closed_loop, ARRAYS, in_array=IN_ARRAY, seconds=seconds)
    return [
        Case(
            f"{ARRAYS}, {contender.name}",
            partial(load, contender, "turn_end", ARRAY_CONNECTIONS),
        )
        for contender in (on.ours, *on.peers)
    ]


def _load_store(runner: Runner) -> None:
    workload, seconds = runner.options.workload, runner.options.seconds / 2
    module = python("bench.store_floor", str(runner.folder), str(seconds), str(CONNECTIONS))
    found = store_floor.run(on_core(SERVER_CORE, [*module, str(workload.hash_chars)]))
    runner.results.add("turn_end", STORE, CONNECTIONS, found)


def open_loops(runner: Runner, on: Stage) -> None:
    """Measure latency at half of what the slowest contender can do."""
    cases = []
    for kind in KINDS:
        sides = (on.ours, on.quart, *on.peers)
        rates = (
            runner.results.value(kind, contender.name, CONNECTIONS, "per_second")
            for contender in sides
        )
        known = [rate for rate in rates if not math.isnan(rate)]
        if not known:
            continue
        rate = float(f"{OPEN_LOOP_SHARE * min(known):.2g}")
        cases += [
            Case(
                f"{kind} at {rate:g}/s, {contender.name}",
                partial(_open_loop, runner, contender, kind, rate),
            )
            for contender in sides
        ]
    runner.alternate("open loop", cases)


def _open_loop(runner: Runner, contender: Contender, kind: str, rate: float) -> None:
    options = runner.options
    items = open_loop(options.workload, kind, rate, options.seconds, runner.seed())
    runner.play(f"{kind}, open loop", contender, kind, items, CONNECTIONS, open_loop=True)


def probes(runner: Runner, on: Stage) -> None:
    """Probe health, at a low rate over connections of its own, beside 64 that are busy."""
    cases = []
    for contender in (on.ours, *on.peers):
        for scenario, kind in (
            (HEALTH_BESIDE_HEALTH, "health"),
            (HEALTH_BESIDE_TURN_END, "turn_end"),
        ):
            probe = partial(_probe, runner, scenario, contender, kind)
            cases.append(Case(f"{scenario}, {contender.name}", probe))
    runner.alternate("probes", cases)


def _probe(runner: Runner, scenario: str, contender: Contender, kind: str) -> None:
    options = runner.options
    seconds = options.seconds
    load = wrk.write_load(runner.folder, options.workload, kind)
    items = open_loop(options.workload, "health", PROBE_RATE, seconds * 0.8, 0)
    plan = Plan(contender.url("health"), items, PROBE_CONNECTIONS, True)
    busy = wrk.start(contender.url(kind), load, CONNECTIONS, seconds, runner.seed())
    try:
        found = generator.play(plan)
    finally:
        wrk.finish(busy, seconds)
    values = {key: found[key] for key in ("per_second", "p50_ms", "p99_ms", "p999_ms")}
    runner.results.add(scenario, contender.name, CONNECTIONS, values, found["curve"])


def slow_backends(runner: Runner) -> None:
    """Measure daemons whose LMCache is fast, slow, or hangs."""
    with ExitStack() as stack:
        daemons = {}
        for name, seconds in ((FAST, 0.0), (SLOW, 0.2), (HANGING, math.inf)):
            url = stack.enter_context(contenders.lmcache(runner.folder, seconds))
            settings = {"RAMAKV_BACKEND__KIND": "lmcache", "RAMAKV_LMCACHE_URL": url}
            if seconds == math.inf:  # else the breaker soon opens, and nothing waits any more
                settings["RAMAKV_BACKEND__CALL_TIMEOUT_SECONDS"] = "3600"
            settings["RAMAKV_BACKEND__PREFETCH_ACK_SECONDS"] = str(PREFETCH_ACK_SECONDS)
            folder, sessions = runner.folder / f"lmcache-{seconds}", runner.options.workload
            daemons[name] = stack.enter_context(
                contenders.daemon(folder, name, sessions, **settings)
            )
        cases = [
            Case(
                f"turn_end, {name}",
                partial(runner.closed_loop, "turn_end", daemons[name], "turn_end", CONNECTIONS),
            )
            for name in (FAST, SLOW)
        ]
        cases += [
            Case(
                f"turn_start, {name}",
                partial(_open_loop, runner, daemons[name], "turn_start", TURN_STARTS_A_SECOND),
            )
            for name in ((HANGING,) if runner.options.quick else (FAST, HANGING))
        ]
        runner.alternate("LMCache", cases)


def agents(runner: Runner, on: Stage) -> None:
    """Play an agent load without its pauses: to daemon, floor and peer."""
    names = count()

    def play(contender: Contender) -> None:
        items = _agent_items(runner, None, f"{next(names)}-")
        runner.play("agents", contender, "agents", items, CONNECTIONS, open_loop=False)

    cases = [
        Case(f"agents, {contender.name}", partial(play, contender))
        for contender in (on.ours, on.quart, *on.peers)
    ]
    runner.alternate("agents", cases)


def evictions(runner: Runner) -> None:
    """Play an agent load in its own rhythm, only faster, and count the evict calls it caused."""
    with (
        contenders.lmcache(runner.folder, 0.0) as url,
        contenders.daemon(
            runner.folder / "evictions",
            RAMAKV_BACKEND__KIND="lmcache",
            RAMAKV_LMCACHE_URL=url,
        ) as ours,
    ):
        items = _agent_items(runner, runner.options.trace_speed, "")
        measure = partial(_count_evictions, runner, url, ours, items)
        runner.alternate("evictions", [Case("agent trace", measure)], rounds=1)


def _count_evictions(runner: Runner, url: str, ours: Contender, items: list[Item]) -> None:
    found = generator.play(Plan(ours.url("agents"), items, CONNECTIONS, True))
    counts = contenders.lmcache_counts(url)
    values = {
        "per_second": found["per_second"],
        "p50_ms": found["p50_ms"],
        "p99_ms": found["p99_ms"],
        "p999_ms": found["p999_ms"],
        "released_chunks": float(found["evicted"]),
        "evict_calls": float(counts.get("evict_calls", 0)),
        "prefetch_calls": float(counts.get("prefetch_calls", 0)),
        "evict_calls_per_chunk": counts.get("evict_calls", 0) / max(found["evicted"], 1),
    }
    runner.results.add(TRACE, RAMAKV, CONNECTIONS, values, found["curve"])


def _agent_items(runner: Runner, speed: float | None, prefix: str) -> list[Item]:
    trace: Path | None = runner.options.trace
    if trace is None:
        agents_count = QUICK_AGENTS if runner.options.quick else AGENTS
        return agent_load(synthetic_agents(agents_count), speed, prefix)
    return agent_load(read_trace(trace, runner.options.trace_requests), speed, prefix)
