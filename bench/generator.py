"""Sends planned events over raw sockets, in a process of its own, and notes how long each took.

    python -m bench.generator < plan (pickled) > result (JSON)

asyncio with `select`, whose timers are exact to the microsecond where epoll's are to the
millisecond. Requests are bytes before the clock starts.
"""

from __future__ import annotations

import asyncio
import gc
import json
import pickle
import re
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.measure import at, curve
from bench.processes import LOAD_CORE, on_core, python
from bench.schedule import Item, lane_of
from bench.wrk import LoadError

SPARE_SECONDS = 60.0
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_EVICTED = re.compile(rb'"evicted_count": ?(\d+)')


@dataclass(frozen=True, slots=True)
class Plan:
    """What to send and where. Unless `open_loop`, latency counts from the sending."""

    url: str
    items: Sequence[Item]
    connections: int
    open_loop: bool

    def request(self, item: Item) -> bytes:
        host, _, path = self.url.removeprefix("http://").partition("/")
        head = (
            f"POST /{path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(item.body)}\r\n\r\n"
        )
        return head.encode() + item.body

    @property
    def ends(self) -> float:
        return self.items[-1].due if self.items else 0.0


@dataclass(slots=True)
class Played:
    """What became of it. Latencies are in milliseconds, by kind of event."""

    latencies: dict[str, list[float]] = field(default_factory=dict)
    refused: int = 0
    first_refusal: str = ""
    evicted: int = 0
    seconds: float = 0.0


class _Connection(asyncio.Protocol):
    def __init__(self, player: _Player) -> None:
        self._player = player
        self._received = b""
        self._transport: asyncio.Transport | None = None
        self.queue: deque[int] = deque()
        self.current: int | None = None
        self.sent_at = 0.0
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(high=1 << 30)
        self._transport, self.is_open = transport, True

    def send(self, request: bytes) -> None:
        assert self._transport is not None
        self.sent_at = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        length = _LENGTH.search(head)
        if length is None or len(body) < int(length[1]):
            return
        self._received = b""
        self._player.answered(self, head.split(b" ", 2)[1] == b"200", body)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._player.lost(self, error)


class _Player:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._requests = [plan.request(item) for item in plan.items]
        self._left = len(plan.items)
        self._shared: deque[int] = deque()
        self._over = asyncio.get_running_loop().create_future()
        self._began = 0.0
        self._connections: list[_Connection] = []
        self._idle: list[_Connection] = []
        self._reopening: set[asyncio.Task[None]] = set()
        self.played = Played()

    async def play(self) -> Played:
        loop = asyncio.get_running_loop()
        host, _, port = self._plan.url.removeprefix("http://").split("/")[0].partition(":")
        for _ in range(self._plan.connections):
            _, connection = await loop.create_connection(lambda: _Connection(self), host, int(port))
            self._connections.append(connection)
        self._idle = list(self._connections)
        gc.freeze()
        self._began = time.perf_counter()
        for number, item in enumerate(self._plan.items):
            wait = self._began + item.due - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            elif number % 64 == 0:
                await asyncio.sleep(0)
            if self._over.done():
                break
            self._offer(number, item)
        await asyncio.wait_for(self._over, SPARE_SECONDS)
        self.played.seconds = time.perf_counter() - self._began
        self._left = -1  # what closes from now on is no fault
        return self.played

    async def _open(self, connection: _Connection) -> None:
        host, _, port = self._plan.url.removeprefix("http://").split("/")[0].partition(":")
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: connection, host, int(port))

    def _offer(self, number: int, item: Item) -> None:
        if item.lane is not None:
            connection = self._connections[lane_of(item.lane, len(self._connections))]
            connection.queue.append(number)
            if connection.current is None:
                self._next(connection)
            return
        self._shared.append(number)
        if self._idle:
            self._next(self._idle.pop())

    def _next(self, connection: _Connection) -> None:
        queue = connection.queue or self._shared
        if queue:
            number = queue.popleft()
            connection.current = number
            if connection.is_open:
                connection.send(self._requests[number])
            else:
                task = asyncio.create_task(self._reopen(connection, number))
                self._reopening.add(task)
                task.add_done_callback(self._reopening.discard)
        else:
            connection.current = None
            self._idle.append(connection)

    async def _reopen(self, connection: _Connection, number: int) -> None:
        """Connect anew where the server closed what was idle for long, as any client does."""
        try:
            await self._open(connection)
        except OSError as error:
            self.lost(connection, error)
        else:
            connection.send(self._requests[number])

    def answered(self, connection: _Connection, is_200: bool, body: bytes) -> None:
        now = time.perf_counter()
        assert connection.current is not None
        item = self._plan.items[connection.current]
        began = self._began + item.due if self._plan.open_loop else connection.sent_at
        self.played.latencies.setdefault(item.kind, []).append((now - began) * 1000)
        if not is_200 or b'"ok":true' not in body:
            self.played.refused += 1
            self.played.first_refusal = self.played.first_refusal or repr(body[:200])
        elif evicted := _EVICTED.search(body):
            self.played.evicted += int(evicted[1])
        self._left -= 1
        if self._left == 0:
            self._over.set_result(None)
        else:
            self._next(connection)

    def lost(self, connection: _Connection, error: Exception | None) -> None:
        if connection.current is not None and self._left > 0 and not self._over.done():
            self._over.set_exception(ConnectionError(f"the server hung up: {error}"))


def play(plan: Plan) -> dict[str, Any]:
    """Play a plan in a process of its own, and return its figures. Raises LoadError."""
    process = start(plan)
    return finish(process, plan)


def start(plan: Plan) -> subprocess.Popen[bytes]:
    """Start playing; `finish` ends it."""
    process = subprocess.Popen(
        on_core(LOAD_CORE, python("bench.generator")),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    pickle.dump(plan, process.stdin)
    process.stdin.close()
    process.stdin = None
    return process


def finish(process: subprocess.Popen[bytes], plan: Plan) -> dict[str, Any]:
    """Wait for the end of a plan and return its figures. Raises LoadError."""
    try:
        output, _ = process.communicate(timeout=plan.ends + 2 * SPARE_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise LoadError(f"{plan.url}: not all answers came in time") from error
    finally:
        process.kill()
    if process.returncode:
        raise LoadError(f"{plan.url}: the load could not be sent; see the error above")
    found: dict[str, Any] = json.loads(output)
    if found["refused"]:
        raise LoadError(f"{found['refused']} answers not ok; the first: {found['first_refusal']}")
    return found


def figures(played: Played) -> dict[str, Any]:
    """Return what is kept of it: over all events, and by kind."""
    every = curve([each for kind in played.latencies.values() for each in kind])
    events = sum(map(len, played.latencies.values()))
    return {
        "events": events,
        "per_second": events / played.seconds,
        "p50_ms": at(every, 50.0),
        "p99_ms": at(every, 99.0),
        "p999_ms": at(every, 99.9),
        "curve": every,
        "p99_ms_of": {kind: at(curve(values), 99.0) for kind, values in played.latencies.items()},
        "evicted": played.evicted,
        "refused": played.refused,
        "first_refusal": played.first_refusal,
    }


async def _play(plan: Plan) -> Played:
    return await _Player(plan).play()


def main() -> None:
    plan: Plan = pickle.load(sys.stdin.buffer)
    # `select` takes no file above 1023; 256 connections are far from it.
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    try:
        played = loop.run_until_complete(_play(plan))
    finally:
        loop.close()
    json.dump(figures(played), sys.stdout)


if __name__ == "__main__":
    main()
