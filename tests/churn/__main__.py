"""The command: a daemon, an LMCache, a crowd, and a table at the end."""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import trio

from tests.churn.clients import Crowd
from tests.churn.samples import Report, percentile, process_sample, store_sample
from tests.daemons import Daemon
from tests.test_engine_alone import engine_alone

AGENTS = 8
SAMPLE_SECONDS = 2.0
OUTAGES = 6
OUTAGE_SHARE = 0.15
"""Of the time, LMCache is down: `OUTAGES` times, at even distances."""

EMPTY_SECONDS_MAX = 120.0
"""How long it may take, once all agents are gone, until nothing is left of them."""

DEAD_LETTERS_MAX = 50
WAL_PAGES = 4000
WAL_BYTES_MAX = 2 * WAL_PAGES * 4096
"""A checkpoint is made at `WAL_PAGES`; what comes while it is made is written behind it."""

ENVIRONMENT = {
    # Short times, so that what a life leaves behind is gone well within the warm-up.
    "RAMAKV_SESSIONS__PASSIVATE_SECONDS": "2.0",
    "RAMAKV_SESSIONS__IDLE_SUSPEND_SECONDS": "8.0",
    "RAMAKV_SESSIONS__IDLE_CLOSE_SECONDS": "16.0",
    "RAMAKV_SESSIONS__FORK_TTL_SECONDS": "12.0",
    "RAMAKV_SESSIONS__CLOSED_MEMORY_SECONDS": "6.0",
    "RAMAKV_EVICTION__DEAD_LETTERS_MAX": str(DEAD_LETTERS_MAX),
    "RAMAKV_LIMITS__HASH_CHARS_MAX": "2000",
    "RAMAKV_STORE__WAL_AUTOCHECKPOINT_PAGES": str(WAL_PAGES),
    "RAMAKV_BACKEND__CALL_TIMEOUT_SECONDS": "1.0",
    "RAMAKV_BACKEND__CONNECT_TIMEOUT_SECONDS": "1.0",
    "RAMAKV_BACKEND__BREAKER_OPEN_SECONDS": "1.0",
    "RAMAKV_EMBEDDED__HOT_CHUNKS_MAX": "2048",
    "RAMAKV_EMBEDDED__DISK_CHUNKS_MAX": "4096",
}


class Churn:
    """One run."""

    def __init__(self, daemon: Daemon, engine: subprocess.Popen[bytes] | None, seed: int) -> None:
        self.daemon = daemon
        self.engine = engine
        self.rng = random.Random(seed)
        self.report = Report()
        self._since = time.monotonic()
        self._sent = 0

    async def run(self, seconds: float) -> Crowd:
        """Churn for so long, then wait until nothing is left of all the lives."""
        limits = httpx.Limits(max_connections=AGENTS * 2)
        async with (
            httpx.AsyncClient(
                base_url=self.daemon.url, trust_env=False, verify=False, limits=limits, timeout=30
            ) as events,
            httpx.AsyncClient(
                base_url=self.daemon.environment["RAMAKV_LMCACHE_URL"],
                trust_env=False,
                verify=False,
                timeout=60,
            ) as engine,
        ):
            crowd = Crowd(events, engine, self.rng)
            with trio.move_on_after(seconds):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._watch, crowd)
                    if self.engine is not None:
                        nursery.start_soon(self._cut_off_lmcache, self.engine, crowd, seconds)
                    for _ in range(AGENTS):
                        nursery.start_soon(crowd.live)
        await self._until_empty()
        return crowd

    async def _watch(self, crowd: Crowd) -> None:
        while True:
            await trio.sleep(SAMPLE_SECONDS)
            sample = self._sample(crowd)
            self.report.add(sample)
            print(" ".join(f"{name}={value:.4g}" for name, value in sample.items()), flush=True)

    def _sample(self, crowd: Crowd) -> dict[str, float]:
        assert self.daemon.process is not None
        now, taken = time.monotonic(), crowd.seconds
        rate = (crowd.sent - self._sent) / (now - self._since)
        crowd.seconds, self._sent, self._since = [], crowd.sent, now
        return {
            **process_sample(self.daemon.process.pid),
            **(process_sample(self.engine.pid, "LMCache ") if self.engine else {}),
            **store_sample(self.daemon.folder / "sessions.db"),
            "events/s": rate,
            "p50 ms": 1000 * percentile(taken, 0.5),
            "p99 ms": 1000 * percentile(taken, 0.99),
        }

    async def _cut_off_lmcache(
        self, engine: subprocess.Popen[bytes], crowd: Crowd, seconds: float
    ) -> None:
        """Stop LMCache's process, and let it go on, again and again."""
        period = seconds / OUTAGES
        try:
            for _ in range(OUTAGES):
                await trio.sleep(period * (1 - OUTAGE_SHARE) / 2)
                crowd.engine_is_up = False
                engine.send_signal(signal.SIGSTOP)
                await trio.sleep(period * OUTAGE_SHARE)
                engine.send_signal(signal.SIGCONT)
                crowd.engine_is_up = True
                await trio.sleep(period * (1 - OUTAGE_SHARE) / 2)
        finally:
            engine.send_signal(signal.SIGCONT)

    async def _until_empty(self) -> None:
        """All sessions are closed, by agents or by the daemon; all that was owed is evicted."""
        with trio.fail_after(EMPTY_SECONDS_MAX):
            while True:
                rows = store_sample(self.daemon.folder / "sessions.db")
                left = [
                    name
                    for name in ("sessions", "forks", "closed", "pins", "outbox owed")
                    if rows[name]
                ]
                if not left:
                    return
                await trio.sleep(0.5)


@contextmanager
def lmcache(folder: Path, *, inside: bool) -> Iterator[tuple[int, subprocess.Popen[bytes]] | None]:
    """The embedded engine, alone in a process that can be stopped, or inside the daemon."""
    if inside:
        yield None
        return
    with engine_alone(folder, 1, **ENVIRONMENT) as (port, process):
        yield port, process


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.churn", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument(
        "--inside", action="store_true", help="the engine inside the daemon, and never down"
    )
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as name,
        lmcache(Path(name), inside=arguments.inside) as alone,
    ):
        environment = dict(ENVIRONMENT)
        if alone is not None:
            environment["RAMAKV_BACKEND__KIND"] = "lmcache"
            environment["RAMAKV_LMCACHE_URL"] = f"http://127.0.0.1:{alone[0]}"
        daemon = Daemon(Path(name), **environment)
        try:
            daemon.start()
            churn = Churn(daemon, alone[1] if alone else None, arguments.seed)
            crowd = trio.run(churn.run, arguments.minutes * 60)
            code = daemon.stop()
        finally:
            daemon.kill()
    faults = churn.report.judge(dead_letters_max=DEAD_LETTERS_MAX, wal_bytes_max=WAL_BYTES_MAX)
    faults += [f"the daemon ended with exit code {code}"] if code else []
    print(churn.report.table())
    print(
        f"minutes: {arguments.minutes:g}, lives: {crowd.lives}, events: {crowd.sent}, "
        f"refused: {crowd.refused}, seed {arguments.seed}: {'; '.join(faults) or 'flat'}"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
