"""The queue of a client, and the tasks that empty it."""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from dataclasses import replace

import anyio
import anyio.abc

from ramakv.client.counters import Counters
from ramakv.client.delivery import Delivery
from ramakv.client.lanes import Lanes
from ramakv.client.messages import Message, Reply, failed
from ramakv.client.outage import WAIT_SECONDS_BASE, WAIT_SECONDS_MAX, Outage
from ramakv.client.transport import Transport
from ramakv.client.verdicts import Answer, TryAgain, settle
from ramakv.errors import (
    ClientError,
    DaemonUnavailableError,
    EventDroppedError,
    EventSkippedError,
    OutcomeUnknownError,
)

log = logging.getLogger("ramakv.client")

COMPLAIN_SECONDS = 10.0


class _Parcel:
    """A message, what its sender holds of it, and the scope of the task that carries it."""

    def __init__(self, message: Message, delivery: Delivery, queued_at: float) -> None:
        self.message = message
        self.delivery = delivery
        self.queued_at = queued_at
        # Not the agent's cancellation ends it, but the client: last events are worth a moment.
        self.scope = anyio.CancelScope(shield=True)
        self.unsure_tries = 0
        self.put_off = 0


class _Complaints:
    """Logs what goes wrong, of each kind at most one line in a while."""

    def __init__(self) -> None:
        self._last: dict[type[ClientError], float] = {}
        self._unsaid: Counter[type[ClientError]] = Counter()

    def add(self, type_: str, error: ClientError) -> None:
        kind, now = type(error), anyio.current_time()
        if now - self._last.get(kind, -math.inf) < COMPLAIN_SECONDS:
            self._unsaid[kind] += 1
            return
        self._last[kind] = now
        more = self._unsaid.pop(kind, 0)
        level = logging.DEBUG if isinstance(error, EventSkippedError) else logging.WARNING
        log.log(level, "%s: %s%s", type_, error, f" (and {more} more like it)" if more else "")


