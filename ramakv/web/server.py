"""The HTTP server: its sockets, who is let in, and a shutdown that always ends."""

from __future__ import annotations

import errno
import math
import os
import socket
import stat
from collections import deque
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.utils import wrap_app

from ramakv.errors import ConfigError, first_error
from ramakv.web.app_call import json_error
from ramakv.web.connection import Connection, linger
from ramakv.web.hypercorn_config import ServerConfig
from ramakv.web.tls_connection import TlsConnection
from ramakv.web.turnstile import Turnstile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from hypercorn.typing import ASGIFramework, LifespanState, Scope

    from ramakv.config import Limits
    from ramakv.web.tls import ServerTls

BACKLOG: Final = 4096  # clients that the kernel holds until they are let in
ACCEPT_BURST: Final = 64  # clients let in at once
ACCEPT_PAUSE_SECONDS: Final = 0.1  # when there is no file descriptor for one
TURNED_AWAY_MAX: Final = 64  # clients over the limit that get time to read why
LINES_PER_MINUTE: Final = 30  # lines about clients in the log
UNIX_SOCKET_UMASK: Final = 0o117  # user and group may connect to a unix socket

_OUT_OF_RESOURCES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
_PROBLEMS: Final = {
    errno.EADDRINUSE: "another process listens there; stop it, or choose another address",
    errno.EADDRNOTAVAIL: "this machine has no such address; 0.0.0.0 stands for all it has",
    errno.EACCES: "this user lacks the permission; a port above 1023 needs none, a unix socket "
    "needs a folder that can be written",
    errno.ENOENT: "the folder does not exist; create it",
}
_log = structlog.get_logger("ramakv.web")


def _refusal() -> bytes:
    headers, body = json_error("too many connections")
    headers += [(b"retry-after", b"1"), (b"connection", b"close")]
    lines = [b"HTTP/1.1 503 ", *(b"%b: %b" % header for header in headers), b"", body]
    return b"\r\n".join(lines)


_REFUSAL: Final = _refusal()


def open_sockets(address: str, *, key: str = "listen_addr") -> list[socket.socket]:
    """Listen on `host:port`, `[ipv6]:port` or `unix:/path`.

    A name is listened on at every address it has. Port 0 takes a free one, the same for all. An
    address that cannot be listened on is a ConfigError that names `key`. `serve_http` closes the
    sockets; who opened them for anything else uses `close_sockets`.
    """
    sockets: list[socket.socket] = []
    try:
        if address.startswith("unix:/"):
            sockets.append(_bind_unix(address.removeprefix("unix:")))
        else:
            sockets.extend(_bind_tcp(*_host_and_port(address)))  # those before a failure too
        for sock in sockets:
            sock.listen(BACKLOG)
            sock.setblocking(False)
    except (OSError, ValueError) as error:
        close_sockets(sockets)
        number = error.errno if isinstance(error, OSError) else None
        problem = _PROBLEMS.get(number or 0, error)
        raise ConfigError(f"{key}: cannot listen on {address!r}: {problem}") from error
    return sockets


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if host in ("", "unix") or (":" in host) != bracketed or "/" in host:
        raise ValueError("expected host:port, [ipv6]:port or unix:/path")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError("expected a port from 0 to 65535")
    return host.strip("[]"), int(port)


def _bind_tcp(host: str, port: int) -> Iterator[socket.socket]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        raise ValueError(f"the host {host!r} is unknown; check its spelling") from None
    addresses = dict.fromkeys((family, where) for family, _, _, _, where in found)
    bound = 0
    for tried, (family, where) in enumerate(addresses, 1):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if family == socket.AF_INET6 and len(addresses) > 1:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind((where[0], port, *where[2:]))
        except OSError as error:
            sock.close()
            # localhost has an IPv6 address also on a machine that has none.
            if error.errno == errno.EADDRNOTAVAIL and (bound or tried < len(addresses)):
                continue
            raise
        bound, port = bound + 1, sock.getsockname()[1]
        yield sock


