"""The real daemon as a process: start, signals, kill -9, and what it says when it cannot start."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.daemons import Daemon, running_daemon

ROOT = Path(__file__).parent.parent


def logged(daemon: Daemon) -> list[dict[str, object]]:
    return [json.loads(line) for line in daemon.log.read_text().splitlines()]


def test_a_stop_answers_what_is_in_flight_and_leaves_a_clean_database(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon:
        for number in range(5):
            daemon.turn_end(f"s{number}", f"c{number}")
            daemon.send("turn_start", f"s{number}")
        assert daemon.stop(signal.SIGTERM) == 0
        assert not (tmp_path / "sessions.db-wal").exists()
        with closing(sqlite3.connect(tmp_path / "sessions.db")) as database:
            assert database.execute("SELECT count(*) FROM sessions").fetchone() == (5,)
        lines = logged(daemon)
        said = [line["event"] for line in lines]
        assert said[0] == "ramakv starts"
        assert said[-2:] == ["stopping", "stopped"]
        assert said.count("ready") == 1
        assert len(said) == 6, said  # nothing of events, nor of requests
        daemon.start()
        assert daemon.send("health")["data"]["sessions_count"] == 5
        assert daemon.stop(signal.SIGINT) == 0


def test_a_second_signal_ends_it_at_once_and_loses_nothing(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon:
        daemon.turn_end("s", "a")
        # Half a request holds the drain, for as long as it may take.
        with socket.create_connection(("127.0.0.1", daemon.port)) as half:
            half.sendall(b"POST /event HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
            daemon.send("health")
            assert daemon.process is not None
            daemon.process.send_signal(signal.SIGTERM)
            while "stopping" not in daemon.log.read_text():
                time.sleep(0.01)
            began = time.monotonic()
            assert daemon.stop(signal.SIGTERM) == 1
            assert time.monotonic() - began < 2.0
        daemon.start()
        assert daemon.send("session_map", "s")["data"]["chunk_hashes"] == ["a"]


def test_half_a_request_cannot_hold_a_stop(tmp_path: Path) -> None:
    with (
        running_daemon(tmp_path, RAMAKV_LIMITS__DRAIN_TIMEOUT_SECONDS="0.5") as daemon,
        socket.create_connection(("127.0.0.1", daemon.port)) as half,
    ):
        half.sendall(b"POST /event HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
        daemon.send("health")
        began = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - began < 5.0


def test_a_log_that_nobody_reads_does_not_stop_the_daemon(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, RAMAKV_LOG__LEVEL="debug")
    reading, writing = os.pipe()
    try:
        daemon.process = subprocess.Popen(
            [sys.executable, "-m", "ramakv", "serve"],
            env=daemon.environment,
            cwd=tmp_path,
            stderr=writing,
        )
        daemon.log.write_text("")
        daemon.wait_until_ready()
        for _ in range(60):  # each session id is in a line of the log: 60 x 40 x 250 bytes
            batch = [{"type": "session_map", "session_id": "s" * 250}] * 40
            assert len(post(daemon, batch)) == 40
    finally:
        daemon.kill()
        os.close(reading)
        os.close(writing)


def post(daemon: Daemon, body: object) -> list[object]:
    reply = httpx.post(f"{daemon.url}/event", json=body, trust_env=False, timeout=30)
    answers: list[object] = reply.json()
    return answers


def test_it_listens_on_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "events.sock"
    daemon = Daemon(tmp_path, RAMAKV_LISTEN_ADDR=f"unix:{path}")
    try:
        daemon.start(wait=False)
        for _ in range(300):
            command = [sys.executable, "-m", "ramakv", "event", "health", "--url", f"unix:{path}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                break
        assert json.loads(done.stdout)["data"]["status"] == "running", done.stderr
        assert daemon.stop() == 0
        assert not path.exists()
    finally:
        daemon.kill()


def test_a_crash_of_a_part_that_all_depend_on_exits_with_1(tmp_path: Path) -> None:
    with running_daemon(tmp_path, PYTHONPATH=str(ROOT)) as daemon:
        daemon.turn_end("s", "a")
        assert daemon.stop() == 0
    script = (
        "import ramakv.store.store as s\n"
        "def broken(*a): raise ZeroDivisionError\n"
        "s.Store.commit = broken\n"
        "import ramakv.cli; ramakv.cli.main(['serve'])\n"
    )
    broken = Daemon(tmp_path)
    try:
        with broken.log.open("wb") as log:
            broken.process = subprocess.Popen(
                [sys.executable, "-c", script], env=broken.environment, stderr=log
            )
        broken.wait_until_ready()
        with pytest.raises((httpx.HTTPError, ValueError)):
            broken.turn_end("s", "b")
        assert broken.process.wait(30) == 1
        assert "ZeroDivisionError" in broken.log.read_text()
    finally:
        broken.kill()
    with running_daemon(tmp_path) as daemon:
        assert daemon.send("session_map", "s")["data"]["chunk_hashes"] == ["a"]


@pytest.mark.parametrize(
    ("environment", "code", "expected"),
    [
        ({"RAMAKV_LISTEN_ADDR": "nonsense"}, 2, "listen_addr: expected host:port"),
        ({"RAM_A_KV_CONFIG": "/nowhere.toml"}, 2, "cannot read configuration file"),
        ({"RAMAKV_LISTEN_ADDR": "127.0.0.1:{taken}"}, 2, "another process listens there"),
        (
            {"RAMAKV_ADMIN__LISTEN_ADDR": "127.0.0.1:{taken}"},
            2,
            "admin.listen_addr: cannot listen on '127.0.0.1:{taken}': another process listens",
        ),
        ({"RAMAKV_LMCACHE_URL": "http://127.0.0.1:{taken}"}, 2, "another process listens there"),
        ({"RAMAKV_SESSION_STORE_PATH": "/proc/nowhere/sessions.db"}, 1, "session_store_path"),
        ({"RAMAKV_SESSION_STORE_PATH": "{text}"}, 1, "not an SQLite database"),
    ],
)
def test_what_stops_a_start_is_one_line_and_an_exit_code(
    tmp_path: Path, environment: dict[str, str], code: int, expected: str
) -> None:
    (tmp_path / "text").write_text("no database " * 100)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        values = {
            name: value.replace("{taken}", str(port)).replace("{text}", str(tmp_path / "text"))
            for name, value in environment.items()
        }
        daemon = Daemon(tmp_path, **values)
        done = subprocess.run(
            [sys.executable, "-m", "ramakv", "serve"],
            env=daemon.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    complaints = [line for line in done.stderr.splitlines() if re.search("error|ramakv:", line)]
    assert done.returncode == code, done.stderr
    assert len(complaints) == 1, done.stderr
    assert expected.replace("{taken}", str(port)) in complaints[0]
    assert "Traceback" not in done.stderr


def test_the_rust_daemons_way_to_start_works(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    config = tmp_path / "ram-a-kv.toml"
    config.write_text(
        f'listen_addr = "127.0.0.1:{daemon.port}"\nnoop_backend = true\ndebug_enabled = false\n'
        f'session_store_path = "{tmp_path}/sessions.db"\nturn_start_prefetch = true\n'
    )
    environment = {k: v for k, v in daemon.environment.items() if not k.startswith("RAMAKV_")}
    environment["RAM_A_KV_CONFIG"] = str(config)
    environment["RAMAKV_ADMIN__LISTEN_ADDR"] = "127.0.0.1:0"  # the usual one may be taken
    try:
        with daemon.log.open("wb") as log:
            command = str(Path(sys.executable).parent / "ram-a-kv")
            daemon.process = subprocess.Popen([command], env=environment, stderr=log)
        daemon.wait_until_ready()
        daemon.turn_end("s", "a")
        assert daemon.send("turn_start", "s")["data"]["prefetch_sent"]
        assert daemon.stop() == 0
    finally:
        daemon.kill()
