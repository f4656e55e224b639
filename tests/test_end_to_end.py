"""Traces through `ramakv replay`, a real daemon and its embedded engine; then nothing is left."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.daemons import Daemon, running_daemon
from tests.traces import make_trace, write_trace

SETTLE_SECONDS_MAX = 60.0
TRACES = os.environ.get("RAMAKV_TRACES", "")


def replay(daemon: Daemon, trace: Path, *options: str) -> dict[str, Any]:
    command = [
        *(sys.executable, "-m", "ramakv", "replay", str(trace), "--url", daemon.url, "--close"),
        *("--engine-url", f"http://127.0.0.1:{daemon.engine_port}", "--json", "-", *options),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def hot_chunks(daemon: Daemon) -> int:
    stats = httpx.get(f"http://127.0.0.1:{daemon.engine_port}/engine/stats", trust_env=False)
    return int(stats.json()["tiers"]["LocalCPUBackend"]["chunks"])


def expect_nothing_left(daemon: Daemon) -> None:
    assert daemon.send("health")["data"]["sessions_count"] == 0
    ends = time.monotonic() + SETTLE_SECONDS_MAX
    while hot_chunks(daemon) and time.monotonic() < ends:
        time.sleep(0.05)
    assert hot_chunks(daemon) == 0
    assert daemon.stop() == 0
    command = [sys.executable, "-m", "ramakv", "store", "check", "--json"]
    done = subprocess.run(
        [*command, str(daemon.folder / "sessions.db")], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found["sessions_active"] == found["sessions_suspended"] == found["forks"] == 0
    assert found["outbox_owed"] == found["outbox_dead_letters"] == 0


def test_a_generated_trace_leaves_nothing_behind(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl.gz"
    requests = make_trace(5, sessions=8)
    write_trace(trace, requests)
    with running_daemon(tmp_path) as daemon:
        figures = replay(daemon, trace)
        assert figures["errors"] == 0
        assert figures["requests"] == len(requests)
        assert figures["events"]["turn_end"] == len(requests)
        assert figures["events"]["session_close"] == 8
        assert figures["chunks"]["hot"] > figures["chunks"]["missing"]
        expect_nothing_left(daemon)


@pytest.mark.traces
@pytest.mark.skipif(not TRACES, reason="RAMAKV_TRACES names no folder")
@pytest.mark.parametrize(
    ("name", "options"),
    [("lmcache_agent_miniswe", ()), ("claude_code_day_shared", ("--limit", "3000"))],
)
def test_a_recorded_trace_leaves_nothing_behind(
    tmp_path: Path, name: str, options: tuple[str, ...]
) -> None:
    with running_daemon(tmp_path) as daemon:
        figures = replay(daemon, Path(TRACES) / f"{name}.jsonl.gz", *options)
        assert figures["errors"] == 0
        expect_nothing_left(daemon)


def held_chunks(engine: str) -> int:
    metrics = httpx.get(f"{engine}/metrics", trust_env=False).text
    [held] = re.findall(r"^lmcache:pin_monitor_pinned_objects_count\S* (\S+)$", metrics, re.M)
    return int(float(held))


@pytest.mark.traces
@pytest.mark.skipif(not TRACES, reason="RAMAKV_TRACES names no folder")
def test_an_lmcache_that_hangs_when_prefetches_fill_its_memory_never_does(tmp_path: Path) -> None:
    """A recorded trace against the embedded engine as LMCache 0.4.4: the budget protects it."""
    budget = 1024
    with running_daemon(
        tmp_path,
        RAMAKV_EMBEDDED__BEHAVIOUR="lmcache-0.4.4",
        RAMAKV_EMBEDDED__HOT_CHUNKS_MAX=str(4 * budget),
        RAMAKV_BACKEND__UNCONSUMED_CHUNKS_MAX=str(budget),
    ) as daemon:
        engine = f"http://127.0.0.1:{daemon.engine_port}"
        trace = Path(TRACES) / "claude_code_day_shared.jsonl.gz"
        held = []
        with ThreadPoolExecutor() as threads:
            replaying = threads.submit(replay, daemon, trace, "--limit", "2000")
            while not replaying.done():
                held.append(held_chunks(engine))
                time.sleep(0.1)
        assert replaying.result()["errors"] == 0
        assert max(held) <= budget
        assert "prefetching pauses" in daemon.log.read_text(), "the budget was never reached"
        tiers = httpx.get(f"{engine}/engine/stats", trust_env=False).json()["tiers"]
        assert tiers["LocalCPUBackend"]["evictions"] > 0
        assert tiers["LocalDiskBackend"]["evictions"] == 0
