"""The router: from a session id to its actor, and what outlives that actor."""

from __future__ import annotations

import itertools
from collections import OrderedDict

import structlog
import trio

from ramakv import events
from ramakv.actors.backend import BackendActor
from ramakv.actors.debug_files import DebugFiles
from ramakv.actors.journal import Journal
from ramakv.actors.mailbox import Reply
from ramakv.actors.patience import Patience
from ramakv.actors.places import Place
from ramakv.actors.refcount import RefcountActor
from ramakv.actors.requests import (
    Ask,
    EndPrepared,
    Inherit,
    Outcome,
    Prefetching,
    Prepared,
    PrepareFork,
    ReadSnapshot,
    Request,
    Restore,
)
from ramakv.actors.session import SessionActor
from ramakv.actors.surroundings import ResidencyNotes, Surroundings
from ramakv.actors.sweeper import Sweeper
from ramakv.actors.turns import Turns
from ramakv.config import Config
from ramakv.core.chunks import ChunkMap
from ramakv.core.session import SessionState, Status
from ramakv.errors import InternalError, NotFoundError, RamakvError, UnavailableError
from ramakv.store.rows import StoredSession
from ramakv.store.store import ParentsFork
from ramakv.tracing import current

log = structlog.get_logger("ramakv.router")

_CREATING = events.TurnEnd | Restore | Inherit


