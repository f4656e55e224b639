"""From the Rust daemon to ramakv: its configuration and its database, as they are."""

from __future__ import annotations

import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.daemons import Daemon

SESSIONS: dict[str, list[str]] = {
    f"s{number}": [f"-{number}a{chunk:x}" for chunk in range(number)] for number in range(1, 30)
}
PINNED = ("s3", "s7")


def write_config(folder: Path, port: int, engine_port: int) -> Path:
    """Every key that the Rust daemon knows, and no other."""
    path = folder / "config.toml"
    path.write_text(
        f"""
        listen_addr = "127.0.0.1:{port}"
        lmcache_url = "http://127.0.0.1:{engine_port}"
        noop_backend = true
        debug_enabled = false
        debug_dir = "{folder}/kvcache_debug"
        trace_events = false
        session_store_path = "{folder}/sessions.db"
        turn_start_prefetch = true
        auth_token = ""
        """
    )
    return path


def write_database(folder: Path, *, with_maps_as: type[Any]) -> None:
    with closing(sqlite3.connect(folder / "sessions.db")) as rust:
        rust.executescript(
            """
            CREATE TABLE sessions (
                session_id TEXT PRIMARY KEY,
                map_json TEXT NOT NULL,
                turn_count INTEGER NOT NULL DEFAULT 0
            );
            CREATE TABLE pins (session_id TEXT PRIMARY KEY, pinned_at_ms INTEGER NOT NULL);
            """
        )
        for number, (name, hashes) in enumerate(SESSIONS.items()):
            found = hashes if with_maps_as is list else dict.fromkeys(hashes, "")
            rust.execute("INSERT INTO sessions VALUES (?, ?, ?)", (name, json.dumps(found), number))
        rust.executemany("INSERT INTO pins VALUES (?, 1700000000000)", [(name,) for name in PINNED])
        rust.commit()


class UpgradedDaemon(Daemon):
    """Started as the Rust daemon's documents start it: by `RAM_A_KV_CONFIG`, and nothing else."""

    def __init__(self, folder: Path, **environment: str) -> None:
        super().__init__(folder)
        config = write_config(folder, self.port, self.engine_port)
        self.environment = {
            **{key: value for key, value in self.environment.items() if key[:6] != "RAMAKV"},
            "RAM_A_KV_CONFIG": str(config),
            # The default port may be somebody else's on the machine that runs the tests.
            "RAMAKV_ADMIN__LISTEN_ADDR": "127.0.0.1:0",
            **environment,
        }
        self.command = [str(Path(sys.executable).parent / "ram-a-kv")]


@pytest.mark.parametrize("with_maps_as", [list, dict], ids=["arrays", "objects"])
def test_sessions_and_pins_of_the_rust_daemon_are_there_after_the_first_start_and_the_next(
    tmp_path: Path, with_maps_as: type[Any]
) -> None:
    write_database(tmp_path, with_maps_as=with_maps_as)
    config = tmp_path / "config.toml"
    daemon = UpgradedDaemon(tmp_path)
    before = config.read_bytes()
    try:
        for _ in range(2):
            daemon.start()
            assert daemon.send("health")["data"]["sessions_count"] == len(SESSIONS)
            for name, hashes in SESSIONS.items():
                assert daemon.send("session_map", name)["data"]["chunk_hashes"] == hashes
            assert daemon.stop() == 0
            with closing(sqlite3.connect(tmp_path / "sessions.db")) as database:
                pins = database.execute("SELECT session_id, pinned_at_ms FROM pins ORDER BY 1")
                assert pins.fetchall() == [(name, 1700000000000) for name in PINNED]
                turns = database.execute("SELECT session_id, turn_count FROM sessions")
                assert dict(turns) == {name: n for n, name in enumerate(SESSIONS)}
                assert database.execute("SELECT count(*) FROM set_aside").fetchone() == (0,)
    finally:
        daemon.kill()
    assert config.read_bytes() == before


def test_a_round_trip_works_on_it_and_pins_are_kept_as_there_where_that_is_set(
    tmp_path: Path,
) -> None:
    write_database(tmp_path, with_maps_as=list)
    daemon = UpgradedDaemon(tmp_path, RAMAKV_SESSIONS__KEEP_PINNED_ON_CLOSE="true")
    try:
        daemon.start()
        assert daemon.send("turn_start", "s5")["data"]["prefetch_count"] == 5
        assert daemon.turn_end("s5", *SESSIONS["s5"][:2], "new")["data"]["evicted_count"] == 3
        assert daemon.send("session_close", "s5")["data"]["pinned"] is False
        assert daemon.send("session_close", "s7")["data"]["pinned"] is True
        restored = daemon.send("snapshot_restore", "s7")["data"]
        assert restored["prefetch_count"] == 7
        assert restored["pinned"] is True
        assert daemon.send("health")["data"]["sessions_count"] == len(SESSIONS) - 1
    finally:
        daemon.kill()