def _bind_unix(path: str) -> socket.socket:
    if (problem := _clear(path)) is not None:
        raise ValueError(problem)
    sock = socket.socket(socket.AF_UNIX)
    umask = os.umask(UNIX_SOCKET_UMASK)
    try:
        sock.bind(path)
    except OSError:
        sock.close()
        raise
    finally:
        os.umask(umask)
    return sock


def _clear(path: str) -> str | None:
    """Remove the file of a socket that nobody listens on. Return why the path is not free."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return "the file there is no socket; remove it, or choose another path"
    except FileNotFoundError:
        return None
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return None
        except OSError as error:
            return f"the socket there cannot be tried ({error.strerror}); remove it"
    return _PROBLEMS[errno.EADDRINUSE]


@contextmanager
def _closing(sockets: Sequence[socket.socket]) -> Iterator[None]:
    # The paths are asked for first: a socket that trio closed has none.
    paths = [s.getsockname() for s in sockets if s.family == socket.AF_UNIX and s.fileno() >= 0]
    try:
        yield
    finally:
        for sock in sockets:
            sock.close()
        for path in paths:
            with suppress(OSError):
                _clear(path)  # leaves it to a successor that listens there already


def close_sockets(sockets: Sequence[socket.socket]) -> None:
    """Close sockets that no server was given, and remove the files of unix sockets."""
    with _closing(sockets):
        pass


def socket_urls(sockets: Iterable[socket.socket], *, https: bool = False) -> list[str]:
    """Return what the sockets listen on, as people write it."""
    urls, scheme = [], "https" if https else "http"
    for sock in sockets:
        name = sock.getsockname()
        if sock.family == socket.AF_UNIX:
            urls.append(f"unix:{name}")
        elif sock.family == socket.AF_INET6:
            urls.append(f"{scheme}://[{name[0]}]:{name[1]}")
        else:
            urls.append(f"{scheme}://{name[0]}:{name[1]}")
    return urls


async def serve_http(
    app: ASGIFramework,
    sockets: Sequence[socket.socket],
    *,
    limits: Limits,
    stop: trio.Event,
    tls: ServerTls | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve an ASGI app, its lifespan too, until `stop` is set; over TLS where that is given.

    Then nobody is let in any more, idle connections are closed, and those with a request in hand
    get to finish it, but not longer than `drain_timeout_seconds`. On every way out the sockets are
    closed, the files of unix sockets are gone, and no task is left.
    """
    config = ServerConfig()
    state: LifespanState = {}
    lifespan = Lifespan(wrap_app(app, 0, "asgi"), config, state)
    with _closing(sockets):
        async with trio.open_nursery() as nursery:
            await nursery.start(lifespan.handle_lifespan)
            with suppress(trio.ClosedResourceError):  # an app may have no lifespan
                await lifespan.wait_for_startup()
            server = _Server(app, limits, config, state, tls)
            drain_ends = await server.run(sockets, stop, task_status)
            with suppress(trio.ClosedResourceError), trio.move_on_at(drain_ends):
                await lifespan.wait_for_shutdown()
            nursery.cancel_scope.cancel()


