"""Where the daemon's time goes, by layer and by function, under the load of the benchmark.

    .venv/bin/python -m bench.profile [--kinds turn_end …] [--in-array 32] [--seconds 8] [--top 15]

py-spy samples the process from outside; samples of threads that wait for work are left out. Time in
C counts for the Python function that called it; what other packages and the standard library do
counts for the layer that they do it for.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from bench import contenders, report, wrk
from bench.contenders import Contender
from bench.workload import KINDS, Workload

CONNECTIONS, ARRAY_CONNECTIONS = 64, 16
SAMPLES_PER_SECOND = 250
LAYERS = (
    ("codec and msgspec", r"ramakv/(codec|events)"),
    ("ramakv.web", r"ramakv/web/"),
    ("ramakv.store and SQLite", r"ramakv/store/"),
    ("ramakv.core", r"ramakv/core/"),
    ("actors and service", r"ramakv/(actors/|service)"),
    ("ramakv, other", r"ramakv/"),
    ("h11", r"\bh11/"),
    ("hypercorn", r"\bhypercorn/"),
    ("quart", r"\b(quart|quart_trio|werkzeug)/"),
    ("trio: threads", r"trio/_threads|trio/_core/_thread_cache|outcome/"),
    ("trio: waiting for I/O", r"trio/_core/_io_epoll"),
    ("trio: scheduler", r"trio/"),
    ("benchmark's counting", r"bench/"),
)
WAITS = r"^(Condition\.wait \(threading|WorkerThread\._work \(trio/_core/_thread_cache)"
"""Where a thread that has nothing to do stands; py-spy takes it for a busy one."""
BELOW = r"^(unrolled_run|Thread\.run) "
"""What lies above these is the same in each sample."""
Stack = tuple[str, ...]
"""Functions as `name (file:line)`, the outermost first."""


class Profile(NamedTuple):
    """Samples, as shares of all."""

    layers: list[tuple[str, float]]
    alone: list[tuple[str, float]]
    with_callees: list[tuple[str, float]]


def parse(raw: str) -> list[tuple[Stack, int]]:
    """Read py-spy's raw format: a stack and a count on each line."""
    found = []
    for line in raw.splitlines():
        frames, _, count = line.rpartition(" ")
        stack = tuple(frames.split(";"))
        if not frames or re.match(WAITS, stack[-1]):
            continue
        starts = [place for place, frame in enumerate(stack) if re.match(BELOW, frame)]
        found.append((stack[starts[0] :] if starts else stack, int(count)))
    return found


def layer_of(stack: Stack) -> str:
    """Return the layer of a sample: that of the innermost function that belongs to one."""
    for frame in reversed(stack):
        for name, pattern in LAYERS:
            if re.search(pattern, frame):
                return name
    return "other"


def summarize(samples: Iterable[tuple[Stack, int]], top: int) -> Profile:
    """Return the shares of layers and functions; lines of a function count together."""
    layers: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    with_callees: Counter[str] = Counter()
    for stack, count in samples:
        functions = [re.sub(r":\d+\)$", ")", frame) for frame in stack]
        layers[layer_of(stack)] += count
        alone[functions[-1]] += count
        for function in set(functions):
            with_callees[function] += count
    total = layers.total() or 1

    def shares(counter: Counter[str], most: int | None) -> list[tuple[str, float]]:
        return [(name, count / total) for name, count in counter.most_common(most)]

    return Profile(shares(layers, None), shares(alone, top), shares(with_callees, 3 * top))


def record(
    ours: Contender, kind: str, folder: Path, seconds: int, in_array: int
) -> list[tuple[Stack, int]]:
    """Sample a daemon under load."""
    load = wrk.write_load(folder, Workload(), kind, in_array)
    connections = ARRAY_CONNECTIONS if in_array else CONNECTIONS
    raw = folder / f"{kind}.raw"
    busy = wrk.start(ours.url(kind), load, connections, seconds + 2, seed=1)
    spy = [str(Path(sys.executable).with_name("py-spy")), "record", "--pid", str(ours.pid)]
    how = ["--rate", str(SAMPLES_PER_SECOND), "--duration", str(seconds), "--format", "raw"]
    subprocess.run([*spy, *how, "--output", str(raw)], check=True, capture_output=True)
    wrk.finish(busy, seconds + 2)
    return parse(raw.read_text())


def show(kind: str, profile: Profile) -> str:
    """Return a profile as Markdown."""
    tables = [
        report.table([title, "share"], [(name, f"{share:.1%}") for name, share in shares])
        for title, shares in (
            ("layer", profile.layers),
            ("function alone", profile.alone),
            ("function and what it calls", profile.with_callees),
        )
    ]
    return "\n\n".join([f"## {kind}", *tables])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--in-array", type=int, default=0, help="events in a request")
    parser.add_argument("--seconds", type=int, default=8)
    parser.add_argument("--top", type=int, default=15)
    given = parser.parse_args()
    wrk.check_wrk()
    with (
        tempfile.TemporaryDirectory() as data,
        contenders.daemon(Path(data) / "daemon", sessions=Workload()) as ours,
    ):
        for kind in given.kinds:
            samples = record(ours, kind, Path(data), given.seconds, given.in_array)
            print(show(kind, summarize(samples, given.top)), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
