"""Who is measured: daemons, floors, a peer; each with what it uses up."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench.counted_daemon import Counts, create_counts, read_counts
from bench.processes import (
    LOAD_CORE,
    SERVER_CORE,
    cpu_seconds,
    free_port,
    post,
    python,
    rss_bytes,
    running,
    wait_until_ready,
)
from bench.results import Values
from bench.store_floor import seed
from bench.targets import ASGI, PEER, QUART, RAMAKV
from bench.workload import KINDS, Workload


class Usage(NamedTuple):
    """What a contender used up to now."""

    cpu_seconds: float
    rss_bytes: float
    counts: Counts | None

    def since(self, before: Usage, events: float) -> Values:
        """Return what each event cost since then."""
        values = {
            "cpu_us": (self.cpu_seconds - before.cpu_seconds) / events * 1e6,
            "rss_mb": self.rss_bytes / 1e6,
        }
        if self.counts is not None and before.counts is not None:
            transactions = self.counts.transactions - before.counts.transactions
            values["transactions_per_event"] = transactions / events
            values["fsyncs_per_event"] = (self.counts.fsyncs - before.counts.fsyncs) / events
        return values


@dataclass(frozen=True, slots=True)
class Contender:
    """A server that answers events."""

    name: str
    base: str
    pid: int | None = None
    takes_all_at_one_path: bool = True
    folder: Path | None = None
    start_seconds: float = math.nan
    start_cpu_seconds: float = math.nan

    def url(self, kind: str) -> str:
        return f"{self.base}/{'event' if self.takes_all_at_one_path else kind}"

    def usage(self) -> Usage:
        counts = None
        if self.folder is not None:
            counts = read_counts(self.folder / "counts", self.folder / "sessions.db")
        if self.pid is None:
            return Usage(math.nan, math.nan, counts)
        return Usage(cpu_seconds(self.pid), float(rss_bytes(self.pid)), counts)


@contextmanager
def daemon(
    folder: Path,
    name: str = RAMAKV,
    sessions: Workload | None = None,
    under: Sequence[str] = (),
    **settings: str,
) -> Iterator[Contender]:
    """Run a ramakv on a database in this folder, with the noop backend unless settings differ.

    `sessions` are those of a new database; without it, there are none. `under` is a command
    that runs the daemon's own.
    """
    folder.mkdir(exist_ok=True)
    if sessions is not None:
        seed(folder / "sessions.db", sessions)
    create_counts(folder / "counts")
    base = f"http://127.0.0.1:{free_port()}"
    environment = {
        "RAMAKV_LISTEN_ADDR": base.removeprefix("http://"),
        "RAMAKV_ADMIN__LISTEN_ADDR": "127.0.0.1:0",
        "RAMAKV_BACKEND__KIND": "noop",
        "RAMAKV_SESSION_STORE_PATH": str(folder / "sessions.db"),
        **settings,
    }
    # An empty file: the machine's own configuration must not be found.
    (folder / "config.toml").touch()
    serve = ["serve", "--config", str(folder / "config.toml")]
    command = [*under, *python("bench.counted_daemon", str(folder / "counts"), *serve)]
    with running(command, SERVER_CORE, folder / "log", environment) as process:
        seconds = wait_until_ready(process, f"{base}/event", folder / "log")
        yield Contender(
            name,
            base,
            process.pid,
            folder=folder,
            start_seconds=seconds,
            start_cpu_seconds=cpu_seconds(process.pid),
        )


@contextmanager
def floor(folder: Path, name: str, replies: dict[str, str]) -> Iterator[Contender]:
    """Run a floor that answers each kind of event with these replies."""
    path = folder / "replies.json"
    path.write_text(json.dumps({f"/{kind}": reply for kind, reply in replies.items()}))
    port = free_port()
    command = python("bench.floors", {QUART: "quart", ASGI: "asgi"}[name], str(port), str(path))
    log = folder / f"{name}.log"
    with running(command, SERVER_CORE, log) as process:
        base = f"http://127.0.0.1:{port}"
        wait_until_ready(process, f"{base}/health", log)
        yield Contender(name, base, process.pid, takes_all_at_one_path=False)


@contextmanager
def lmcache(folder: Path, seconds: float) -> Iterator[str]:
    """Run a fake LMCache whose calls take so long; gives its address."""
    port = free_port()
    log = folder / f"lmcache-{seconds}.log"
    with running(python("bench.fake_lmcache", str(port), str(seconds)), LOAD_CORE, log) as process:
        base = f"http://127.0.0.1:{port}"
        wait_until_ready(process, f"{base}/counts", log)
        yield base


def peer(url: str, pid: int | None) -> Contender:
    """Return a server that somebody else runs."""
    return Contender(PEER, url.rstrip("/").removesuffix("/event"), pid)


def replies_of(contender: Contender, workload: Workload) -> dict[str, str]:
    """Return what a contender with these sessions answers to each kind of event."""
    session, rng = workload.session_ids()[0], random.Random(0)
    replies = {
        kind: post(contender.url(kind), workload.event(kind, session, rng))[1].decode()
        for kind in KINDS
    }
    return replies | {"agents": replies["turn_end"]}


def lmcache_counts(url: str) -> dict[str, int]:
    """Return what a fake LMCache was asked."""
    counts: dict[str, int] = json.loads(post(f"{url}/counts", b"{}")[1])
    return counts
