"""How actors talk: bounded mailboxes, and replies that travel with the work.

*tell* puts a message in a mailbox and goes on; *ask* puts one in that carries a `Reply` and
waits for it. Whoever finishes the work sets the reply, so the actors in between do not wait.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Generic, TypeVar

import trio

from ramakv.errors import RamakvError, UnavailableError

T = TypeVar("T")


class MailboxFullError(UnavailableError):
    """The mailbox is full: its owner has more to do than it can."""


class Reply(Generic[T]):
    """The slot for one answer. Setting it never blocks; a caller that gave up leaves it unread."""

    __slots__ = ("_error", "_event", "_value")

    def __init__(self) -> None:
        self._event = trio.Event()
        self._value: T | None = None
        self._error: RamakvError | None = None

    @property
    def is_set(self) -> bool:
        """Whether the answer is there."""
        return self._event.is_set()

    def set(self, value: T) -> None:
        """Answer. A second answer is a fault of the caller."""
        assert not self._event.is_set()
        self._value = value
        self._event.set()

    def fail(self, error: RamakvError) -> None:
        """Answer with an error, unless there is an answer already."""
        if not self._event.is_set():
            self._error = error
            self._event.set()

    async def wait(self) -> T:
        """Wait for the answer; raises the error that it is."""
        await self._event.wait()
        return self.result()

    def result(self) -> T:
        """Return the answer that `is_set`, or raise the error that it is."""
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


def answered(value: T) -> Reply[T]:
    """Return a reply that has its answer."""
    reply: Reply[T] = Reply()
    reply.set(value)
    return reply


class Mailbox(Generic[T]):
    """A bounded queue with one reader. Closing it lets the reader finish what is in it."""

    def __init__(self, capacity: int, full_message: str) -> None:
        self._send, self._receive = trio.open_memory_channel[T](capacity)
        self._full_message = full_message

    def __len__(self) -> int:
        """How many messages wait."""
        return self._receive.statistics().current_buffer_used

    async def put(self, message: T) -> None:
        """Put a message in, waiting for room: the backpressure of those further down.

        No checkpoint where there is room: whoever asks waits for the reply anyway.
        """
        try:
            self._send.send_nowait(message)
        except trio.WouldBlock:
            await self._send.send(message)

    def put_nowait(self, message: T) -> None:
        """Put a message in, or raise MailboxFullError."""
        try:
            self._send.send_nowait(message)
        except trio.WouldBlock:
            raise MailboxFullError(self._full_message) from None

    async def get(self) -> T | None:
        """Wait for the next message; None when the mailbox is closed and empty."""
        try:
            return await self._receive.receive()
        except trio.EndOfChannel:
            return None

    def __aiter__(self) -> AsyncIterator[T]:
        """Messages in their order, until the mailbox is closed and empty."""
        return self._receive

    def get_nowait(self) -> T | None:
        """Take the next message if there is one."""
        try:
            return self._receive.receive_nowait()
        except (trio.WouldBlock, trio.EndOfChannel):
            return None

    def close(self) -> None:
        """Accept no more."""
        self._send.close()