class _Server:
    """Lets clients in, and out again."""

    def __init__(
        self,
        app: ASGIFramework,
        limits: Limits,
        config: ServerConfig,
        state: LifespanState,
        tls: ServerTls | None,
    ) -> None:
        self._limits = limits
        self._tls = tls
        self._context = WorkerContext(None)
        self._connections: set[Connection] = set()
        self._turned_away = 0
        self._complaints = _Complaints()
        self._turnstile = Turnstile()
        shared = (app, config, self._context, state, limits, self._turnstile, self._app_failed)
        connection: Any = Connection if tls is None else partial(TlsConnection, tls)
        self._open_connection: Callable[[trio.SocketStream], Connection] = partial(
            connection, *shared
        )

    async def run(
        self,
        sockets: Sequence[socket.socket],
        stop: trio.Event,
        task_status: trio.TaskStatus[None],
    ) -> float:
        """Serve until `stop` is set and the last client is gone. Return when that was due."""
        listeners = [_Listener(sock, self._complaints, self._is_full) for sock in sockets]
        async with trio.open_nursery() as guard:
            async with trio.open_nursery() as clients:
                guard.start_soon(self._cut_off, stop, clients.cancel_scope)
                guard.start_soon(self._turnstile.run)
                async with trio.open_nursery() as accepting:
                    serve = partial(
                        trio.serve_listeners, self._serve, listeners, handler_nursery=clients
                    )
                    await accepting.start(serve)
                    task_status.started()
                    await stop.wait()
                    accepting.cancel_scope.cancel()
                drain_ends = trio.current_time() + self._limits.drain_timeout_seconds
                await self._context.terminated.set()
                for connection in tuple(self._connections):
                    connection.drain()
            guard.cancel_scope.cancel()
        self._complaints.close()
        return drain_ends

    async def _cut_off(self, stop: trio.Event, clients: trio.CancelScope) -> None:
        try:
            await stop.wait()
            await trio.sleep(self._limits.drain_timeout_seconds)
        finally:  # also when the server is cancelled: sends are shielded from that
            for connection in self._connections:
                connection.abort()
            clients.cancel()

    def _is_full(self) -> bool:
        return len(self._connections) >= self._limits.connections_max

    async def _serve(self, stream: trio.SocketStream) -> None:
        if self._is_full():
            await self._turn_away(stream)
            return
        if self._context.terminated.is_set():
            return
        connection = self._open_connection(stream)
        self._connections.add(connection)
        try:
            await connection.run()
        except* Exception as group:  # one client's affair
            self._complaints.say(
                "connection failed", error=repr(first_error(group)), exc_info=group
            )
        finally:
            self._connections.discard(connection)

    async def _turn_away(self, stream: trio.SocketStream) -> None:
        self._complaints.say("too many connections", max=self._limits.connections_max)
        with suppress(OSError):
            # Over TLS the word would take a handshake, which this client does not get.
            os.write(stream.socket.fileno(), b"" if self._tls else _REFUSAL)
        if self._turned_away < TURNED_AWAY_MAX:
            self._turned_away += 1
            try:
                await linger(stream)
            finally:
                self._turned_away -= 1

    def _app_failed(self, group: ExceptionGroup[Exception], scope: Scope) -> None:
        self._complaints.say(
            "request failed", path=scope.get("path"), error=repr(first_error(group)), exc_info=group
        )


class _Listener(trio.abc.Listener[trio.SocketStream]):
    """Lets clients in by the burst, and waits quietly when there is no file descriptor for them.

    trio's listener takes one client a turn: under load, the last of many waits for seconds. Those
    that will be turned away do: hundreds a turn would hold up the clients inside.
    """

    def __init__(
        self, sock: socket.socket, complaints: _Complaints, is_full: Callable[[], bool]
    ) -> None:
        self._socket = sock
        self._is_full = is_full
        self._listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock))
        self._complaints = complaints
        self._accepted: deque[trio.SocketStream] = deque()

    async def accept(self) -> trio.SocketStream:
        while not self._accepted:
            try:
                self._accepted.append(await self._listener.accept())
                with suppress(OSError):  # nobody waits, or the next call says what is wrong
                    while len(self._accepted) < ACCEPT_BURST and not self._is_full():
                        client = trio.socket.from_stdlib_socket(self._socket.accept()[0])
                        self._accepted.append(trio.SocketStream(client))
            except OSError as error:
                if error.errno not in _OUT_OF_RESOURCES:
                    raise
                self._complaints.say("cannot accept connections", error=error.strerror)
                await trio.sleep(ACCEPT_PAUSE_SECONDS)
        return self._accepted.popleft()

    async def aclose(self) -> None:
        await self._listener.aclose()  # of those let in, trio has taken all without a pause


class _Complaints:
    """Lines about clients, so many a minute and no more: no client may fill the log."""

    def __init__(self) -> None:
        self._minute = -math.inf
        self._lines = self._left_out = 0

    def say(self, event: str, **facts: object) -> None:
        minute = trio.current_time() // 60
        if minute != self._minute:
            self.close()
            self._minute, self._lines = minute, 0
        self._lines += 1
        if self._lines <= LINES_PER_MINUTE:
            _log.warning(event, **facts)
        else:
            self._left_out += 1

    def close(self) -> None:
        if self._left_out:
            _log.warning("more lines like these were left out", lines=self._left_out)
        self._left_out = 0
