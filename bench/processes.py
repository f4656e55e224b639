"""Processes of the benchmark: pinned, waited for, and measured through /proc."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

SERVER_CORE, LOAD_CORE = 0, 1
READY_SECONDS_MAX = 120.0
STOP_SECONDS_MAX = 30.0
_NOT_INHERITED = ("RAMAKV_", "RAM_A_KV", "PYTHONDONTWRITEBYTECODE")
"""The last has a start compile everything anew, which an installed daemon never does."""


def on_core(core: int, command: Sequence[str]) -> list[str]:
    """Return the command, kept to one core where there are two for the two sides."""
    if len(os.sched_getaffinity(0)) < 2 or shutil.which("taskset") is None:
        return list(command)
    return ["taskset", "-c", str(core), *command]


def python(*arguments: str) -> list[str]:
    """Return the command that runs a module of this project."""
    return [sys.executable, "-m", *arguments]


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def running(
    command: Sequence[str], core: int, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the block ends."""
    # Nothing of the caller's own configuration may leak into what is measured.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_INHERITED)}
    with log.open("ab") as output:
        process = subprocess.Popen(
            on_core(core, command),
            env=inherited | dict(environment or {}),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def post(url: str, body: bytes, timeout: float = 30.0) -> tuple[int, bytes]:
    """Send one event; returns status and body. Raises OSError or HTTPException."""
    host, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(host, timeout=timeout)
    try:
        connection.request("POST", "/" + path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> float:
    """Wait for the first good answer to health; returns how many seconds that took."""
    began = time.monotonic()
    body = b'{"type":"health"}'
    while (waited := time.monotonic() - began) < READY_SECONDS_MAX and process.poll() is None:
        try:
            if post(url, body)[0] == 200:
                return time.monotonic() - began
        except (OSError, http.client.HTTPException):
            time.sleep(0.005)
    raise TimeoutError(f"{url} gave no answer in {waited:.0f} s: {log.read_text()[-1000:]}")


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, its threads that ended included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_bytes(pid: int) -> int:
    """Return the memory that a process has in RAM."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
