"""Clients that send as fast as they are answered, and one that takes its time and measures.

A process of its own for the former: `python -m tests.hostile.load PORT SECONDS KIND CONNECTIONS
SESSIONS` prints the count of each status. Only the standard library, and requests made in advance:
the cheaper the clients are, the more of the machine is left to the daemon.
"""

from __future__ import annotations

import json
import re
import selectors
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from statistics import median, quantiles
from typing import Any

HASHES = 20
LARGE_HASHES = 20_000
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


def turn_end(session_id: str, turn: int, hashes: int = HASHES) -> bytes:
    """A request with a map of which one chunk is new each turn."""
    chunks = [f"{session_id}-{number:x}" for number in range(hashes - 1)] + [f"{session_id}+{turn}"]
    event = {
        "type": "turn_end",
        "session_id": session_id,
        "kv_transfer_params": {"chunk_hashes": chunks},
    }
    body = json.dumps(event).encode()
    return b"POST /event HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def requests_of(kind: str, connection: int, sessions: int) -> Iterator[bytes]:
    """What one connection sends: `turns` of its session, `new` sessions, or `large` maps."""
    name = f"{kind}{connection % sessions}"
    if kind == "new":
        return (turn_end(f"{kind}-{connection}-{number}", 0) for number in count())
    size = LARGE_HASHES if kind == "large" else HASHES
    two = [turn_end(name, turn, size) for turn in range(2)]
    return (two[number % 2] for number in count())


@dataclass
class _Line:
    """One connection of a hasty client."""

    number: int
    requests: Iterator[bytes]
    socket: socket.socket | None = None
    received: bytearray = field(default_factory=bytearray)


def hammer(port: int, seconds: float, kind: str, connections: int, sessions: int) -> Counter[str]:
    """Keep one request under way on each connection; returns how often each status came."""
    counts: Counter[str] = Counter()
    ends = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for number in range(connections):
            _ask(selector, port, _Line(number, requests_of(kind, number, sessions)), counts)
        while (left := ends - time.monotonic()) > 0:
            for key, _ in selector.select(min(left, 0.1)):
                _take(selector, port, key.data, counts)
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
    return counts


def _ask(selector: Any, port: int, line: _Line, counts: Counter[str]) -> None:
    try:
        if line.socket is None:
            line.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
            selector.register(line.socket, selectors.EVENT_READ, line)
        line.socket.sendall(next(line.requests))
    except OSError:
        _hang_up(selector, line)
        counts["cut"] += 1


def _hang_up(selector: Any, line: _Line) -> None:
    if line.socket is not None:
        selector.unregister(line.socket)
        line.socket.close()
    line.socket = None
    line.received.clear()


def _take(selector: Any, port: int, line: _Line, counts: Counter[str]) -> None:
    assert line.socket is not None
    try:
        data = line.socket.recv(65536)
    except OSError:
        data = b""
    line.received += data
    head, found, body = line.received.partition(b"\r\n\r\n")
    if found and len(body) >= int(_LENGTH.search(head)[1]):  # type: ignore[index]
        counts[head[9:12].decode()] += 1
        line.received.clear()
        if b"connection: close" in head.lower():
            _hang_up(selector, line)
    elif not data:
        counts["cut"] += 1
        _hang_up(selector, line)
    else:
        return
    _ask(selector, port, line, counts)


@contextmanager
def hammering(
    port: int, seconds: float, kind: str, connections: int, sessions: int
) -> Iterator[subprocess.Popen[bytes]]:
    """Such clients in a process of their own; it ends by itself, and `figures` reads it."""
    arguments = [str(each) for each in (port, seconds, kind, connections, sessions)]
    command = [sys.executable, "-m", "tests.hostile.load", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def figures(process: subprocess.Popen[bytes], seconds: float) -> Counter[str]:
    output, _ = process.communicate(timeout=seconds + 30)
    return Counter(json.loads(output))


@dataclass
class Polite:
    """A client that sends a turn now and then, and notes how long each answer took."""

    port: int
    session_id: str = "polite"
    pause_seconds: float = 0.02
    milliseconds: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)

    def connected(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def work(self, seconds: float) -> Polite:
        with self.connected() as sock:
            return self.work_on(sock, seconds)

    def work_on(self, sock: socket.socket, seconds: float) -> Polite:
        ends = time.monotonic() + seconds
        turns = count()
        while time.monotonic() < ends:
            began = time.perf_counter()
            sock.sendall(turn_end(self.session_id, next(turns)))
            answer = sock.recv(65536)  # it is short, and leaves in one write
            self.milliseconds.append((time.perf_counter() - began) * 1000)
            self.statuses[int(answer[9:12])] += 1
            time.sleep(self.pause_seconds)
        return self

    @property
    def p50(self) -> float:
        return median(self.milliseconds)

    @property
    def p99(self) -> float:
        return quantiles(self.milliseconds, n=100, method="inclusive")[-1]


def memory_mib(pid: int) -> tuple[float, float]:
    """Resident memory of a process now, and the most that it ever was."""
    with open(f"/proc/{pid}/status") as status:
        found = dict(line.split(":", 1) for line in status)
    now, most = (int(found[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))
    return now, most


if __name__ == "__main__":
    port, seconds, kind, connections, sessions = sys.argv[1:]
    sys.stdout.write(
        json.dumps(hammer(int(port), float(seconds), kind, int(connections), int(sessions)))
    )