class Sender:
    """Sends what is put into it: each session's events in their order, none of them twice.

    Owns the queue. At most `queue_events_max` events wait; of more, the oldest goes, or with
    `drop_newest` the one that came. One task carries each event that may go now, in the task group
    of the client. An event waits for its turn, the daemon and a connection before it is sent; only
    then it does not count as waiting, and cannot be dropped. Stops when that group is cancelled.
    """

    def __init__(
        self,
        transport: Transport,
        tasks: anyio.abc.TaskGroup,
        *,
        queue_events_max: int,
        connections_max: int,
        drop_newest: bool,
        rng: random.Random,
    ) -> None:
        self._transport = transport
        self._tasks = tasks
        self._queue_events_max = queue_events_max
        self._drop_newest = drop_newest
        # Outside the pool's own: a wait for the pool that is cancelled leaks a connection.
        self._connections = anyio.CapacityLimiter(connections_max)
        self._lanes = Lanes[_Parcel]()
        self._waiting: dict[_Parcel, None] = {}
        self._rng = rng
        self._outage = Outage(rng)
        self._complaints = _Complaints()
        self._empty: anyio.Event | None = None
        self.counters = Counters()

    @property
    def waiting(self) -> int:
        """How many events have not been answered yet."""
        return len(self._lanes)

    def put(self, message: Message, delivery: Delivery) -> None:
        """Take an event over. Never blocks."""
        if len(self._waiting) >= self._queue_events_max:
            full = EventDroppedError(f"{self._queue_events_max} events wait already")
            if self._drop_newest:
                self._settle(message, delivery, failed(full))
                return
            self._drop(next(iter(self._waiting)), full)
        parcel = _Parcel(message, delivery, anyio.current_time())
        self._waiting[parcel] = None
        if self._lanes.add(parcel, message.sessions):
            self._tasks.start_soon(self._carry, parcel)

    async def drain(self, seconds: float) -> None:
        """Wait until everything is answered, `seconds` at most; then drop what is left."""
        if self._lanes:
            self._empty = anyio.Event()
            with anyio.move_on_after(seconds):
                await self._empty.wait()
        closed = EventDroppedError(f"the client closed, {seconds:g} s after it was told to")
        for parcel in list(self._waiting):
            self._drop(parcel, closed)

    def give_up(self) -> None:
        """End everything that is left, now. What is under way may have been applied, or not."""
        for parcel in list(self._lanes):
            why: ClientError = OutcomeUnknownError("the client closed before the answer came")
            if parcel in self._waiting:
                why = EventDroppedError("the client closed before it could be sent")
            self._settle(parcel.message, parcel.delivery, failed(why))
            parcel.scope.cancel()

    def _drop(self, parcel: _Parcel, why: EventDroppedError) -> None:
        self._end(parcel, failed(why))
        parcel.scope.cancel()

    def _end(self, parcel: _Parcel, reply: Reply) -> None:
        """An event is settled: the next of its sessions may go. No await in here."""
        self._waiting.pop(parcel, None)
        self._settle(parcel.message, parcel.delivery, reply)
        for freed in self._lanes.remove(parcel):
            self._tasks.start_soon(self._carry, freed)
        if self._empty is not None and not self._lanes:
            self._empty.set()

    async def _carry(self, parcel: _Parcel) -> None:
        """Bring one event to the daemon. A fault in here is that event's, and nobody else's."""
        with parcel.scope:
            try:
                reply = await self._try(parcel)
            except ClientError as error:
                reply = failed(error)
            except Exception as error:
                log.exception("an event failed inside the client", exc_info=error)
                reply = failed(OutcomeUnknownError(f"the client failed: {error!r}"))
            self._end(parcel, reply)

    async def _try(self, parcel: _Parcel) -> Reply:
        while True:
            if parcel.message.is_read:  # whoever asks wants to know now
                verdict = await self._send(parcel)
            else:
                async with self._outage.passage():
                    verdict = await self._send(parcel)
            if isinstance(verdict, Reply):
                return verdict
            self.counters.retried += 1
            self._wait_first(parcel)
            if not verdict.is_outage:  # an outage is waited for where the next try begins
                await anyio.sleep(self._pause(parcel, verdict.wait_seconds))

    def _pause(self, parcel: _Parcel, asked_seconds: float) -> float:
        """Say how long to wait after a 503: what it asks for, and more from time to time."""
        parcel.put_off += 1
        longest = min(WAIT_SECONDS_BASE * 2.0 ** min(parcel.put_off, 16), WAIT_SECONDS_MAX)
        return max(asked_seconds, longest) * self._rng.uniform(1.0, 1.5)  # not all at once

    def _wait_first(self, parcel: _Parcel) -> None:
        """Have an event wait again, as the oldest: it has been sent before."""
        self._waiting = {parcel: None, **self._waiting}

    async def _send(self, parcel: _Parcel) -> Reply | TryAgain:
        async with self._connections:
            if parcel not in self._waiting:  # dropped at the last moment: its scope is cancelled
                await anyio.sleep_forever()
            self._refuse_stale(parcel)
            body = parcel.message.body()
            tried_at = anyio.current_time()
            del self._waiting[parcel]
            answer: Answer | ClientError
            try:
                answer = await self._transport.post(body)
            except (DaemonUnavailableError, OutcomeUnknownError) as error:
                answer = error
        self._note(answer, tried_at)
        verdict = settle(parcel.message, answer, parcel.unsure_tries)
        if isinstance(answer, OutcomeUnknownError):
            parcel.unsure_tries += 1
        return verdict

    def _refuse_stale(self, parcel: _Parcel) -> None:
        fresh = parcel.message.fresh_seconds
        if fresh is not None and anyio.current_time() - parcel.queued_at > fresh:
            raise EventSkippedError(f"its turn began more than {fresh:g} s ago")

    def _note(self, answer: Answer | ClientError, tried_at: float) -> None:
        """Keep what an answer tells about the daemon, and log when that changes."""
        if isinstance(answer, Answer):
            if seconds := self._outage.end():
                log.warning("the daemon answers again, after %.1f s", seconds)
        elif self._outage.begin(tried_at):
            log.warning("%s; events wait until it answers", answer)

    def _settle(self, message: Message, delivery: Delivery, reply: Reply) -> None:
        self._count(reply)
        if reply.cause is not None:
            self._complaints.add(message.type, reply.cause)
        delivery.settle(reply)

    def _count(self, reply: Reply) -> None:
        counters = self.counters
        match reply.cause:
            case None:
                counters.delivered += 1
            case EventSkippedError():
                counters.skipped += 1
            case EventDroppedError():
                counters.dropped += 1
            case OutcomeUnknownError():
                counters.unanswered += 1
            case DaemonUnavailableError():
                counters.unreachable += 1
            case _:
                counters.refused += 1

    def snapshot(self) -> Counters:
        """Copy the counters."""
        return replace(self.counters)
