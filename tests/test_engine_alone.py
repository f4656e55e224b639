"""`ramakv lmcache serve`, a daemon with several workers, and `ramakv doctor`."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.daemons import Daemon, free_port, running_daemon

READY_SECONDS_MAX = 30.0


def get(url: str) -> Any:
    return httpx.get(url, trust_env=False, verify=False, timeout=10.0).json()


@contextmanager
def engine_alone(
    folder: Path, workers: int, **environment: str
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    daemon = Daemon(folder, **environment)  # for its environment only
    port = free_ports(workers + 1)
    command = [sys.executable, "-m", "ramakv", "lmcache", "serve"]
    process = subprocess.Popen(
        [*command, "--port", str(port), "--workers", str(workers)],
        env=daemon.environment,
        cwd=folder,
        stderr=subprocess.DEVNULL,
    )
    try:
        ends = time.monotonic() + READY_SECONDS_MAX
        while time.monotonic() < ends:
            try:
                get(f"http://127.0.0.1:{port}/meta")
                break
            except httpx.HTTPError:
                time.sleep(0.02)
        yield port, process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(30)


def free_ports(count: int) -> int:
    """The first of so many ports in a row that were free a moment ago."""
    for _ in range(100):
        first = free_port()
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first
    raise AssertionError("no free ports in a row")


def test_the_engine_runs_alone_with_its_workers_on_the_next_ports(tmp_path: Path) -> None:
    with engine_alone(tmp_path, workers=2) as (port, process):
        roles = [get(f"http://127.0.0.1:{port + n}/meta")["role"] for n in range(3)]
        assert roles == ["scheduler", "worker", "worker"]
        command = [sys.executable, "-m", "ramakv", "lmcache", "version", "--json"]
        urls = [f"--url=http://127.0.0.1:{port + n}" for n in range(3)]
        done = subprocess.run([*command, *urls], capture_output=True, text=True, check=True)
        assert len(json.loads(done.stdout)) == 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_a_daemon_works_with_an_engine_that_runs_alone(tmp_path: Path) -> None:
    with engine_alone(tmp_path, workers=2) as (port, _):
        url = f"http://127.0.0.1:{port}"
        with running_daemon(
            tmp_path, RAMAKV_BACKEND__KIND="lmcache", RAMAKV_LMCACHE_URL=url
        ) as daemon:
            body = {"chunk_hashes": ["a", "b"]}
            httpx.post(f"{url}/engine/store", json=body, trust_env=False, verify=False)
            daemon.turn_end("s", "a", "b")
            started = daemon.send("turn_start", "s")["data"]
            assert (started["prefetch_sent"], started["backend_degraded"]) == (True, False)
            report = doctor(daemon)
            assert {finding["level"] for finding in report} == {"ok"}
            daemon.send("session_close", "s")
            assert daemon.stop() == 0


def test_a_daemon_can_have_an_engine_of_several_workers(tmp_path: Path) -> None:
    port = free_ports(3)
    with running_daemon(
        tmp_path,
        RAMAKV_EMBEDDED__WORKERS="2",
        RAMAKV_LMCACHE_URL=f"http://127.0.0.1:{port}",
    ) as daemon:
        assert get(f"http://127.0.0.1:{port + 2}/meta")["role"] == "worker"
        daemon.turn_end("s", "a")
        assert daemon.send("turn_start", "s")["data"]["prefetch_sent"]
        assert daemon.stop() == 0


def doctor(daemon: Daemon) -> list[dict[str, str]]:
    done = subprocess.run(
        [sys.executable, "-m", "ramakv", "doctor", "--json"],
        env=daemon.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    findings: list[dict[str, str]] = json.loads(done.stdout)
    wrong = any(finding["level"] in ("problem", "fatal") for finding in findings)
    assert done.returncode == int(wrong), done.stderr
    return findings


def test_the_doctor_says_what_is_wrong_and_what_to_do(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, RAMAKV_BACKEND__KIND="lmcache")
    (tmp_path / "sessions.db").write_text("no database " * 100)
    levels = {finding["what"][:20]: finding["level"] for finding in doctor(daemon)}
    assert list(levels.values()) == ["ok", "ok", "problem", "problem"]
    advice = " ".join(finding["advice"] for finding in doctor(daemon))
    assert "set lmcache_url to its scheduler's port" in advice


def test_the_doctor_of_a_healthy_daemon_is_content(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon:
        daemon.turn_end("s", "a")
        findings = doctor(daemon)
        assert [finding["level"] for finding in findings] == ["ok", "ok", "ok", "note"]
        assert "1 active sessions" in findings[1]["what"]
