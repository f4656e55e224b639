"""The client for code that is not async."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any, Literal, Self

import anyio.from_thread

from ramakv.client.aio import Client
from ramakv.client.counters import Counters
from ramakv.client.delivery import Delivery
from ramakv.client.messages import Message, Reply
from ramakv.client.session import OnExit, Session


class SyncDelivery:
    """An event that is on its way, or was."""

    def __init__(self, delivery: Delivery, portal: anyio.from_thread.BlockingPortal | None) -> None:
        self._delivery = delivery
        self._portal = portal

    @property
    def reply(self) -> Reply | None:
        """The reply, as soon as there is one."""
        return self._delivery.reply

    def wait(self) -> Reply:
        """Wait for the reply, `answer_seconds` at most. Raises ClientError if the client does."""
        if self._delivery.reply is None and self._portal is not None:
            # A portal that has stopped has settled everything.
            with suppress(RuntimeError, CancelledError):
                return self._portal.call(self._wait)
        return self._delivery.result()

    async def _wait(self) -> Reply:
        return await self._delivery


class SyncClient:
    """The same client without async: `with SyncClient() as client:`.

    It runs a `Client` in a thread of its own, which belongs to the `with` block and ends with it. A
    client without that thread could not send behind the agent's back, and would hold the agent up
    whenever the daemon is slow. Any thread may use it; each thread's events keep their order.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        ca_file: str | None = None,
        config_file: str | os.PathLike[str] | None = None,
        queue_events_max: int = 1000,
        when_full: Literal["drop_oldest", "drop_newest"] = "drop_oldest",
        connections_max: int = 8,
        answer_seconds: float = 20.0,
        close_seconds: float = 5.0,
        raise_errors: bool = False,
    ) -> None:
        """See `Client`."""
        self._client = Client(
            url,
            token=token,
            ca_file=ca_file,
            config_file=config_file,
            queue_events_max=queue_events_max,
            when_full=when_full,
            connections_max=connections_max,
            answer_seconds=answer_seconds,
            close_seconds=close_seconds,
            raise_errors=raise_errors,
        )
        self._stack = ExitStack()
        self._portal: anyio.from_thread.BlockingPortal | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._portal = stack.enter_context(anyio.from_thread.start_blocking_portal("asyncio"))
            stack.enter_context(self._portal.wrap_async_context_manager(self._client))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._stack.__exit__(kind, error, traceback)
        finally:
            self._portal = None

    @property
    def is_enabled(self) -> bool:
        """Whether events go anywhere."""
        return self._client.is_enabled

    @property
    def counters(self) -> Counters:
        """What became of the events so far."""
        return self._client.counters

    @property
    def waiting(self) -> int:
        """How many events are in the queue or under way."""
        return self._client.waiting

    def session(self, session_id: str, *, on_exit: OnExit = "close") -> Session[SyncDelivery]:
        """Return a session by its id; `on_exit` says what leaving its `with` block does."""
        return Session(self._post, session_id, on_exit)

    def health(self) -> SyncDelivery:
        """Ask whether the daemon runs, and how many sessions are active."""
        return self._do(self._client.health)

    def list_events(self) -> SyncDelivery:
        """Ask which events the daemon knows."""
        return self._do(self._client.list_events)

    def send(self, type_: str, **fields: Any) -> SyncDelivery:
        """Send any event, such as one that this client does not know yet."""
        return self._do(lambda: self._client.send(type_, **fields))

    def _post(self, message: Message) -> SyncDelivery:
        return self._do(lambda: self._client.post(message))

    def _do(self, what: Callable[[], Delivery]) -> SyncDelivery:
        portal = self._portal
        if portal is not None:
            with suppress(RuntimeError, CancelledError):  # it stops at this very moment
                (delivery,) = portal.call(lambda: (what(),))  # bare, it would be awaited there
                return SyncDelivery(delivery, portal)
        return SyncDelivery(what(), None)
