"""A whole daemon in a thread of its own, for tests that send thousands of requests to one."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import structlog
import trio

from ramakv.codec import ECHO_CHARS_MAX
from ramakv.config import Config
from ramakv.service import Service, open_service
from ramakv.web.event_app import create_event_app
from ramakv.web.server import open_sockets, serve_http
from tests.fakes import FakeLMCache, make_config

T = TypeVar("T")

STATUSES = {200, 400, 401, 404, 405, 408, 409, 413, 503}
"""All that a client may be answered, whatever it sends as the body of an event."""

WITNESS = "witness"
SEEN = ["k1", "k2", "k1", "k3"]
"""A session that was there before all that is hostile, and its map."""


def event(type_: str, session_id: str | None = None, **fields: Any) -> dict[str, Any]:
    named = {} if session_id is None else {"session_id": session_id}
    return {"type": type_, **named, **fields}


def turn_end(session_id: str, *hashes: str, **fields: Any) -> dict[str, Any]:
    params = {"chunk_hashes": list(hashes)}
    return event("turn_end", session_id, kv_transfer_params=params, **fields)


def request(body: bytes, headers: bytes = b"") -> bytes:
    """A POST /event as it should be."""
    head = b"POST /event HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n"
    return head % (headers, len(body)) + body


def encoded(body: Any) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


@dataclass(frozen=True)
class Answer:
    """One response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def envelope(self) -> Any:
        return json.loads(self.body)


class Client:
    """One connection that sends what it is told to, and reads what comes."""

    def __init__(self, port: int, timeout: float = 20.0) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=timeout)
        self._reader = self.socket.makefile("rb")

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def answer(self) -> Answer | None:
        """Read one response; None where the connection has ended instead."""
        first = self._reader.readline()
        if not first:
            return None
        headers = {}
        while (line := self._reader.readline().rstrip(b"\r\n")) != b"":
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        body = self._reader.read(int(headers.get("content-length", "0")))
        return Answer(int(first.split()[1]), headers, body)

    def ask(self, body: Any, headers: bytes = b"") -> Answer:
        """Send one event as it should be sent, and return the response."""
        self.send(request(encoded(body), headers))
        answer = self.answer()
        assert answer is not None, "closed without an answer"
        return answer

    def close(self) -> None:
        self._reader.close()
        self.socket.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class House:
    """The daemon in its thread, and its witness: a session that must not notice anything."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.port = 0
        self.service: Service
        self._ready = threading.Event()
        self._stop: trio.Event
        self._token: trio.lowlevel.TrioToken
        self._thread = threading.Thread(target=trio.run, args=(self._run,), name="daemon")
        self._thread.start()
        assert self._ready.wait(30)

    async def _run(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._stop = trio.Event()
        sockets = open_sockets(self.config.listen_addr)
        self.port = sockets[0].getsockname()[1]
        async with open_service(self.config, client=FakeLMCache()) as self.service:
            app = create_event_app(self.service, self.config)
            await serve_http(
                app, sockets, limits=self.config.limits, stop=self._stop, task_status=self
            )

    def started(self, value: None = None) -> None:
        """Note that it serves; `serve_http` calls this."""
        self._ready.set()

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function where the daemon runs."""
        return trio.from_thread.run_sync(function, *args, trio_token=self._token)

    def stop(self) -> None:
        self.call(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive(), "the daemon did not end"

    def client(self) -> Client:
        return Client(self.port)

    def ask(self, body: Any) -> Answer:
        """Send one event on a connection of its own."""
        with self.client() as client:
            return client.ask(body)

    def wait(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        """Wait for what happens in the daemon's own time."""
        ends = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < ends, "it never happened"
            time.sleep(0.01)

    # The witness --------------------------------------------------------------------------

    def settle_in(self) -> None:
        """Make the witness."""
        assert self.ask(turn_end(WITNESS, *SEEN, seq=5)).status == 200

    def state(self) -> tuple[Any, ...]:
        """What clients and the inside say of everything that events can change."""
        with self.client() as client:
            seen = client.ask(event("session_map", WITNESS)).envelope["data"]["chunk_hashes"]
            active = client.ask(event("health")).envelope["data"]["sessions_count"]
        return seen, active, self.call(self.service.refcount.counts), self._known()

    def _known(self) -> int:
        return self.call(self.service.router.statistics)["known"]


@contextmanager
def living_in(folder: Path, **overrides: Any) -> Iterator[House]:
    """A daemon with a witness, which never has anything to complain about in its log."""
    with structlog.testing.capture_logs() as logs:
        house = House(make_config(folder, listen_addr="127.0.0.1:0", **overrides))
        try:
            house.settle_in()
            yield house
        finally:
            house.stop()
    assert [line for line in logs if line["log_level"] in ("warning", "error", "critical")] == []


@contextmanager
def unchanged(house: House) -> Iterator[None]:
    """Whatever happens in this block leaves the daemon's state what it was."""
    before = house.state()
    assert before[0] == SEEN
    yield
    assert house.state() == before


def check_envelopes(answer: Answer) -> list[dict[str, Any]]:
    """Look whether a response is one of the contract's, and return its envelopes."""
    assert answer.status in STATUSES, answer
    assert answer.headers["content-type"] == "application/json"
    assert answer.status != 503 or int(answer.headers["retry-after"]) > 0
    content = answer.envelope
    envelopes = content if isinstance(content, list) else [content]
    assert answer.status == 200 or len(envelopes) == 1
    for envelope in envelopes:
        assert envelope.keys() <= {"ok", "type", "data", "error"}
        assert (envelope["ok"], "data" in envelope, "error" in envelope) in (
            (True, True, False),
            (False, False, True),
        )
        if not envelope["ok"]:
            assert 0 < len(envelope["error"]) <= ECHO_CHARS_MAX
            assert 0 < len(envelope.get("type", "?")) <= ECHO_CHARS_MAX
    if not isinstance(content, list):
        assert content["ok"] is (answer.status == 200)
    return envelopes
