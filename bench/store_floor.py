"""The floor of SQLite: the rows of a turn_end, in perfect groups, and no daemon around them.

    python -m bench.store_floor FOLDER SECONDS GROUP HASH_CHARS

Prints one JSON object: rows a second while committing, CPU and latency.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path

from msgspec.structs import replace

from bench.measure import percentile
from bench.workload import Workload
from bench.wrk import LoadError
from ramakv.core.evictions import Scope
from ramakv.core.session import SessionState, Status
from ramakv.store.database import Database
from ramakv.store.store import Bookkeeping, SessionWrite, Store, Write

SEED_GROUP = 128
SECONDS_MAX = 120


def initial_states(workload: Workload) -> Iterator[SessionState]:
    """Yield each session after its first turn."""
    rng = random.Random(0)
    for session in workload.session_ids():
        chunks = (*workload.kept(session), *workload.fresh(rng))
        yield SessionState(session, status=Status.ACTIVE, chunk_map=chunks, turn_count=1)


def seed(database: Path, workload: Workload) -> None:
    """Write a database with the workload's sessions."""
    store = Store(Database.open(database, synchronous="NORMAL"))
    now_ms = int(time.time() * 1000)
    states = initial_states(workload)
    while group := list(islice(states, SEED_GROUP)):
        store.commit(
            [
                SessionWrite(SessionState(state.session_id), state, (), Scope.RELEASE, now_ms)
                for state in group
            ]
        )
    store.close()


def turn_end(workload: Workload, before: SessionState, rng: random.Random) -> SessionWrite:
    """Return the write of a turn_end in which some chunks change."""
    kept, released = before.chunk_map[: -workload.changed], before.chunk_map[-workload.changed :]
    chunk_map = (*kept, *workload.fresh(rng))
    after = replace(before, chunk_map=chunk_map, turn_count=before.turn_count + 1)
    return SessionWrite(before, after, released, Scope.RELEASE, int(time.time() * 1000))


def commit_groups(
    store: Store, workload: Workload, states: dict[str, SessionState], group: int, seconds: float
) -> dict[str, float]:
    """Commit for so long, and return what it cost; making the writes does not count."""
    rng = random.Random()
    sessions = cycle(states)
    rows, cpu = 0, 0.0
    times: list[float] = []
    obsolete: list[tuple[str, int]] = []
    while sum(times) < seconds:
        writes: list[Write] = [Bookkeeping(obsolete=obsolete)]
        steps = [turn_end(workload, states[each], rng) for each in islice(sessions, group)]
        writes += steps
        began, cpu_began = time.perf_counter(), time.process_time()
        generation = store.commit(writes)
        times.append(time.perf_counter() - began)
        cpu += time.process_time() - cpu_began
        rows += group
        states.update((step.after.session_id, step.after) for step in steps)
        obsolete = [(chunk, generation) for step in steps for chunk in step.outbox]
    times.sort()
    return {
        "per_second": rows / sum(times),
        "cpu_us": cpu / rows * 1e6,
        "p50_ms": percentile(times, 50) * 1000,
        "p99_ms": percentile(times, 99) * 1000,
        "p999_ms": percentile(times, 99.9) * 1000,
        "transactions_per_event": 1 / group,
    }


def run(command: Sequence[str]) -> dict[str, float]:
    """Run this module by such a command, and return its figures. Raises LoadError."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=SECONDS_MAX, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise LoadError(f"the store could not be loaded: {error}") from error
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    folder, seconds, group, hash_chars = sys.argv[1:]
    workload = Workload(hash_chars=int(hash_chars))
    path = Path(folder) / "floor.db"
    if not path.exists():
        seed(path, workload)
    store = Store(Database.open(path))
    states = {each: store.load(each) for each in workload.session_ids()}
    found = commit_groups(store, workload, states, int(group), float(seconds))
    store.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
