"""Watches a daemon from all sides, and says what must not have been: the invariants as code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import trio

from ramakv import codec, events
from ramakv.config import HOT_LOCATION, Config
from ramakv.errors import InternalError, RamakvError
from ramakv.service import Service
from ramakv.store.store import SessionWrite
from tests.simulation.disk import Disk
from tests.simulation.engine import CallBody, SimulatedLMCache
from tests.simulation.files import looking_at
from tests.simulation.history import Event
from tests.simulation.model import Change, Model, read_rows
from tests.simulation.points import FaultPoints

AT_ONCE = 1e-6
"""Virtual seconds that nothing but rounding takes."""
_SETTLE_SECONDS = 60.0
_WAITS_FOR_LMCACHE = (events.TurnStart, events.SnapshotRestore)


@dataclass
class Judge:
    """The invariants. Numbers are those of docs/reliability.md."""

    config: Config
    disk: Disk
    points: FaultPoints

    def __post_init__(self) -> None:
        sessions = self.config.sessions
        self.model = Model(
            sessions.keep_pinned_on_close,
            sessions.closed_memory_seconds,
            lambda otherwise: self.expect(False, otherwise),
        )
        self.path = self.config.store_path
        self.engine: SimulatedLMCache
        self.in_turn: set[str] = set()
        """Sessions whose turn is open, as far as this process of the daemon was told."""
        self.demotions = 0
        self.story: list[str] = []
        self.violations: list[str] = []

    def tell(self, what: str) -> None:
        """Add a line to the story, for whoever looks into a violation."""
        self.story.append(f"{trio.current_time():10.4f}  {what}")

    def expect(self, holds: bool, otherwise: str) -> None:
        """Note a violation, unless it holds."""
        if not holds:
            self.violations.append(f"{otherwise} (at {trio.current_time():g} s)")
            self.tell(f"VIOLATION: {otherwise}")

    # While it runs -----------------------------------------------------------------------

    def committed(self, writes: Sequence[SessionWrite]) -> None:
        """3 and 7: each change is one that an event may make, in the order of its session."""
        for write in writes:
            self.tell(f"durable: {write.after}, outbox {write.outbox}")
        changes = [_change(write) for write in writes]
        self.model.committed(changes, read_rows(self.path), trio.current_time())
        for write in writes:  # the engine computed the turn, and keeps its chunks
            self.engine.store(set(write.after.references))

    def departs(self, kind: str, call: CallBody) -> None:
        """1 and 2: nothing that is referenced is evicted, nor before its release is durable."""
        self.tell(f"{kind} leaves: {call}")
        self.expect(bool(call.chunk_hashes), f"an empty {kind} left")
        self.expect(
            len(set(call.chunk_hashes)) == len(call.chunk_hashes), f"a {kind} names a chunk twice"
        )
        if kind != "evict":
            return
        owners, owed = self.model.owners(), self._outbox()
        if self._is_demotion(call, owners):
            return
        for chunk in call.chunk_hashes:
            held_by = owners.get(chunk)
            self.expect(not held_by, f"an evict of {chunk} left, which {held_by} reference")
            # Two suspended sessions may close at once: then it is evicted twice, to no harm.
            is_gone = chunk not in self.engine.hot
            self.expect(
                is_gone or owed.get(chunk) is False, f"an evict of {chunk} left that is not owed"
            )

    def _is_demotion(self, call: CallBody, owners: Mapping[str, set[str]]) -> bool:
        """Whether residency makes room: from the hot tier alone, of one session that pauses."""
        held_by = {owner for chunk in call.chunk_hashes for owner in owners.get(chunk, ())}
        if not held_by or self.config.residency.policy == "off":
            return False
        self.demotions += 1
        self.expect(call.locations == [HOT_LOCATION], f"a demotion from {call.locations} left")
        self.expect(len(held_by) == 1, f"a demotion left of what {held_by} reference")
        self.expect(held_by.isdisjoint(self.in_turn), f"a demotion of {held_by} left in a turn")
        return True

    def answered(self, event: events.Event, ticket: Any, answer: Any, began: float) -> None:
        """2, 3 and 7: an answer is true, and nobody waits for LMCache or for other sessions."""
        self.points.reach("reply.before")
        if not self.disk.is_dead:
            data = None if answer is None else msgspec.json.decode(codec.encode(answer))
            self.model.answered(ticket, data)
            if not self.disk.was_slow_since(began):
                may_take = AT_ONCE
                if isinstance(event, _WAITS_FOR_LMCACHE):
                    may_take += self.config.backend.prefetch_ack_seconds
                took = trio.current_time() - began
                self.expect(took <= may_take, f"{event} took {took:g} s")
        self.points.reach("reply.after")

    # At rest -----------------------------------------------------------------------------

    def started(self, service: Service) -> None:
        """5: a restart is a no-op, but for a commit that was under way and nobody heard of."""
        self.in_turn.clear()
        rows = read_rows(self.path)
        if rows != self.model.rows and self.disk.unsure:
            changes = [_change(write) for write in self.disk.unsure]
            self.model.committed(changes, rows, trio.current_time())
        self.model.abandon_all()
        self.expect(rows == self.model.rows, f"after a start: {rows}, before: {self.model.rows}")
        if problem := self._difference(service):
            self.expect(False, f"after a start {problem}")

    async def settled(self, service: Service) -> None:
        """3: what is in memory is what is on disk, once nothing is under way."""
        with trio.move_on_after(_SETTLE_SECONDS):
            while self._difference(service):  # noqa: ASYNC110 - commits under way tell nobody
                await trio.sleep(0.05)
        if problem := self._difference(service):
            self.expect(False, f"at rest {problem}")

    def nothing_leaked(self) -> None:
        """4: what nobody references is gone, or a dead letter."""
        outbox = self._outbox()
        dead = {chunk for chunk, is_dead in outbox.items() if is_dead}
        owed = sorted(outbox.keys() - dead)
        self.expect(not owed, f"evicts of {owed} are owed still")
        left = self.engine.hot & self.model.once_owned
        leaked = sorted(left - self.model.owners().keys() - dead - self.engine.came_late)
        self.expect(not leaked, f"{leaked} were never evicted")
        self.expect(dead <= self.engine.were_bad, f"{dead} are dead letters without a reason")

    def _difference(self, service: Service) -> str:
        owned = {chunk: len(owners) for chunk, owners in self.model.owners().items()}
        if (counts := service.refcount.counts()) != owned:
            return f"the counts are {counts} in memory, and {owned} on disk"
        active = sum(row.status == "active" for row in self.model.rows.values())
        if service.router.active_sessions != active:
            return f"{service.router.active_sessions} sessions are active, {active} on disk"
        return ""

    def _outbox(self) -> dict[str, bool]:
        """Chunks in the outbox, and whether each is a dead letter."""
        with looking_at(self.path) as database:
            rows = database.execute("SELECT chunk_hash, dead_reason IS NOT NULL FROM outbox")
            return {chunk: bool(is_dead) for chunk, is_dead in rows.fetchall()}


@dataclass
class ObservedService:
    """The service as the edge has it, with a judge who sees each event come and go."""

    service: Service
    judge: Judge

    async def handle(self, event: events.Event) -> events.Data:
        """Hand an event on. One whose agent hangs up is never judged, but may be carried out."""
        if not isinstance(event, events.SessionEvent):
            return await self.service.handle(event)
        ticket = self.judge.model.arrives(plain := _plain(event))
        self.judge.in_turn.discard(event.session_id)
        self.judge.tell(f"arrives: {plain}")
        began = trio.current_time()
        try:
            answer = await self.service.handle(event)
        except RamakvError as error:
            self.judge.tell(f"refused: {plain}: {error}")
            inside = isinstance(error, InternalError)
            self.judge.expect(not inside, f"{event} failed inside: {error}")
            self.judge.answered(event, ticket, None, began)
            raise
        except trio.Cancelled:
            self.judge.model.abandoned(ticket)
            raise
        self.judge.tell(f"answered: {plain}: {answer}")
        if isinstance(event, events.TurnStart):
            self.judge.in_turn.add(event.session_id)
        self.judge.answered(event, ticket, answer, began)
        return answer


def _change(write: SessionWrite) -> Change:
    session, forked = int(write.after.session_id[1:]), write.parents_fork
    if forked is None:
        return Change(session)
    return Change(session, int(forked.session_id[1:]), forked.fork.fork_id)


def _plain(event: events.SessionEvent) -> Event:
    """Turn an event back into what the history says of it."""
    other = getattr(event, "child_session_id", None) or getattr(event, "source_session_id", None)
    hashes = event.kv_transfer_params.chunk_hashes if isinstance(event, events.TurnEnd) else []
    return Event(
        str(type(event).__struct_config__.tag),
        int(event.session_id[1:]),
        chunks=tuple(int(chunk[1:]) for chunk in hashes),
        seq=getattr(event, "seq", None),
        other=int(other[1:]) if other else None,
        fork=getattr(event, "fork_id", None),
    )
