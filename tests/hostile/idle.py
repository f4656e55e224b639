"""What thousands of idle connections cost the real daemon, and the client that works beside them.

python -m tests.hostile.idle --connections 5000
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.daemons import Daemon, running_daemon
from tests.hostile.load import Polite, memory_mib

SPARE_FDS = 200
"""What a process needs beside its connections."""
ROUNDS = 3
REQUESTS = 60
LIMITS = {
    "RAMAKV_BACKEND__KIND": "noop",
    "RAMAKV_LIMITS__KEEP_ALIVE_SECONDS": "300",
    "RAMAKV_LIMITS__CONNECTIONS_MAX": "20000",
}


@dataclass(frozen=True)
class Cost:
    """Milliseconds of a request without and with idle connections, KiB of each, descriptors."""

    alone_ms: float
    beside_ms: float
    kib_each: float
    fds_before: int
    fds_after: int


def connections_possible(wanted: int) -> bool:
    """Raise this process's limit of open files as far as it may be, and tell if that is enough."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + SPARE_FDS
    if hard != resource.RLIM_INFINITY and hard < needed:
        return False
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    return True


def measure(daemon: Daemon, connections: int) -> Cost:
    """Compare a client without, beside, and again without so many idle connections."""
    assert daemon.process is not None
    pid = daemon.process.pid
    _typical_ms(daemon)  # warms up
    alone = [_typical_ms(daemon) for _ in range(ROUNDS)]
    fds, (before_mib, _) = _settled_fds(pid), memory_mib(pid)
    with ExitStack() as idle:
        for _ in range(connections):
            sock = socket.create_connection(("127.0.0.1", daemon.port), timeout=30)
            idle.enter_context(sock)
        _wait(lambda: _fds(pid) >= fds + connections)
        after_mib, _ = memory_mib(pid)
        beside = [_typical_ms(daemon) for _ in range(ROUNDS)]
    _wait(lambda: _fds(pid) <= fds)
    fds_after = _settled_fds(pid)
    alone += [_typical_ms(daemon) for _ in range(ROUNDS)]
    return Cost(
        median(alone), median(beside), (after_mib - before_mib) * 1024 / connections, fds, fds_after
    )


def _typical_ms(daemon: Daemon) -> float:
    return Polite(daemon.port, pause_seconds=0.001).work(REQUESTS / 300).p50


def _fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _settled_fds(pid: int) -> int:
    """Without those of a connection that has just ended, and is not closed yet."""
    fewest = _fds(pid)
    for _ in range(20):
        time.sleep(0.01)
        fewest = min(fewest, _fds(pid))
    return fewest


def _wait(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it never happened"
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=5000)
    options = parser.parse_args()
    if not connections_possible(options.connections):
        raise SystemExit("the hard limit of open files is too low; see `ulimit -Hn`")
    with (
        tempfile.TemporaryDirectory() as folder,
        running_daemon(Path(folder), **LIMITS) as daemon,
    ):
        began = time.monotonic()
        cost = measure(daemon, options.connections)
        print(  # noqa: T201
            f"{options.connections} idle connections: p50 {cost.alone_ms:.2f} ms alone, "
            f"{cost.beside_ms:.2f} ms beside ({cost.beside_ms / cost.alone_ms:.2f}x), "
            f"{cost.kib_each:.1f} KiB each, descriptors {cost.fds_before} before and "
            f"{cost.fds_after} after; {time.monotonic() - began:.1f} s"
        )


if __name__ == "__main__":
    main()
