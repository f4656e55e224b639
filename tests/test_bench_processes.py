"""The benchmark's processes: what is counted while they run."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from bench import generator
from bench.contenders import Usage, daemon
from bench.counted_daemon import Counts, create_counts, read_counts
from bench.floors import asgi_app, quart_app
from bench.generator import Plan
from bench.processes import cpu_seconds, post, rss_bytes
from bench.schedule import Item, one_each
from bench.store_floor import commit_groups, initial_states, seed
from bench.workload import Workload
from bench.wrk import LoadError
from ramakv.store.database import Database
from ramakv.store.store import Store

SMALL = Workload(sessions=6, chunks=8, changed=2, hash_chars=16)


def test_usage_is_what_each_event_cost() -> None:
    before, after = Usage(1.0, 5e6, Counts(10, 40, 1)), Usage(1.5, 6e6, Counts(20, 90, 2))
    assert after.since(before, 100) == {
        "cpu_us": 5000.0,
        "rss_mb": 6.0,
        "transactions_per_event": 0.1,
        "fsyncs_per_event": 0.13,  # three for the checkpoint
    }
    assert "fsyncs_per_event" not in Usage(1.0, 1.0, None).since(Usage(0.0, 1.0, None), 1)


def test_a_daemon_tells_its_transactions_and_a_refused_event_fails_the_load(tmp_path: Path) -> None:
    """Rows that were there before are not counted: no event wrote them."""
    with daemon(tmp_path / "daemon", sessions=SMALL) as ours:
        assert ours.usage().counts == Counts(0, 0, 0)
        items = one_each(SMALL, "turn_end")
        found = generator.play(Plan(ours.url("turn_end"), items, 2, open_loop=False))
        assert found["events"] == 6
        counts = ours.usage().counts
        assert counts is not None
        assert counts.commits == 6
        assert 1 <= counts.transactions <= 7
        status, body = post(ours.url("health"), b'{"type":"health"}')
        assert (status, json.loads(body)["data"]["sessions_count"]) == (200, 6)

        body = b'{"type":"session_map","session_id":"nobody"}'
        items = [Item(0.0, None, "session_map", body)]
        with pytest.raises(LoadError, match="not found"):
            generator.play(Plan(ours.url("session_map"), items, 1, open_loop=True))


def test_counts_are_nothing_before_the_first_transaction(tmp_path: Path) -> None:
    create_counts(tmp_path / "counts")
    assert read_counts(tmp_path / "counts", tmp_path / "sessions.db") == Counts(0, 0, 0)


def test_the_log_of_the_database_tells_its_cycles(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    create_counts(tmp_path / "counts")
    seed(path, SMALL)
    with closing(Store(Database.open(path, wal_autocheckpoint_pages=4))) as store:
        states = {state.session_id: state for state in initial_states(SMALL)}
        before = read_counts(tmp_path / "counts", path)
        for _ in range(20):
            found = commit_groups(store, SMALL, states, group=3, seconds=1e-9)
        assert read_counts(tmp_path / "counts", path).wal_cycles > before.wal_cycles
        assert found["per_second"] > 0
        assert found["transactions_per_event"] == 1 / 3
        stored = store.load(SMALL.session_ids()[0])
    assert stored.turn_count == 21  # the seed, and a part in each group
    assert len(stored.chunk_map) == 8


def test_this_process_uses_cpu_and_memory() -> None:
    assert cpu_seconds(os.getpid()) > 0
    assert rss_bytes(os.getpid()) > 1_000_000


@pytest.mark.parametrize("app", [quart_app, asgi_app])
async def test_a_floor_answers_with_the_given_bytes(app: object) -> None:
    served = app({"/health": b'{"ok":true}', "/turn_end": b"{}"})  # type: ignore[operator]
    transport = httpx.ASGITransport(served)
    async with httpx.AsyncClient(transport=transport, base_url="http://floor") as client:
        reply = await client.post("/health", content=b'{"type":"health"}')
        assert (reply.status_code, reply.content) == (200, b'{"ok":true}')
        assert reply.headers["content-type"] == "application/json"
