"""What an open page costs: the same load with and without viewers, in turn, in one run.

    .venv/bin/python -m bench.page_cost [--sessions 10000] [--viewers 3] [--pairs 8] [--seconds 4]

A viewer reads the stream of snapshots and, as the page of a session does, asks for that session
every three seconds. Of the figures under load, trust ratios. What the page takes of a second of CPU
time is measured beside them, on a daemon that has nothing else to do: that is steady where other
work on the machine is not, and says how much of a core the page can take from events.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx

from bench import contenders, wrk
from bench.contenders import Contender
from bench.processes import free_port
from bench.workload import Workload, session_id

CONNECTIONS = 64
LOOK_SECONDS = 3.0
IDLE_SECONDS = 12.0


class Run(NamedTuple):
    """One run of the load."""

    per_second: float
    cpu_micros: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--viewers", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--seconds", type=int, default=4)
    options = parser.parse_args()
    wrk.check_wrk()
    workload = Workload(sessions=options.sessions, chunks=100, hash_chars=16)
    with tempfile.TemporaryDirectory(prefix="ramakv-page-cost-") as name:
        folder, port = Path(name), free_port()
        load = wrk.write_load(folder, workload, "turn_end")
        admin = {"RAMAKV_ADMIN__LISTEN_ADDR": f"127.0.0.1:{port}"}
        with contenders.daemon(folder / "state", sessions=workload, **admin) as daemon:
            measure(daemon, load, options.seconds, seed=0)  # the first run finds all asleep
            pairs = []
            for number in range(options.pairs):
                pair: dict[bool, Run] = {}
                for is_open in (number % 2 == 0, number % 2 == 1):
                    with viewers(port, options.viewers if is_open else 0):
                        pair[is_open] = measure(daemon, load, options.seconds, seed=number + 1)
                pairs.append((pair[False], pair[True]))
                tell(f"pair {number + 1}", *pairs[-1])
            alone = [idle(daemon, port, count) for count in (0, options.viewers)]
    tell("median", *(median(runs) for runs in zip(*pairs, strict=True)))
    rates = [opened.per_second / closed.per_second for closed, opened in pairs]
    costs = [opened.cpu_micros / closed.cpu_micros for closed, opened in pairs]
    print(f"events a second, open / closed: median {statistics.median(rates):.3f}")
    print(f"CPU an event, open / closed: median {statistics.median(costs):.3f}")
    print(
        f"without events: {1000 * alone[0]:.1f} ms of CPU a second closed, "
        f"{1000 * alone[1]:.1f} ms open: {alone[1] - alone[0]:.2%} of a core"
    )


def median(runs: Iterable[Run]) -> Run:
    return Run(*map(statistics.median, zip(*runs, strict=True)))


def tell(what: str, closed: Run, opened: Run) -> None:
    print(
        f"{what}: closed {closed.per_second:.0f}/s {closed.cpu_micros:.0f} µs, "
        f"open {opened.per_second:.0f}/s {opened.cpu_micros:.0f} µs",
        flush=True,
    )


def measure(daemon: Contender, load: wrk.Load, seconds: int, seed: int) -> Run:
    """Run the load once; CPU time is all that the daemon took meanwhile."""
    before = daemon.usage().cpu_seconds
    loaded = wrk.run(daemon.url("turn_end"), load, CONNECTIONS, seconds, seed)
    micros = 1e6 * (daemon.usage().cpu_seconds - before) / loaded.requests
    return Run(loaded.per_second, micros)


def idle(daemon: Contender, port: int, count: int) -> float:
    """Return the CPU seconds that the daemon takes in a second without events."""
    with viewers(port, count):
        time.sleep(IDLE_SECONDS / 4)
        before, began = daemon.usage().cpu_seconds, time.monotonic()
        time.sleep(IDLE_SECONDS)
        return (daemon.usage().cpu_seconds - before) / (time.monotonic() - began)


@contextmanager
def viewers(port: int, count: int) -> Iterator[None]:
    """Have so many look at the page, until the block ends."""
    stop = threading.Event()
    looking = [threading.Barrier(count + 1)] if count else []
    threads = [
        *(threading.Thread(target=follow, args=(port, stop, *looking)) for _ in range(count)),
        *(threading.Thread(target=ask, args=(port, number, stop)) for number in range(count)),
    ]
    for thread in threads:
        thread.start()
    for barrier in looking:
        barrier.wait(30)
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def follow(port: int, stop: threading.Event, begun: threading.Barrier) -> None:
    with (
        httpx.Client(trust_env=False, timeout=10.0) as http,
        http.stream("GET", f"http://127.0.0.1:{port}/api/stream") as reply,
    ):
        reply.raise_for_status()
        begun.wait(30)
        for _ in reply.iter_raw():
            if stop.is_set():
                return


def ask(port: int, number: int, stop: threading.Event) -> None:
    with httpx.Client(trust_env=False, timeout=10.0) as http:
        while not stop.wait(LOOK_SECONDS):
            url = f"http://127.0.0.1:{port}/api/session"
            http.get(url, params={"id": session_id(number)}).raise_for_status()


if __name__ == "__main__":
    main()
