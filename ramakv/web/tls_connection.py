"""One connection over TLS: a handshake, then HTTP as on any other."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio
from hypercorn.trio.tcp_server import MAX_RECV

from ramakv.web.app_call import json_error
from ramakv.web.connection import LINGER_SECONDS, Connection

if TYPE_CHECKING:
    from ramakv.web.tls import ServerTls

RECORDS_BYTES: Final = 128 * 1024
"""How much is encrypted at a time: all of a long answer would hold up everybody else."""

_HANDSHAKE: Final = b"\x16"  # what a client's first TLS record begins with
_GONE: Final = (trio.BrokenResourceError, trio.ClosedResourceError)
log = structlog.get_logger("ramakv.web")


def _refusal() -> bytes:
    headers, body = json_error("plain HTTP on a port that speaks https; use https://")
    headers += [(b"connection", b"close")]
    lines = [b"HTTP/1.1 400 ", *(b"%b: %b" % header for header in headers), b"", body]
    return b"\r\n".join(lines)


_REFUSAL: Final = _refusal()


class TlsConnection(Connection):
    """One client that must complete its handshake in time; then its requests are served."""

    secure = True

    def __init__(self, tls: ServerTls, *args: Any) -> None:
        super().__init__(*args)
        self._tls = tls
        self._encrypted: trio.SSLStream[trio.SocketStream] | None = None

    async def _next_request(self) -> None:
        if self._encrypted is None and not await self._shake_hands():
            self._finished = True
            return
        await super()._next_request()

    async def _shake_hands(self) -> bool:
        deadline = trio.current_time() + self._tls.handshake_timeout_seconds
        with trio.CancelScope(deadline=deadline) as self._idle, suppress(OSError, *_GONE):
            # Until a client has said something it costs no more than its socket.
            first = await self.stream.socket.recv(1, trio.socket.MSG_PEEK)
            if first == _HANDSHAKE:
                await self._encrypt()
            elif first.isalpha():
                os.write(self.stream.socket.fileno(), _REFUSAL)
                self.protocol.refused = True  # it gets to read that
        return self._encrypted is not None and not self._idle.cancel_called

    async def _encrypt(self) -> None:
        stream = trio.SSLStream(self.stream, self._tls.certificate.context, server_side=True)
        try:
            await stream.do_handshake()
        except trio.BrokenResourceError as error:
            log.debug("TLS handshake failed", cause=str(error.__cause__ or "the client left"))
        else:
            self._encrypted = stream

    async def _part(self) -> None:
        await super()._part()
        if self._encrypted is not None and not self.protocol.unread:
            with trio.move_on_after(LINGER_SECONDS), suppress(*_GONE):
                await self._encrypted.aclose()  # tells the client that nothing was cut off

    async def _receive(self) -> bytes:
        assert self._encrypted is not None
        try:
            return bytes(await self._encrypted.receive_some(MAX_RECV))
        except _GONE:
            self.broken = True
            return b""

    async def flush(self) -> None:
        """Write what waits, in one piece. A client that does not take it in time is given up."""
        data = b"".join(self._unsent)
        if data and self._sending is None:  # else the write that is going on takes it all
            self._unsent.clear()
            if not self.broken:
                await self._send_in_time(data)

    async def _send_all(self, data: bytes) -> None:
        assert self._encrypted is not None
        for start in range(0, len(data), RECORDS_BYTES):
            await self._encrypted.send_all(data[start : start + RECORDS_BYTES])
