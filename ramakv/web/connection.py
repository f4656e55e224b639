"""One connection: Hypercorn's HTTP/1.1 protocol classes, over sockets handled here.

The one file that reaches into Hypercorn (0.18, pinned in pyproject.toml). It keeps `HTTPStream`,
which speaks ASGI, and `H11Protocol`, which speaks HTTP through h11, and replaces what stands below
them, because in 0.18

* an error on one connection ends the server (pgjones/hypercorn #225, #203);
* a send has no deadline: a client that never reads holds up shutdown for ever;
* the idle timer is a new task for each request, and behind Quart-Trio, which cancels itself inside
  its last send, it does not start at all;
* HTTP/2 and websockets cannot be switched off;
* a request costs a task, a channel, and one locked write for each piece of its response.

Here one task does everything for a connection: it reads until it has the head of a request, then
runs the app itself, and reads on when the app asks for more, so that no client sends faster than
the app reads. Apps notice two things: a disconnect shows only where `receive` is awaited, and the
requests of a connection share one context (reset the context variables that you set).

When upstream contains errors and bounds its sends, delete `Connection` and `AppCall`; when it can
do without HTTP/2 and websockets, delete `Protocol`; then serve with `hypercorn.trio.serve`.
tests/test_hostile_connections.py tells.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, Final, cast

import h11
import trio
from hypercorn.events import Closed, RawData
from hypercorn.protocol import events
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr

from ramakv.web.app_call import AppCall, ClientGoneError, json_error

if TYPE_CHECKING:
    from hypercorn.config import Config
    from hypercorn.events import Event
    from hypercorn.trio.worker_context import WorkerContext
    from hypercorn.typing import (
        AppWrapper,
        ASGIFramework,
        ASGIReceiveEvent,
        ASGISendEvent,
        LifespanState,
        Scope,
    )

    from ramakv.config import Limits
    from ramakv.web.turnstile import Turnstile

    AppSend = Callable[[ASGISendEvent | None], Awaitable[None]]
    AppFailed = Callable[[ExceptionGroup[Exception], Scope], None]

LINGER_SECONDS: Final = 1.0
"""How long a client may go on sending after it was refused, so that it gets to read why."""

EVENTS_PER_TURN: Final = 64
"""How many h11 events are handled before other tasks get a turn; one byte can be an event."""

LENGTH_HEADERS: Final = (b"content-length", b"transfer-encoding")


async def linger(stream: trio.SocketStream) -> None:
    """Let a client read the last answer: closing with its bytes unread would reset that away."""
    gone = (trio.BrokenResourceError, trio.ClosedResourceError)
    with trio.move_on_after(LINGER_SECONDS), suppress(*gone):
        await stream.send_eof()
        while await stream.receive_some(MAX_RECV):
            pass


class Protocol(H11Protocol):
    """HTTP/1.0 and 1.1 and nothing else; what h11 refuses is answered in JSON."""

    connection: h11.Connection
    paused = False  # the next request has begun to arrive, and waits for the answer to this one
    refused = False
    _is_head = False

    @property
    def may_answer(self) -> bool:
        """Whether no answer has begun."""
        return self.connection.our_state in (h11.IDLE, h11.SEND_RESPONSE)

    @property
    def unread(self) -> bool:
        """Whether the client may be sending what nobody will read."""
        return self.refused or self.paused or self.connection.their_state is h11.SEND_BODY

    async def feed(self, data: bytes) -> None:
        """Take bytes from the client; no bytes are the end of them."""
        self.connection.receive_data(data)
        await self.handle_events()

    async def handle_events(self) -> None:
        """Handle what h11 has, up to where it needs more bytes, or an answer, to go on.

        Nothing cancels this halfway: events would be lost.
        """
        self.paused = False
        for handled in count(1):
            try:
                event = self.connection.next_event()
            except h11.RemoteProtocolError as error:
                # Up to the colon it is h11 that speaks; then it quotes the client.
                await self._refuse(error.error_status_hint, str(error).partition(":")[0])
                break
            if event is h11.NEED_DATA:
                break
            if event is h11.PAUSED:
                self.paused = True
                break
            if type(event) is h11.Request:
                await self._begin(event)
            elif type(event) is h11.ConnectionClosed or self.stream is None:
                await self.send(Closed())
                break
            elif type(event) is h11.Data:
                await self.stream.handle(events.Body(STREAM_ID, event.data))
            elif type(event) is h11.EndOfMessage:
                await self.stream.handle(events.EndBody(STREAM_ID))
                if (
                    self.connection.their_state is h11.MUST_CLOSE
                    and self.connection.trailing_data[0]
                ):
                    self.paused = True  # for good: nothing may follow a last request
                    break
            if handled % EVENTS_PER_TURN == 0:
                await trio.lowlevel.cancel_shielded_checkpoint()

    async def _begin(self, request: h11.Request) -> None:
        self._is_head = request.method == b"HEAD"
        if request.http_version not in (b"1.1", b"1.0"):
            await self._refuse(505, "only HTTP/1.0 and HTTP/1.1 are spoken here")
            return
        target = request.target
        if target[:1] != b"/" and target != b"*":
            scheme, _, rest = target.partition(b"://")
            if scheme.lower() not in (b"http", b"https"):
                await self._refuse(400, "the request target is not a path")
                return
            target = b"/" + rest.partition(b"/")[2]  # the form that proxies use
        headers = [(name.lower(), value) for name, value in request.headers.raw_items()]
        # h11 looks only at a head that is incomplete: how packets fall would decide.
        size = len(target) + sum(len(name) + len(value) + 4 for name, value in headers)
        if size > self.config.h11_max_incomplete_size:
            await self._refuse(431, "the request's head is too long")
            return
        if sum(name in LENGTH_HEADERS for name, _ in headers) > 1:
            await self._refuse(400, "both a Content-Length and a Transfer-Encoding")
            return
        # Upgrade headers are no matter: h11 takes any answer but 101 as a no.
        self.stream = HTTPStream(
            self.app,
            self.config,
            self.context,
            self.task_group,
            self.ssl,
            self.client,
            self.server,
            self.stream_send,
            STREAM_ID,
        )
        await self.stream.handle(
            events.Request(
                stream_id=STREAM_ID,
                headers=headers,
                http_version=request.http_version.decode(),
                method=request.method.decode(),  # not in capitals: h11 knows only HEAD as HEAD
                raw_path=target,
                state=self.connection_state,
            )
        )

    async def ask_for_body(self) -> None:
        """Send 100 Continue to a client that waits for it."""
        if self.connection.they_are_waiting_for_100_continue:
            await self._send_h11_event(h11.InformationalResponse(status_code=100, headers=[]))

    async def _refuse(self, status: int, reason: str) -> None:
        self.refused = True
        if self.may_answer:
            headers, body = json_error(reason)
            headers += [(b"connection", b"close"), *self.config.response_headers("h11")]
            has_body = not self._is_head or self.connection.our_state is h11.IDLE  # no request yet
            await self._send_h11_event(h11.Response(status_code=status, headers=headers))
            if has_body:
                await self._send_h11_event(h11.Data(data=body))
            await self._send_h11_event(h11.EndOfMessage())
        await self.send(Closed())


class Connection(TCPServer):
    """One client: its socket, its deadlines, and the task that serves it."""

    secure = False
    stream: trio.SocketStream  # type: ignore[assignment]
    protocol: Protocol  # type: ignore[assignment]

    def __init__(
        self,
        app: ASGIFramework,
        config: Config,
        context: WorkerContext,
        state: LifespanState,
        limits: Limits,
        turnstile: Turnstile,
        app_failed: AppFailed,
        stream: trio.SocketStream,
    ) -> None:
        super().__init__(cast("AppWrapper", app), config, context, state, cast("Any", stream))
        self._limits = limits
        self._turnstile = turnstile
        self._app_failed = app_failed
        self._call: AppCall | None = None
        self._idle = trio.CancelScope()
        self._sending: trio.CancelScope | None = None
        self._unsent: list[bytes] = []
        self._finished = False  # no further request
        self.was_refused = False  # the last answer was a 503
        self.broken = False  # no further bytes to the client

    async def run(self) -> None:
        """Serve requests until the client, or this side, has had enough."""
        sock = self.stream.socket
        try:
            peer, here = sock.getpeername(), sock.getsockname()
        except OSError:  # reset before its turn came
            return
        self.protocol = Protocol(
            self.app,
            self.config,
            self.context,
            cast("Any", self),  # of a task group, only spawn_app is used
            ConnectionState(self.state),
            self.secure,
            parse_socket_addr(sock.family, peer),
            parse_socket_addr(sock.family, here),
            self.protocol_send,
        )
        try:
            while not self._finished:
                await self._next_request()
                if self._call is not None:
                    call, self._call = self._call, None
                    await self._run_app(call)
            if not self.broken:
                await self._part()
        finally:
            sock.close()

    async def _part(self) -> None:
        if self.protocol.unread:
            await linger(self.stream)

    async def _next_request(self) -> None:
        if self.protocol.paused:  # h11 has it already
            await trio.lowlevel.checkpoint()
            if self.was_refused:
                await self._turnstile.enter()
            await self.protocol.handle_events()
            return
        # One deadline for the whole head: a byte now and then does not move it.
        deadline = trio.current_time() + self._limits.keep_alive_seconds
        with trio.CancelScope(deadline=deadline) as self._idle:
            while self._call is None and not self._finished:
                data = await self._receive()
                if self.was_refused:
                    await self._turnstile.enter()
                await self.protocol.feed(data)
        if self._idle.cancelled_caught:
            self._finished = True

    async def _run_app(self, call: AppCall) -> None:
        try:
            await cast("ASGIFramework", self.app)(call.scope, call.receive, call.send)
        except* ClientGoneError:
            pass
        except* Exception as group:
            self._app_failed(group, call.scope)
        await call.finish()

    async def spawn_app(
        self, app: AppWrapper, config: Config, scope: Scope, send: AppSend
    ) -> Callable[[ASGIReceiveEvent], Awaitable[None]]:
        """Note the request that `run` then takes to the app; HTTPStream calls this."""
        self._call = AppCall(self, scope, send)
        return self._call.put

    async def read_for(self, call: AppCall) -> None:
        """Read more of a request for the app."""
        await self.protocol.ask_for_body()
        await self.flush()
        with trio.CancelScope() as call.waiting:
            if self.protocol.paused:
                await trio.sleep_forever()  # that is, until the answer is complete
            await self.protocol.feed(await self._receive())

    async def _receive(self) -> bytes:
        # Not trio's, which tries before it waits: a client is never so quick.
        while True:
            try:
                await trio.lowlevel.wait_readable(self.stream.socket)
                return os.read(self.stream.socket.fileno(), MAX_RECV)
            except BlockingIOError:
                continue
            except (OSError, trio.ClosedResourceError):
                self.broken = True
                return b""

    async def protocol_send(self, event: Event) -> None:
        """Take bytes for the client, or the word that this connection ends."""
        if type(event) is RawData:
            self._unsent.append(event.data)
        elif type(event) is Closed:
            self._finished = True
            await self.flush()
            await self.protocol.handle(event)

    async def flush(self) -> None:
        """Write what waits, in one piece. A client that does not take it in time is given up."""
        data = b"".join(self._unsent)
        if not data or self._sending is not None:  # the write that is going on takes it all
            return
        self._unsent.clear()
        if self.broken:
            return
        try:
            sent = os.write(self.stream.socket.fileno(), data)
        except BlockingIOError:
            sent = 0
        except OSError:
            await self._give_up()
            return
        if sent < len(data):
            await self._send_in_time(data[sent:])

    async def _send_in_time(self, data: bytes) -> None:
        # Shielded, because Quart-Trio cancels itself inside its last send.
        deadline = trio.current_time() + self._limits.send_timeout_seconds
        with (
            trio.CancelScope(shield=True, deadline=deadline) as self._sending,
            suppress(trio.BrokenResourceError, trio.ClosedResourceError),
        ):
            while data:
                await self._send_all(data)
                data = b"".join(self._unsent)  # what came meanwhile
                self._unsent.clear()
        self._sending = None
        if data:
            await self._give_up()

    async def _send_all(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def _give_up(self) -> None:
        # A reset when it closes: else the kernel keeps for minutes what the client does not read.
        with suppress(OSError):
            self.stream.socket.setsockopt(
                trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
        self.broken = self._finished = True
        await self.protocol.handle(Closed())

    def drain(self) -> None:
        """End when the answer in hand is complete; at once when there is none."""
        self.protocol.keep_alive_requests = self.config.keep_alive_max_requests  # says "close"
        self._idle.cancel()

    def abort(self) -> None:
        """Let no send go on, shielded or not; the task itself is cancelled by its nursery."""
        self.broken = True
        if self._sending is not None:
            self._sending.cancel()
