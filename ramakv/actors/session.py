"""The session actor: one session's chunk map, changed by its events in their order."""

from __future__ import annotations

import structlog
from msgspec.structs import replace

from ramakv import events
from ramakv.actors.mailbox import Mailbox, answered
from ramakv.actors.refcount import Owner
from ramakv.actors.requests import (
    Ask,
    EndPrepared,
    Expire,
    Inherit,
    Look,
    Outcome,
    Prefetching,
    Prepared,
    PrepareFork,
    ReadSnapshot,
    Request,
    Restore,
)
from ramakv.actors.steps import Steps
from ramakv.actors.surroundings import Surroundings
from ramakv.config import SUSPEND_LOCATIONS
from ramakv.core import session as rules
from ramakv.core.chunks import ChunkMap
from ramakv.core.session import Fork, SessionState, Status, Step
from ramakv.errors import (
    ConflictError,
    InternalError,
    NotFoundError,
    RamakvError,
    StoreError,
    TooLargeError,
)
from ramakv.store.store import Bookkeeping, ParentsFork, Reopened
from ramakv.tracing import make_current, resumed

log = structlog.get_logger("ramakv.session")


class SessionActor:
    """Applies one session's events serially: commit, then answer, then act.

    **Owns** the session's state. **Receives** its events and the router's requests.
    **Sends to** refcount, journal and backend. **Stops when** its mailbox is closed: by the
    router, when it is passivated or the daemon drains.
    """

    def __init__(self, session_id: str, state: SessionState | None, around: Surroundings) -> None:
        self.session_id = session_id
        waiting_max = around.config.limits.mailbox_events_max
        self.mailbox: Mailbox[Ask] = Mailbox(
            waiting_max,
            f"session '{session_id}' has {waiting_max} events waiting already; try again",
        )
        self._state = state
        self._around = around
        self._current: Ask | None = None
        self._steps = Steps(around)
        self._unfinished = 0
        self._prepared: set[int] = set()

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing to do, so that it can be passivated."""
        return self._state is not None and not self._unfinished and not self._prepared

    @property
    def references(self) -> ChunkMap:
        """Chunks that it holds, a chunk twice where it is listed twice; none while it loads."""
        return self._state.active_map if self._state else ()

    @property
    def unfinished(self) -> int:
        """How many requests wait or are under way."""
        return self._unfinished

    def post(self, ask: Ask) -> None:
        """Put a request in its mailbox. Raises MailboxFullError, or ClosedResourceError."""
        self.mailbox.put_nowait(ask)
        self._unfinished += 1

    async def deliver(self, ask: Ask) -> None:
        """Put a request in its mailbox, waiting for room. Raises ClosedResourceError."""
        self._unfinished += 1
        try:
            await self.mailbox.put(ask)
        except BaseException:
            self._unfinished -= 1
            raise

    async def run(self) -> None:
        """Serve the mailbox until it is closed."""
        make_current(None)  # not the trace of the event that woke it
        if self._state is None:
            try:
                self._adopt_state(await self._around.journal.load(self.session_id))
            except StoreError as error:
                self._refuse_all(error)
                return
        async for ask in self.mailbox:
            if ask.begin():
                self._current = ask
                try:
                    with resumed(ask.trace, "session"):
                        outcome = await self._handle(ask.request)
                    ask.reply.set(outcome)
                except RamakvError as error:
                    ask.reply.fail(error)
                self._current = None
                if self._around.config.trace_events:
                    self._trace(ask)
            self._unfinished -= 1
            if self._known.status is Status.UNKNOWN and self.is_idle:
                self._around.home.retire(self)

    async def recover_from_crash(self) -> None:
        """Leave the counts right and tell the callers, after `run` raised.

        The next event loads the session from the store, which has all that was committed.
        """
        self._refuse_all(
            InternalError(f"session '{self.session_id}' failed inside ramakv; see its log")
        )
        await self._steps.recover()

    def _refuse_all(self, error: RamakvError) -> None:
        self.mailbox.close()
        if self._current is not None:
            self._current.reply.fail(error)
        while (ask := self.mailbox.get_nowait()) is not None:
            ask.reply.fail(error)

    @property
    def _known(self) -> SessionState:
        assert self._state is not None
        return self._state

    @property
    def _active(self) -> SessionState:
        """The state of a session that is active. Raises NotFoundError where it is not."""
        state = self._known
        if state.status is Status.UNKNOWN:
            raise NotFoundError(f"session '{self.session_id}' not found")
        if state.status is Status.SUSPENDED:
            raise NotFoundError(
                f"session '{self.session_id}' is suspended; a turn_start or a snapshot_restore "
                "brings it back"
            )
        return state

    async def _handle(self, request: Request) -> Outcome:
        match request:
            case events.TurnStart():
                return await self._turn_start(request)
            case events.TurnEnd():
                return await self._turn_end(request)
            case events.SessionMap():
                return self._session_map()
            case events.SessionClose():
                keep_pinned = self._around.config.sessions.keep_pinned_on_close
                return await self._close(keep_pinned=keep_pinned)
            case events.SessionSuspend():
                return await self._suspend()
            case events.SessionFork():
                return await self._fork()
            case events.SessionForkEnd():
                return await self._fork_end(request.fork_id)
            case Restore():
                return await self._restore(request)
            case PrepareFork():
                return await self._prepare_fork()
            case Inherit():
                step = rules.restore(self._known, request.chunk_map, pin=False)
                await self._apply(step, parents_fork=request.parents_fork)
                self._around.residency.inherited(self.session_id)
                return None
            case EndPrepared():
                await self._end_prepared(request.fork, request.stored)
                return None
            case ReadSnapshot():
                return self._snapshot()
            case Look():
                return self._known
            case Expire():
                await self._expire(request)
                return None
        raise AssertionError(request)

    # Events ------------------------------------------------------------------------------

    async def _turn_start(self, event: events.TurnStart) -> Prefetching:
        advice = self._around.residency.turn_started(self.session_id)
        closed_ms = self._known.closed_ms
        if closed_ms is not None and self._known.status is Status.UNKNOWN:
            # It is on the way to the first token: nobody waits for this to be written.
            self._adopt_state(rules.reopen(self._known))
            reopened = Reopened(self.session_id, closed_ms)
            await self._around.journal.tell(Bookkeeping(reopened=reopened))
        restored = self._known.status is Status.SUSPENDED
        if restored:
            await self._apply(rules.resume(self._known))
        chunks = self._known.references if self._around.config.turn_start_prefetch else ()
        if chunks and advice.is_there and event.lookup_id is None:
            return Prefetching(answered(True), len(chunks), restored)
        worth = max(0, len(chunks) - advice.unwanted_end)
        return self._prefetch(chunks[:worth], event.lookup_id, restored=restored)

    async def _turn_end(self, event: events.TurnEnd) -> events.TurnEndData:
        state, around = self._known, self._around
        if rules.was_just_closed(
            state, around.now_ms(), around.config.sessions.closed_memory_seconds
        ):
            raise ConflictError(
                f"session '{self.session_id}' was closed; this turn_end comes too late "
                "(a turn_start begins a new life)"
            )
        if rules.is_stale(state, event.seq):
            raise ConflictError(
                f"seq {event.seq} is not above {state.seq}, the last one applied to session "
                f"'{self.session_id}'; nothing was changed"
            )
        hashes = tuple(event.kv_transfer_params.chunk_hashes)
        evicted = await self._apply(rules.turn_end(state, hashes, event.seq))
        around.residency.turn_ended(self.session_id, hashes, event.finish_reason)
        return events.TurnEndData(
            evicted_count=evicted,
            map_updated=True,
            debug_written=await self._write_debug_file(event),
            backend_degraded=around.backend.is_degraded,
            chunk_count=len(hashes),
        )

    def _session_map(self) -> events.SessionMapData:
        return events.SessionMapData(self.session_id, self._active.chunk_map)

    async def _close(self, *, keep_pinned: bool) -> events.SessionCloseData:
        state = self._known
        pinned = keep_pinned and state.pinned and state.status is not Status.UNKNOWN
        evicted = 0
        if state.status is not Status.UNKNOWN:
            evicted = await self._apply(self._closing(self._around.now_ms(), keep_row=pinned))
        return events.SessionCloseData(
            closed=True,
            pinned=pinned,
            evicted_count=evicted,
            backend_degraded=self._around.backend.is_degraded,
        )

    def _closing(self, closed_ms: int | None, *, keep_row: bool) -> Step:
        locations = set(self._around.config.eviction.close_locations)
        evict_suspended = locations != set(SUSPEND_LOCATIONS)
        return rules.close(
            self._known, closed_ms, keep_row=keep_row, evict_suspended=evict_suspended
        )

    async def _suspend(self) -> events.SessionSuspendData:
        evicted = 0
        if self._known.status is Status.ACTIVE:
            evicted = await self._apply(rules.suspend(self._known))
        suspended = self._known.status is Status.SUSPENDED
        return events.SessionSuspendData(
            suspended=suspended,
            pinned=suspended,
            evicted_count=evicted,
            backend_degraded=self._around.backend.is_degraded,
        )

    async def _fork(self) -> events.SessionForkData:
        fork = self._new_fork()
        await self._apply(rules.fork(self._known, fork), Owner.of(fork))
        return events.SessionForkData(forked=True, fork_id=fork.fork_id)

    async def _prepare_fork(self) -> Prepared:
        fork = self._new_fork()
        await self._around.refcount.acquire(Owner.of(fork), fork.chunks)
        self._prepared.add(fork.fork_id)
        return Prepared(fork, self._known.chunk_map)

    async def _end_prepared(self, fork: Fork, stored: bool | None) -> None:
        """Take a prepared fork up if the child stored it, or let go of its chunks."""
        is_ours = fork.fork_id in self._prepared
        self._prepared.discard(fork.fork_id)
        if is_ours and stored is not None:
            forks = (*self._known.forks, fork) if stored else self._known.forks
        else:  # the child crashed, or this actor's predecessor: the store knows what there is
            forks = (await self._around.journal.load(self.session_id)).forks
            stored = fork in forks if stored is None else stored
        self._adopt_state(replace(self._known, forks=forks))
        if stored:
            await self._around.refcount.keep(Owner.of(fork), fork.chunks)
        else:
            await self._around.refcount.undo(Owner.of(fork), fork.chunks)

    def _new_fork(self) -> Fork:
        state = self._active
        forks_max = self._around.config.limits.forks_per_session_max
        if len(state.forks) >= forks_max:
            raise TooLargeError(
                f"session '{self.session_id}' has {forks_max} open forks "
                "(limits.forks_per_session_max); end some with session_fork_end"
            )
        return Fork(self._around.home.new_fork_id(), state.references, self._around.now_ms())

    async def _fork_end(self, fork_id: int | None) -> events.SessionForkEndData:
        fork = rules.find_fork(self._known, fork_id)
        evicted = 0
        if fork is not None:
            evicted = await self._apply(rules.fork_end(self._known, fork), Owner.of(fork))
        return events.SessionForkEndData(
            fork_end=True,
            evicted_count=evicted,
            backend_degraded=self._around.backend.is_degraded,
            matched=fork is not None,
        )

    async def _restore(self, request: Restore) -> Prefetching:
        chunk_map = self._snapshot() if request.chunk_map is None else request.chunk_map
        self._around.residency.left(self.session_id)  # it knows another map
        evicted = await self._apply(rules.restore(self._known, chunk_map, pin=True))
        return self._prefetch(self._known.references, None, restored=True, evicted=evicted)

    def _snapshot(self) -> ChunkMap:
        if self._known.status is Status.UNKNOWN:
            raise NotFoundError(f"source session '{self.session_id}' not found in memory or store")
        if not self._known.chunk_map:
            raise NotFoundError(
                f"source session '{self.session_id}' has no chunk_hashes to restore"
            )
        return self._known.chunk_map

    async def _expire(self, request: Expire) -> None:
        if request.forks_opened_before_ms is not None:
            for fork in self._known.forks:
                if fork.opened_ms < request.forks_opened_before_ms:
                    step = rules.fork_end(self._known, fork)
                    await self._apply(step, Owner.of(fork), is_event=False)
                    log.info("fork expired", session_id=self.session_id, fork_id=fork.fork_id)
        if request.suspend and self._known.status is Status.ACTIVE:
            await self._apply(rules.suspend(self._known), is_event=False)
            log.info("idle session suspended", session_id=self.session_id)
        elif request.close and self._known.status is Status.SUSPENDED:
            # Not remembered: its agent did not end it, and a turn_end that comes now is not late.
            await self._apply(self._closing(None, keep_row=False), is_event=False)
            log.info("idle session closed", session_id=self.session_id)

    # Steps -------------------------------------------------------------------------------

    async def _apply(
        self,
        step: Step,
        owner: Owner | None = None,
        parents_fork: ParentsFork | None = None,
        *,
        is_event: bool = True,
    ) -> int:
        """Carry a step out; returns how many chunks were queued for eviction."""
        owner = owner or Owner("session", self.session_id)
        return await self._steps.carry_out(
            self._known, step, owner, parents_fork, self._adopt_state, is_event=is_event
        )

    def _adopt_state(self, state: SessionState) -> None:
        self._state = state
        self._around.home.state_changed(state)
        if state.status is not Status.ACTIVE:
            self._around.residency.left(self.session_id)

    def _prefetch(
        self, chunks: ChunkMap, lookup_id: str | None, *, restored: bool, evicted: int = 0
    ) -> Prefetching:
        """Put a prefetch in the backend's lane, where there is one to make."""
        if not chunks:
            return Prefetching(None, 0, restored, evicted)
        accepted = self._around.backend.prefetch(chunks, lookup_id)
        return Prefetching(accepted, len(chunks), restored, evicted)

    async def _write_debug_file(self, event: events.TurnEnd) -> bool:
        if self._around.debug_files is None:
            return False
        return await self._around.debug_files.write(event, self._known.turn_count)

    def _trace(self, ask: Ask) -> None:
        state = self._known
        log.info(
            "trace",
            request=type(ask.request).__name__,
            session_id=self.session_id,
            status=state.status.name.lower(),
            chunk_map=state.chunk_map,
            counts=self._around.refcount.counts_of(state.references),
            forks=[fork.fork_id for fork in state.forks],
        )