class Router:
    """Finds or starts the actor of a session; passivates idle ones, and ends abandoned ones.

    **Owns** the places of all sessions. **Receives** events from the edge.
    **Sends to** session actors. **Stops when** it is closed and the last actor has drained.
    """

    def __init__(
        self,
        config: Config,
        refcount: RefcountActor,
        journal: Journal,
        backend: BackendActor,
        residency: ResidencyNotes,
        debug_files: DebugFiles | None,
        *,
        first_fork_id: int,
        clock_offset: float,
    ) -> None:
        self._config = config
        self._backend = backend
        self._places: dict[str, Place] = {}
        self._awake_places: OrderedDict[str, Place] = OrderedDict()
        """Those with an actor, the one that waits longest for an event first."""
        self._active = 0
        self._open = 0
        self._arriving = 0
        self._fork_ids = itertools.count(first_fork_id)
        self._nursery: trio.Nursery | None = None
        self._closing = trio.Event()
        self._around = Surroundings(
            config, self, refcount, journal, backend, residency, debug_files, clock_offset
        )
        self.turns = Turns(self._around.now_ms)
        self._sweeper = Sweeper(self, self._around)
        self._patience = Patience(config.limits.event_timeout_seconds)

    # At start ----------------------------------------------------------------------------

    def admit(self, stored: StoredSession) -> None:
        """Take in a session that the store has, at start."""
        state = stored.state
        place = Place(state.session_id)
        self._places[state.session_id] = place
        self._note(place, state)
        place.chunks = stored.chunks
        idle_seconds = max(0.0, self._around.now_ms() - stored.updated_ms) / 1000
        place.last_event = trio.current_time() - idle_seconds

    # For the edge ------------------------------------------------------------------------

    @property
    def active_sessions(self) -> int:
        """Sessions that are neither suspended nor closed."""
        return self._active

    @property
    def is_open(self) -> bool:
        """Whether events are taken."""
        return self._nursery is not None and not self._closing.is_set()

    @property
    def suspended_sessions(self) -> int:
        """Sessions that are suspended."""
        return self._open - self._active

    @property
    def unfinished(self) -> int:
        """Requests that wait for their session, or are under way in it."""
        return sum(place.actor.unfinished for place in self._awake_places.values() if place.actor)

    async def handle(self, event: events.SessionEvent) -> events.Data:
        """Have an event applied and return what it is answered with.

        Raises EventError or StoreError: then nothing was changed.
        """
        match event:
            case events.SnapshotRestore():
                return await self._restore(event)
            case events.SessionFork(child_session_id=str(child)):
                return await self._fork_into(event, child)
        outcome = await self._ask(event.session_id, event)
        self.turns.note(self._places.get(event.session_id), event, outcome)
        if isinstance(outcome, Prefetching):
            sent, degraded = await self._await_prefetch(outcome)
            return events.TurnStartData(
                prefetch_sent=sent,
                prefetch_count=outcome.count,
                backend_degraded=degraded,
                restored=outcome.restored,
            )
        assert outcome is not None
        assert not isinstance(outcome, Prepared | SessionState | tuple)
        return outcome

    async def _restore(self, event: events.SnapshotRestore) -> events.SnapshotRestoreData:
        source = event.source_session_id or event.session_id
        chunk_map: ChunkMap | None = None
        if source != event.session_id:
            snapshot = await self._ask(source, ReadSnapshot())
            assert isinstance(snapshot, tuple)
            chunk_map = snapshot
        outcome = await self._ask(event.session_id, Restore(chunk_map))
        assert isinstance(outcome, Prefetching)
        sent, degraded = await self._await_prefetch(outcome)
        return events.SnapshotRestoreData(
            prefetch_sent=sent,
            prefetch_count=outcome.count,
            backend_degraded=degraded,
            evicted_count=outcome.evicted,
            pinned=True,
            source_session_id=source,
            target_session_id=event.session_id,
        )

    async def _fork_into(self, event: events.SessionFork, child: str) -> events.SessionForkData:
        """Fork, and let a child begin with the fork's map: both in the child's transaction.

        It is the router's own task: whoever asked may go away.
        """
        nursery = self._open_nursery()
        reply: Reply[events.SessionForkData] = Reply()
        nursery.start_soon(self._carry_out_fork, event, child, reply)
        return await reply.wait()

    async def _carry_out_fork(
        self, event: events.SessionFork, child: str, reply: Reply[events.SessionForkData]
    ) -> None:
        """Have the parent hold the chunks, the child store everything, the parent take it up."""
        try:
            prepared = await self._ask(event.session_id, PrepareFork())
            assert isinstance(prepared, Prepared)
            fork, stored = prepared.fork, None
            try:
                parents_fork = ParentsFork(event.session_id, fork)
                await self._ask(child, Inherit(parents_fork, prepared.chunk_map))
                stored = True
            except RamakvError as error:
                stored = None if isinstance(error, InternalError) else False
                raise
            finally:
                await self._end_prepared(event.session_id, EndPrepared(fork, stored))
        except RamakvError as error:
            reply.fail(error)
        else:
            reply.set(events.SessionForkData(forked=True, fork_id=fork.fork_id))

    async def _end_prepared(self, session_id: str, request: EndPrepared) -> None:
        """Tell the parent. Where that cannot be, the answer is the child's all the same."""
        try:
            await self._deliver(session_id, request)
        except RamakvError as error:
            log.warning(
                "a fork's parent could not be told of it; its chunks are kept until a restart",
                session_id=session_id,
                fork_id=request.fork.fork_id,
                cause=str(error),
            )

    async def _await_prefetch(self, outcome: Prefetching) -> tuple[bool, bool]:
        """Wait for LMCache's acceptance, not longer than the bound: (sent, degraded)."""
        if outcome.accepted is None:
            return False, self._backend.is_degraded
        with trio.move_on_after(self._config.backend.prefetch_ack_seconds):
            accepted = await outcome.accepted.wait()
            return accepted, not accepted or self._backend.is_degraded
        return True, True  # under way still

    async def _ask(self, session_id: str, request: Request) -> Outcome:
        """Ask a session, for the event's time at most: what has not begun then, never will."""
        ask = Ask(request, Reply(), current())
        self._post(session_id, ask)
        watched = self._patience.watch(session_id, ask)
        try:
            return await ask.reply.wait()
        finally:
            self._patience.forget(watched)

    async def _deliver(self, session_id: str, request: Request) -> None:
        """Ask a session something that is durable already: it may take its time, but not fail."""
        ask = Ask(request, Reply(), current())
        while True:
            try:
                await self._awake(session_id, request).deliver(ask)
                break
            except trio.ClosedResourceError:
                continue  # the actor went to sleep, or crashed, while its mailbox was full
        await ask.reply.wait()

    def _post(self, session_id: str, ask: Ask) -> None:
        """Put a message into a session's mailbox; no await lies between that and finding it."""
        self._awake(session_id, ask.request).post(ask)
        self._places[session_id].last_event = trio.current_time()

    def _awake(self, session_id: str, request: Request) -> SessionActor:
        """Find or start the session's actor."""
        nursery = self._open_nursery()
        place = self._places.get(session_id) or Place(session_id)
        if isinstance(request, _CREATING) and place.status is Status.UNKNOWN:
            self._make_room(place)
        self._places[session_id] = place
        if place.actor is None:
            self._let_one_sleep()
            blank = SessionState(session_id) if place.is_empty else None
            place.actor = SessionActor(session_id, blank, self._around)
            nursery.start_soon(self._live, place, place.actor)
        self._awake_places[session_id] = place
        self._awake_places.move_to_end(session_id)
        return place.actor

    def _let_one_sleep(self) -> None:
        """Passivate the actor that has waited longest for an event, where many are awake."""
        if len(self._awake_places) < self._config.limits.awake_sessions_max:
            return
        session_id, place = next(iter(self._awake_places.items()))
        if place.actor is not None and place.actor.is_idle:
            self.retire(place.actor)
        else:
            self._awake_places.move_to_end(session_id)  # its turn comes again

    def _make_room(self, place: Place) -> None:
        """Count a session that is about to be created: many may come at once."""
        if place.is_arriving:
            return
        taken = self._open + self._arriving
        if taken >= self._config.limits.sessions_max:
            raise UnavailableError(
                f"there are {taken} sessions already "
                "(limits.sessions_max); close some, or try later"
            )
        place.is_arriving = True
        self._arriving += 1

    def _arrived(self, place: Place) -> None:
        """Count a session no longer as on its way: it is there, or its actor is gone."""
        self._arriving -= place.is_arriving
        place.is_arriving = False

    def _open_nursery(self) -> trio.Nursery:
        if not self.is_open or self._nursery is None:
            raise UnavailableError("the daemon is shutting down; try again when it is back")
        return self._nursery

    # For session actors ------------------------------------------------------------------

    def new_fork_id(self) -> int:
        """A number that no fork ever had."""
        return next(self._fork_ids)

    def state_changed(self, state: SessionState) -> None:
        """Note what became of a session, after it is durable."""
        self._note(self._places[state.session_id], state)

    def retire(self, actor: SessionActor) -> None:
        """End an idle actor. Synchronous from the look at its mailbox on: no message is lost."""
        assert actor.is_idle
        actor.mailbox.close()
        self._detach(self._places[actor.session_id], actor)

    def _note(self, place: Place, state: SessionState) -> None:
        self._active += (state.status is Status.ACTIVE) - (place.status is Status.ACTIVE)
        self._open += (state.status is not Status.UNKNOWN) - (place.status is not Status.UNKNOWN)
        place.adopt(state)
        if state.status is not Status.UNKNOWN:
            self._arrived(place)
        self.turns.state_changed(place)

    # Life and death of actors ------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the session actors until closed; then let each finish what it has."""
        async with trio.open_nursery() as patient:
            patient.start_soon(self._patience.run)
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                async with trio.open_nursery() as sweeper:
                    sweeper.start_soon(self._sweeper.run)
                    task_status.started()
                    await self._closing.wait()
                    sweeper.cancel_scope.cancel()
                for place in self._awake_places.values():
                    if place.actor is not None:
                        place.actor.mailbox.close()
            patient.cancel_scope.cancel()

    def close(self) -> None:
        """Accept no more; `run` ends when every session has finished what it was asked."""
        self._closing.set()

    async def _live(self, place: Place, actor: SessionActor) -> None:
        """Run one actor. Its crash is its own: logged, its callers told, its counts put right."""
        try:
            await actor.run()
        except Exception as error:
            log.exception(
                "a session actor crashed; its next event loads it from the store",
                session_id=actor.session_id,
                exc_info=error,
            )
            place.is_unsure = True
            self._detach(place, actor)
            await actor.recover_from_crash()
        finally:
            self._detach(place, actor)

    def _detach(self, place: Place, actor: SessionActor) -> None:
        if place.actor is actor:
            place.actor = None
            self._awake_places.pop(place.session_id, None)
            self._arrived(place)
            self.drop_if_empty(place)

    async def sweep(self) -> None:
        """Passivate actors, expire sessions and forks, forget closed sessions."""
        await self._sweeper.sweep()

    # For the sweep -----------------------------------------------------------------------

    def places(self) -> list[Place]:
        """All sessions, as they are now."""
        return list(self._places.values())

    def drop_if_empty(self, place: Place) -> None:
        """Forget a session of which there is nothing left."""
        if place.is_empty:
            self._places.pop(place.session_id, None)

    def ask_quietly(self, place: Place, request: Request) -> Reply[Outcome]:
        """Ask a session what is no event: it is no younger for it. Raises UnavailableError."""
        ask, last_event = Ask(request, Reply()), place.last_event
        self._post(place.session_id, ask)
        place.last_event = last_event
        return ask.reply

    # For operators -----------------------------------------------------------------------

    def place(self, session_id: str) -> Place:
        """What is known of a session without asking it. Raises NotFoundError."""
        if (place := self._places.get(session_id)) is None or place.is_empty:
            raise NotFoundError(f"session '{session_id}' not found")
        return place

    def awake(self) -> list[Place]:
        """Sessions that have an actor, the one that waits longest for an event first."""
        return list(self._awake_places.values())

    def statistics(self) -> dict[str, int]:
        """Sessions known, active, and awake."""
        known, awake = len(self._places), len(self._awake_places)
        return {"known": known, "active": self._active, "awake": awake}
