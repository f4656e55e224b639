"""The client for asyncio and trio."""

from __future__ import annotations

import logging
import os
import random
import time
from types import TracebackType
from typing import Any, Literal, Self

import anyio
import anyio.abc
import httpx

from ramakv.client.counters import Counters
from ramakv.client.delivery import Delivery
from ramakv.client.messages import Message, failed
from ramakv.client.sender import Sender
from ramakv.client.session import OnExit, Session
from ramakv.client.settings import URL_VARIABLE, Settings, load_settings
from ramakv.client.transport import Transport
from ramakv.errors import ClientError, ConfigError, EventDroppedError, EventInvalidError

log = logging.getLogger("ramakv.client")

OFF = (
    "no daemon is configured, so events go nowhere; give its address to the client, in "
    f"{URL_VARIABLE} or as daemon_url in ~/.config/ram-a-kv/config.toml"
)


class Client:
    """Reports sessions and turns to ramakv, without ever being in the agent's way.

    Each call puts an event into a queue and returns its delivery at once; a task of the client
    sends them, each session's in their order. Await a delivery to have its reply. While the daemon
    is away events wait, and what the contract lets repeat is sent again.

    Use it as `async with Client() as client:`. Leaving the block waits `close_seconds` at most for
    what is still queued; what could not be sent then is dropped, counted and logged.

    Nothing is raised into the agent, whatever becomes of an event or the configuration. With
    `raise_errors` it is: ConfigError by the constructor, ClientError by awaiting a delivery, and
    EventDroppedError by leaving the block where events were dropped.
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
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Nothing is connected yet. `transport` replaces httpx's own, for tests and proxies.

        What is not given is read from the environment and from `config_file`, by default
        `~/.config/ram-a-kv/config.toml`; see `load_settings`.
        """
        self._raise_errors = raise_errors
        self._queue_events_max = queue_events_max
        self._drop_newest = when_full == "drop_newest"
        self._connections_max = connections_max
        self._answer_seconds = answer_seconds
        self._close_seconds = close_seconds
        self._last_seq = 0
        self._counters = Counters()
        self._sender: Sender | None = None
        self._tasks: anyio.abc.TaskGroup | None = None
        self._why_off: ClientError = EventDroppedError("used outside its `async with` block")
        self._transport = self._connect(url, token, ca_file, config_file, transport)

    def _connect(
        self,
        url: str | None,
        token: str | None,
        ca_file: str | None,
        config_file: str | os.PathLike[str] | None,
        transport: httpx.AsyncBaseTransport | None,
    ) -> Transport | None:
        """Say where events go; None where they go nowhere, and then it is logged once."""
        try:
            settings: Settings = load_settings(url, token, ca_file, path=config_file)
            if not settings.url:
                raise ConfigError(OFF)
            return Transport(settings, self._connections_max, transport)
        except ConfigError as error:
            if self._raise_errors:
                raise
            log.warning("ramakv is off: %s", error)
            self._why_off = EventDroppedError(str(error))
            return None

    @property
    def is_enabled(self) -> bool:
        """Whether events go anywhere."""
        return self._transport is not None

    @property
    def counters(self) -> Counters:
        """What became of the events so far."""
        return self._sender.snapshot() if self._sender else self._counters

    @property
    def waiting(self) -> int:
        """How many events are in the queue or under way."""
        return self._sender.waiting if self._sender else 0

    async def __aenter__(self) -> Self:
        if self._transport is None:
            return self
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._sender = Sender(
            self._transport,
            self._tasks,
            queue_events_max=self._queue_events_max,
            connections_max=self._connections_max,
            drop_newest=self._drop_newest,
            rng=random.Random(),  # noqa: S311 - spreads retries, keeps no secret
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._transport is None or self._sender is None or self._tasks is None:
            return
        sender, self._sender = self._sender, None
        before = sender.snapshot()
        self._why_off = EventDroppedError("the client is closed")
        try:
            with anyio.CancelScope(shield=True):  # bounded: the last events are worth a moment
                await sender.drain(self._close_seconds)
        finally:
            sender.give_up()
            await self._stop(self._tasks, self._transport)
            self._counters = sender.snapshot()
        self._say_what_was_lost(before, raising=self._raise_errors and error is None)

    async def _stop(self, tasks: anyio.abc.TaskGroup, transport: Transport) -> None:
        tasks.cancel_scope.cancel()
        try:
            # Without the block's own error: the agent gets that as it is, and not in a group.
            await tasks.__aexit__(None, None, None)
        finally:
            with anyio.move_on_after(_DISCONNECT_SECONDS, shield=True):
                await transport.aclose()

    def _say_what_was_lost(self, before: Counters, *, raising: bool) -> None:
        dropped = self._counters.dropped - before.dropped
        unanswered = self._counters.unanswered - before.unanswered
        if not dropped and not unanswered:
            return
        what = f"the client closed: {dropped} events dropped, {unanswered} without an answer"
        log.warning("%s", what)
        if raising:
            raise EventDroppedError(what)

    def session(self, session_id: str, *, on_exit: OnExit = "close") -> Session[Delivery]:
        """Return a session by its id; `on_exit` says what leaving its `async with` block does."""
        return Session(self.post, session_id, on_exit)

    def health(self) -> Delivery:
        """Ask whether the daemon runs, and how many sessions are active."""
        return self.post(Message("health", {}))

    def list_events(self) -> Delivery:
        """Ask which events the daemon knows."""
        return self.post(Message("list_events", {}))

    def send(self, type_: str, **fields: Any) -> Delivery:
        """Send any event, such as one that this client does not know yet."""
        sessions = (fields.get(name) for name in _SESSION_FIELDS)
        return self.post(
            Message(type_, fields, tuple(name for name in sessions if isinstance(name, str)))
        )

    def post(self, message: Message) -> Delivery:
        """Queue a message. Never blocks, never raises."""
        delivery = Delivery(answer_seconds=self._answer_seconds, strict=self._raise_errors)
        try:
            if message.type == "turn_end":
                message.fields.setdefault("seq", self._next_seq())
            message.freeze()
            if self._sender is None:
                raise self._why_off
            self._sender.put(message, delivery)
        except ClientError as error:
            self._refuse(message, delivery, error)
        return delivery

    def _refuse(self, message: Message, delivery: Delivery, error: ClientError) -> None:
        counters = self._sender.counters if self._sender else self._counters
        if isinstance(error, EventInvalidError):
            counters.refused += 1
            log.warning("%s", error)
        else:
            counters.dropped += 1
        delivery.settle(failed(error))

    def _next_seq(self) -> int:
        """Number a turn_end: above all before, also those of an earlier run of the agent."""
        self._last_seq = max(self._last_seq + 1, time.time_ns() // 1000)
        return self._last_seq


_DISCONNECT_SECONDS = 1.0
_SESSION_FIELDS = ("session_id", "source_session_id", "child_session_id")
