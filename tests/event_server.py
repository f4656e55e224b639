"""A server for POST /event that does what a test tells it, in threads of its own."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Event = dict[str, Any]


@dataclass
class Answer:
    """What a request is answered with; a `status` of 0 hangs up without an answer."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    after: threading.Event | None = None
    """The answer waits until this is set."""


def ok(**data: Any) -> Answer:
    return Answer(body={"ok": True, "type": "x", "data": data})


def refusal(status: int, error: str = "no", **headers: str) -> Answer:
    return Answer(status, {"ok": False, "type": "x", "error": error}, headers)


HANG_UP = Answer(status=0)


@dataclass
class EventServer:
    """Events in the order in which they came, and what each is answered with."""

    answer: Callable[[Event], Answer] = lambda event: ok()
    events: list[Event] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    in_hand_most: int = 0
    url: str = ""
    _in_hand: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, event: Event, token: str | None) -> Answer:
        with self._lock:
            self.events.append(event)
            self.tokens.add(token)
            self._in_hand += 1
            self.in_hand_most = max(self.in_hand_most, self._in_hand)
            answer = self.answer(event)
        time.sleep(answer.seconds)
        if answer.after is not None:
            answer.after.wait(30)
        with self._lock:
            self._in_hand -= 1
        return answer

    def of(self, session_id: str) -> list[Event]:
        return [event for event in self.events if event.get("session_id") == session_id]

    def types(self) -> list[str]:
        return [event["type"] for event in self.events]

    def maps(self) -> list[list[str]]:
        """The lists that turn_ends brought."""
        ends = [event for event in self.events if event["type"] == "turn_end"]
        return [event["kv_transfer_params"]["chunk_hashes"] for event in ends]


@contextmanager
def event_server(answer: Callable[[Event], Answer] | None = None) -> Iterator[EventServer]:
    served = EventServer(answer or (lambda event: ok()))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            event = json.loads(self.rfile.read(int(self.headers["content-length"])))
            answer = served.take(event, self.headers["authorization"])
            if not answer.status:
                self.close_connection = True
                return
            body = answer.body if isinstance(answer.body, bytes) else _encode(answer.body)
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 256

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # a client that went away

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield served
    finally:
        server.shutdown()
        thread.join(5)
        server.server_close()


def _encode(body: Any) -> bytes:
    return json.dumps(body).encode()
