"""The backend actor: paces, orders and judges every call to LMCache."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import structlog
import trio

from ramakv.actors.caretaker import Care, Caretaker
from ramakv.actors.errands import Errand, Errands
from ramakv.actors.journal import Journal
from ramakv.actors.mailbox import Reply, answered
from ramakv.actors.prefetch import Prefetch, PrefetchLane
from ramakv.actors.questions import Places, Questions
from ramakv.actors.refcount import RefcountActor
from ramakv.config import DISK_LOCATION, HOT_LOCATION, Backend as BackendConfig
from ramakv.core.breaker import Breaker, BreakerState, Permit
from ramakv.core.chunks import ChunkHash, ChunkMap
from ramakv.core.counting import Holds
from ramakv.core.evictions import Batch, Scope
from ramakv.core.orders import Action
from ramakv.core.pacing import TokenBucket
from ramakv.core.tallies import CallTally
from ramakv.errors import BackendError, BackendRejectedError, BackendUnavailableError
from ramakv.lmcache.backend import KVBackend, fresh_lookup_id
from ramakv.tracing import current, joined, resumed

log = structlog.get_logger("ramakv.backend")

_BLOCKED_SECONDS = 0.2
"""How long to wait when what is due may not be sent, unless something ends before."""

_LOST_AT_RESTART = {HOT_LOCATION, DISK_LOCATION}
"""Tiers of which nothing is found any more after a restart."""

_DRAIN_SECONDS = 2.0
"""How long calls in flight may take when the daemon stops."""


class BackendActor:
    """Sends prefetches and evicts, as many as LMCache can bear, and never two that conflict.

    Three lanes: prefetch, then evict, then what residency wants. Its workers are its limiter: so
    many calls are in flight at most, and the client's pool is as wide. Picking a call and sending
    it happen with no await between them.

    **Owns** the token bucket, the breaker, the prefetch lane and the calls in flight.
    **Receives** prefetches; **pulls** evictions from the refcount actor.
    **Sends to** the journal (what was evicted). **Stops when** it is closed and nothing that
    can be sent is left.
    """

    def __init__(
        self,
        client: KVBackend,
        config: BackendConfig,
        locations: Mapping[Scope, Sequence[str]],
        refcount: RefcountActor,
        journal: Journal,
        *,
        unpaced: bool = False,
        care: Care | None = None,
    ) -> None:
        self._client = client
        self._config = config
        self._locations = locations
        self._refcount = refcount
        self._journal = journal
        self._bucket = TokenBucket(
            math.inf if unpaced else config.calls_per_second, config.burst_calls_max
        )
        self._breaker = Breaker(config.breaker_failures_max, config.breaker_open_seconds)
        self._lane = PrefetchLane()
        self._idle_workers = trio.lowlevel.ParkingLot()
        self._last_refusal = ""
        self._caretaker = Caretaker(care, config.unconsumed_chunks_max)
        self._questions = Questions(client)
        self._errands = Errands()
        self._demoting: Holds[ChunkHash] = Holds()
        self._is_paused = self._leaves_released = self._closing = False
        self._calls = trio.CancelScope()
        self.calls = 0
        self.call_tallies = {"prefetch": CallTally(), "evict": CallTally()}
        self.prefetches = self._lane.tallies

    @property
    def is_degraded(self) -> bool:
        """Whether LMCache is not to be relied on for a prefetch."""
        return self._caretaker.is_degraded or self._breaker.state is not BreakerState.CLOSED

    @property
    def trouble(self) -> str:
        """Why LMCache is not to be relied on, for people; empty where it is."""
        if self._breaker.state is not BreakerState.CLOSED:
            return "LMCache does not answer: prefetches are skipped, and evictions wait"
        return self._caretaker.trouble

    def prefetch(self, chunks: ChunkMap, lookup_id: str | None) -> Reply[bool]:
        """Put a prefetch in the lane. The reply says whether LMCache accepted it.

        Refused at once while the breaker is open, but for one that can probe, and when the
        lane is full.
        """
        now = trio.current_time()
        waiting_max = self._config.prefetches_waiting_max
        if self._is_paused or not self._caretaker.allows(len(chunks)):
            waiting_max = 0
        elif self.is_degraded:
            waiting_max = 1 if self._breaker.can_pass(now) else 0
        if len(self._lane) >= waiting_max:
            self.prefetches.skipped += 1
            return answered(False)
        accepted: Reply[bool] = Reply()
        deadline = now + self._config.prefetch_deadline_seconds
        job = Prefetch(chunks, lookup_id or fresh_lookup_id(), deadline, accepted, current())
        self._lane.add(job)
        self._caretaker.sent(len(chunks))
        self.wake()
        return accepted

    @property
    def is_paused(self) -> bool:
        """Whether an operator has paused prefetching."""
        return self._is_paused

    def pause(self, paused: bool) -> None:
        """Send no prefetches until told otherwise, or until a restart; those that wait go."""
        if paused != self._is_paused:
            self._is_paused = paused
            log.warning("an operator paused prefetching" if paused else "prefetching goes on")

    def leave_released(self, leave: bool) -> None:
        """Let LRU take what turn_ends release, where nothing but the hot tier would be told."""
        self._leaves_released = leave and set(self._locations[Scope.RELEASE]) == {HOT_LOCATION}

    def run_errand(self, errand: Errand) -> None:
        """Do what residency wants, when there is nothing else to send."""
        self._errands.add(errand)
        if self.is_degraded or self._is_paused or self._caretaker.is_held:
            self._errands.refuse()
        self.wake()

    def locate(self, chunks: ChunkMap) -> Reply[Places]:
        """Ask LMCache where these lie, when it has nothing better to do, with a token, once.

        The reply is a BackendError where there is no answer. While LMCache is not to be
        relied on, it is not asked.
        """
        answer = self._questions.add(chunks, trio.current_time())
        if self._breaker.state is not BreakerState.CLOSED or self._caretaker.is_held:
            self._questions.refuse(self.trouble)
        self.wake()
        return answer

    def wake(self) -> None:
        """Look again for something to send: one idle worker does, and wakes the next."""
        self._idle_workers.unpark()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Send what may be sent, until closed."""
        task_status.started()
        async with trio.open_nursery() as nursery:
            self._calls = nursery.cancel_scope
            nursery.start_soon(self._caretaker.run, self._after_verdict, self._after_restart)
            for _ in range(self._config.calls_in_flight_max):
                nursery.start_soon(self._work)

    def close(self) -> None:
        """Accept no more; `run` ends when what can be sent at once has been sent."""
        self._closing = True
        # What is cut off then stays in the outbox, and is sent after the next start.
        self._calls.deadline = trio.current_time() + _DRAIN_SECONDS
        self._caretaker.close()
        self._idle_workers.unpark_all()

    def statistics(self) -> dict[str, object]:
        """Breaker, lane and tokens as they are now."""
        return {
            "paused": self._is_paused,
            "held": self._caretaker.held_chunks,
            "breaker": self._breaker.state.value,
            "prefetches_waiting": len(self._lane),
            "tokens": self._bucket.tokens(trio.current_time()),
            "breaker_openings": self._breaker.openings,
            "calls": self.calls,
        }

    def _after_verdict(self) -> None:
        """LMCache may be called now, or must not be."""
        if self._caretaker.is_refused:
            self._refuse_lanes()
        self.wake()

    async def _after_restart(self, seen_at: float) -> None:
        """Drop the evicts that are owed, if all they are about was lost with the process.

        What was released since it was last seen alive may be in the new process already.
        """
        if all(set(names) <= _LOST_AT_RESTART for names in self._locations.values()):
            await self._journal.tell(self._refcount.forgive(seen_at))
        self._answered()

    async def _work(self) -> None:
        """Send one call after the other: one of these is one call in flight at most."""
        while True:
            now = trio.current_time()
            self._questions.drop_late(now)
            if self._may_send(now):
                if (job := self._lane.take(self._are_free)) is not None:
                    await self._send_prefetch(job, self._pass(now))
                    continue
                batch = self._refcount.take(now, self._lane.chunks, flush=self._closing)
                if batch is not None:
                    await self._evict(batch, now)
                    continue
                if self._breaker.state is BreakerState.CLOSED:
                    if (question := self._questions.take()) is not None:
                        self._bucket.take(now)
                        self.calls += 1
                        await self._questions.put(question)
                        continue
                    if (found := self._errands.take(now, self._refcount.references)) is not None:
                        await self._send_errand(*found, self._pass(now))
                        self._errands.is_busy = False
                        continue
            if self._closing:
                self._questions.refuse("the daemon is stopping")
                self._errands.refuse()
                return
            with trio.move_on_at(self._look_again_at(now)):
                await self._idle_workers.park()

    def _may_send(self, now: float) -> bool:
        self._lane.drop_late(now)
        if self._caretaker.is_held:
            return False
        return self._breaker.can_pass(now) and self._bucket.ready_at(now) <= now

    def _pass(self, now: float) -> Permit:
        taken, permit = self._bucket.take(now), self._breaker.allow(now)
        assert taken
        assert permit is not None
        self.calls += 1
        if self._lane or self._errands or self._questions or self._refcount.is_due(now):
            self.wake()  # the next one has something to send
        return permit

    def _look_again_at(self, now: float) -> float:
        """When something may be sent that may not be now; a wake can come before."""
        if self._caretaker.is_held:
            times = []
        elif not self._breaker.can_pass(now):
            times = [self._breaker.probe_at()]
        elif (ready := self._bucket.ready_at(now)) > now:
            times = [ready]
        else:
            due = self._refcount.next_due(now)
            # Due and not taken: a prefetch stands in the way of some, maybe not of all.
            times = [due if due > now else now + _BLOCKED_SECONDS]
        times.append(self._lane.next_deadline)
        times.append(self._questions.next_deadline)
        return min((at for at in times if at > now), default=math.inf)

    # Prefetch ----------------------------------------------------------------------------

    def _are_free(self, chunks: ChunkMap) -> bool:
        """Whether no evict in flight, nor a demotion, stands in the way."""
        return not self._refcount.is_in_flight(chunks) and self._demoting.isdisjoint(chunks)

    async def _send_prefetch(self, job: Prefetch, permit: Permit) -> None:
        """Send one prefetch, in parts if it is long, each after the one before: prefix order."""
        accepted = False
        size = self._config.chunks_per_call_max
        try:
            for start in range(0, len(job.chunks), size):
                lookup_id = f"{job.lookup_id}.{start // size}" if start else job.lookup_id
                if start:
                    await trio.sleep_until(self._bucket.reserve(trio.current_time()))
                    self.calls += 1
                part = job.chunks[start : start + size]
                trace = resumed(job.trace, "LMCache prefetch", is_call=True)
                with trace, self.call_tallies["prefetch"].timed(trio.current_time):
                    await self._client.prefetch(part, lookup_id)
            accepted = True
            self.prefetches.accepted += 1
            self.prefetches.chunks += len(job.chunks)
            self._refcount.prefetch_succeeded()
            self._answered()
        except BackendError as error:
            self.prefetches.failed += 1
            self._judge(error, "prefetch", permit)
            self._lane.end(job, accepted=False)
            await self._diagnose(error)
        finally:
            self._lane.end(job, accepted=accepted)

    # Evict -------------------------------------------------------------------------------

    async def _evict(self, batch: Batch, now: float) -> None:
        if self._leaves_released and batch.scope is Scope.RELEASE:
            await self._journal.tell(self._refcount.left(batch))
            return
        chunks, permit = list(batch.chunks), self._pass(now)
        failure: BackendError | None = None
        try:
            released = self._journal.releases.of(batch.chunks.values())
            trace = joined(released, "LMCache evict", is_call=True)
            with trace, self.call_tallies["evict"].timed(trio.current_time):
                await self._client.evict(chunks, self._locations[batch.scope])
        except BackendError as error:
            rejected = isinstance(error, BackendRejectedError)
            books = self._refcount.evict_failed(
                batch, trio.current_time(), str(error), rejected=rejected
            )
            self._judge(error, "evict", permit)
            if books.dead:
                log.error(
                    "LMCache keeps refusing to evict a chunk; it became a dead letter",
                    chunk=books.dead[0][0],
                    cause=str(error),
                )
            failure = error
        else:
            books = self._refcount.evicted(batch)
            self._answered()
        self.wake()  # a prefetch of these chunks need not wait any more
        if books.obsolete or books.dead:
            await self._journal.tell(books)
        if failure is not None:
            await self._diagnose(failure)

    # Errands -----------------------------------------------------------------------------

    async def _send_errand(self, errand: Errand, chunks: ChunkMap, permit: Permit) -> None:
        """Make the call that residency wants, unless another one about these chunks is made."""
        chunks = chunks[: self._config.chunks_per_call_max]
        is_demotion, done = errand.action is Action.DEMOTE, False
        is_allowed = is_demotion or self._caretaker.allows(len(chunks))
        if not (is_allowed and self._are_free(chunks)):
            errand.done(False)
            return
        self._lane.chunks.hold(errand, chunks)  # an evict that comes due waits
        if is_demotion:
            self._demoting.hold(chunks)
        try:
            with self.call_tallies["evict" if is_demotion else "prefetch"].timed(trio.current_time):
                if is_demotion:
                    await self._client.evict(chunks, (HOT_LOCATION,))
                else:
                    self._caretaker.sent(len(chunks))
                    await self._client.prefetch(chunks, fresh_lookup_id())
            done = True
            self._answered()
        except BackendError as error:
            self._judge(error, errand.action.value, permit)
            await self._diagnose(error)
        finally:
            self._lane.chunks.let_go(errand)
            if is_demotion:
                self._demoting.let_go_all(chunks)
            errand.done(done)

    # Judging LMCache ---------------------------------------------------------------------

    def _answered(self) -> None:
        if self._breaker.success():
            log.info("LMCache answers again")
            self.wake()

    def _judge(self, error: BackendError, call: str, permit: Permit) -> None:
        if isinstance(error, BackendUnavailableError):
            if self._breaker.failure(trio.current_time(), permit):
                log.warning(
                    "LMCache does not answer; prefetches are skipped and evictions wait",
                    call=call,
                    cause=str(error),
                    next_try_seconds=self._config.breaker_open_seconds,
                )
                self._refuse_lanes()
            else:
                log.debug("a call to LMCache failed", call=call, cause=str(error))
        else:
            self._answered()
            # Once for each cause in a row: a bad hash is tried again, alone and in halves.
            level = logging.WARNING if str(error) != self._last_refusal else logging.DEBUG
            self._last_refusal = str(error)
            log.log(level, "LMCache refused a call", call=call, cause=str(error))

    async def _diagnose(self, error: BackendError) -> None:
        if await self._caretaker.hangs(error):
            self._breaker.trip(trio.current_time())
            self._refuse_lanes()

    def _refuse_lanes(self) -> None:
        """Answer what waits: with an open breaker it would wait in vain."""
        self._lane.refuse()
        self._errands.refuse()
