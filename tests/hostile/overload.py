"""Give the real daemon more than it can bear, and print what it did.

    python -m tests.hostile.overload --seconds 60

First fairness: what a polite client's turns take alone, beside 64 connections that work on one
session, and beside as many that work on a session each, in windows that take turns, so that what
else the machine does falls on all alike. Then everything at once: full mailboxes, more sessions
than there may be, large maps, and more connections than there may be.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from tests.daemons import Daemon, running_daemon
from tests.hostile.load import Polite, figures, hammering, memory_mib

CONNECTIONS = 64
WARM_UP_SECONDS = 0.7
CROWD = {  # kind of client: connections and sessions
    "turns": (256, 2),
    "new": (64, 1),
    "large": (16, 16),
    "turns beyond": (200, 200),
}
LIMITS = {
    "RAMAKV_LIMITS__SESSIONS_MAX": "2000",
    "RAMAKV_LIMITS__CONNECTIONS_MAX": "400",
    "RAMAKV_LIMITS__IN_HAND_BYTES_MAX": "4000000",
}


def fairness(daemon: Daemon, windows: int, seconds: float) -> dict[str, tuple[float, float, float]]:
    """Return p50 and p99 in ms of a polite client, and the others' answers a second, by company."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for _ in range(windows):
        for company, sessions in {"alone": 0, "one": 1, "each": CONNECTIONS}.items():
            found.setdefault(company, []).append(_window(daemon, sessions, seconds))
    return {
        company: (
            median(p50 for p50, _, _ in seen),
            median(p99 for _, p99, _ in seen),
            median(rate for _, _, rate in seen),
        )
        for company, seen in found.items()
    }


def _window(daemon: Daemon, sessions: int, seconds: float) -> tuple[float, float, float]:
    if not sessions:
        polite = Polite(daemon.port).work(seconds)
        return polite.p50, polite.p99, 0.0
    length = seconds + 2 * WARM_UP_SECONDS
    with hammering(daemon.port, length, "turns", CONNECTIONS, sessions) as process:
        time.sleep(WARM_UP_SECONDS)
        polite = Polite(daemon.port).work(seconds)
        counts = figures(process, length)
    assert polite.statuses.keys() == {200}, polite.statuses
    return polite.p50, polite.p99, counts["200"] / length


def overload(daemon: Daemon, seconds: float) -> tuple[Polite, Counter[str]]:
    """Everything at once, beside a polite client; returns that, and all statuses."""
    length = seconds + 2 * WARM_UP_SECONDS
    polite = Polite(daemon.port)
    counts: Counter[str] = Counter()
    with ExitStack() as stack:
        with polite.connected() as sock:  # before the crowd takes all places
            crowd = [
                stack.enter_context(hammering(daemon.port, length, kind.split()[0], *shape))
                for kind, shape in CROWD.items()
            ]
            time.sleep(WARM_UP_SECONDS)
            polite.work_on(sock, seconds)
        for process in crowd:
            counts += figures(process, length)
    return polite, counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of everything at once")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--window-seconds", type=float, default=3.0)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        running_daemon(Path(folder), RAMAKV_BACKEND__KIND="noop", **LIMITS) as daemon,
    ):
        _print_fairness(fairness(daemon, options.windows, options.window_seconds))
        _print_overload(daemon, options.seconds)


def _print_fairness(seen: dict[str, tuple[float, float, float]]) -> None:
    names = {
        "alone": "alone",
        "one": f"beside {CONNECTIONS} connections on one session",
        "each": f"beside {CONNECTIONS} connections on {CONNECTIONS} sessions",
    }
    for company, (p50, p99, rate) in seen.items():
        print(  # noqa: T201
            f"polite client {names[company]:42} p50 {p50:6.1f} ms  p99 {p99:6.1f} ms  "
            f"others {rate:6.0f}/s"
        )
    for other in ("alone", "each"):
        ratio = seen["one"][1] / seen[other][1]
        print(f"p99 beside one hot session, against {other:5}: {ratio:.2f}")  # noqa: T201


def _print_overload(daemon: Daemon, seconds: float) -> None:
    assert daemon.process is not None
    pid = daemon.process.pid
    alone = Polite(daemon.port).work(5)
    start, _ = memory_mib(pid)
    polite, counts = overload(daemon, seconds)
    time.sleep(2)
    end, peak = memory_mib(pid)
    after = Polite(daemon.port).work(3)
    print(f"requests {sum(counts.values())}: {dict(sorted(counts.items()))}")  # noqa: T201
    print(f"RSS start {start:.0f} MiB, peak {peak:.0f} MiB, end {end:.0f} MiB")  # noqa: T201
    for name, client in {"alone": alone, "beside": polite, "after": after}.items():
        print(  # noqa: T201
            f"polite client {name:6} p50 {client.p50:6.1f} ms  p99 {client.p99:6.1f} ms  "
            f"{dict(client.statuses)}"
        )
    print(f"p99 beside / alone: {polite.p99 / alone.p99:.1f}")  # noqa: T201
    inside = int(LIMITS["RAMAKV_LIMITS__CONNECTIONS_MAX"])
    share = inside / (sum(counts.values()) / (seconds + 2 * WARM_UP_SECONDS)) * 1000
    print(f"an equal share of {inside} connections: an answer every {share:.0f} ms")  # noqa: T201


if __name__ == "__main__":
    main()
