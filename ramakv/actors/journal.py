"""The journal actor: everything that goes into the database, or comes out of it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import structlog
import trio
from msgspec import Struct

from ramakv.actors.mailbox import Mailbox, Reply
from ramakv.config import Store as StoreConfig
from ramakv.core.chunks import ChunkHash
from ramakv.core.evictions import Owed
from ramakv.core.session import SessionState
from ramakv.core.tallies import CommitTallies
from ramakv.errors import StoreBusyError, StoreError, StoreFullError, StoreReadOnlyError
from ramakv.store.store import Bookkeeping, SessionWrite, Store, Write
from ramakv.tracing import Releases, Trace, current, joined

log = structlog.get_logger("ramakv.journal")

T = TypeVar("T")
RunSync = Callable[..., Coroutine[Any, Any, Any]]
"""Runs a synchronous function: `trio.to_thread.run_sync`, or a stand-in of its shape."""

_BOOKS_SECONDS = 1.0
_BOOKS_ROWS_MAX = 2000
"""How long, and how much, bookkeeping waits for a commit to go with."""
_BOOKS_ROWS_KEPT = 200_000
_PROOF_SECONDS = 5.0
"""So long a commit that was made proves that others can be."""
_BOOKS_OTHERS_KEPT = 1000


class Commit(Struct, frozen=True):
    """Make one step durable; the reply is the generation of its transaction."""

    write: SessionWrite
    reply: Reply[int]
    trace: Trace | None = None


class Load(Struct, frozen=True):
    """Read one session."""

    session_id: str
    reply: Reply[SessionState]


class Probe(Struct, frozen=True):
    """Show that a commit can be made; the reply is a StoreError where it cannot."""

    reply: Reply[None]


class Revive(Struct, frozen=True):
    """Let the dead letters be owed again; the reply says which there were."""

    reply: Reply[list[tuple[ChunkHash, Owed]]]


Message = Commit | Load | Probe | Revive | Bookkeeping


class Journal:
    """Writes in groups: all commits that wait go into one transaction, with one fsync.

    **Owns** the SQLite connection. **Receives** commits, loads, bookkeeping.
    **Sends to** nobody; it sets the replies it was given.
    **Stops when** its mailbox is closed and empty; then the database is closed.
    """

    def __init__(
        self,
        store: Store,
        config: StoreConfig,
        run_sync: RunSync = trio.to_thread.run_sync,
    ) -> None:
        self._store = store
        self._config = config
        self._run_sync = run_sync
        self._limiter = trio.CapacityLimiter(1)
        self._mailbox: Mailbox[Message] = Mailbox(
            config.mailbox_commits_max, "the store is behind with its commits; try again"
        )
        self._books = _Books()
        self._failing = False
        self._worked_at = -math.inf
        self._dead_letters_dropped = 0
        self.commits = 0
        self.transactions = 0
        self.tallies = CommitTallies()
        self.releases = Releases()

    async def commit(self, write: SessionWrite, committed: Reply[int]) -> None:
        """Hand in a step; `committed` becomes its generation, or a StoreError: nothing changed."""
        await self._mailbox.put(Commit(write, committed, current()))

    async def load(self, session_id: str) -> SessionState:
        """Read a session. Raises StoreError."""
        reply: Reply[SessionState] = Reply()
        await self._mailbox.put(Load(session_id, reply))
        return await reply.wait()

    async def probe(self) -> None:
        """Return if the store can commit: it did moments ago, or does now. Raises StoreError."""
        reply: Reply[None] = Reply()
        await self._mailbox.put(Probe(reply))
        await reply.wait()

    async def revive(self) -> list[tuple[ChunkHash, Owed]]:
        """Let the dead letters be owed again, on disk; returns them. Raises StoreError."""
        reply: Reply[list[tuple[ChunkHash, Owed]]] = Reply()
        await self._mailbox.put(Revive(reply))
        return await reply.wait()

    async def tell(self, bookkeeping: Bookkeeping) -> None:
        """Hand in what needs no answer; it is written with a commit, or a second later."""
        await self._mailbox.put(bookkeeping)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve the mailbox until it is closed."""
        task_status.started()
        try:
            while True:
                group: list[Message] = []
                with trio.move_on_at(self._books.due):
                    if (first := await self._mailbox.get()) is None:
                        break
                    group.append(first)
                while 0 < len(group) < self._config.group_commits_max:
                    if (message := self._mailbox.get_nowait()) is None:
                        break
                    group.append(message)
                await self._serve(group)
            if self._books:
                await self._write([])
        finally:
            # The thread cannot be interrupted: a cancelled daemon, too, closes its database.
            with trio.CancelScope(shield=True):
                await self._call(self._store.close)

    def close(self) -> None:
        """Accept no more; `run` ends when what waits is written."""
        self._mailbox.close()

    def statistics(self) -> dict[str, int]:
        """Commits, and the transactions they were grouped into; what waits; what was dropped."""
        return {
            "commits": self.commits,
            "transactions": self.transactions,
            "waiting": len(self._mailbox),
            "dead_letters": self._store.dead_letters,
            "dead_letters_dropped": self._store.dead_letters_dropped,
        }

    async def _serve(self, group: list[Message]) -> None:
        """Write a group, then answer its loads: a load sees the commits handed in before it."""
        now = trio.current_time()
        commits = []
        for message in group:
            if isinstance(message, Commit):
                commits.append(message)
            elif isinstance(message, Bookkeeping):
                self._books.add(message, now)
        if commits or self._books.due <= now:
            await self._write(commits)
        if loads := [message for message in group if isinstance(message, Load)]:
            await self._load(loads)
        if probes := [message for message in group if isinstance(message, Probe)]:
            await self._probe(probes)
        for revive in (message for message in group if isinstance(message, Revive)):
            try:
                revive.reply.set(await self._call(self._store.revive))
            except StoreError as error:
                self._note_failure(error)
                revive.reply.fail(error)

    async def _write(self, commits: list[Commit]) -> None:
        writes: list[Write] = [*self._books.writes(), *(commit.write for commit in commits)]
        began = trio.current_time()
        try:
            with joined((commit.trace for commit in commits), "transaction") as trace:
                generation = await self._call(self._store.commit, writes)
                if trace is not None:
                    self._note(trace, generation, commits)
        except StoreError as error:
            await self._write_one_by_one(commits, error)
            self._books.postpone(trio.current_time())
            return
        self._wrote(len(commits), trio.current_time() - began)
        self._books = _Books()
        for commit in commits:
            commit.reply.set(generation)

    def _note(self, trace: Trace, generation: int, commits: Sequence[Commit]) -> None:
        trace.note({"ramakv.generation": generation, "ramakv.commits": len(commits)})
        released = [
            commit.trace for commit in commits if commit.trace is not None and commit.write.outbox
        ]
        self.releases.add(generation, released)

    async def _write_one_by_one(self, commits: list[Commit], error: StoreError) -> None:
        """Find out which writes of a failed group cannot be made; the others must not suffer."""
        self._note_failure(error)
        self.tallies.failed += 1
        if isinstance(error, StoreFullError | StoreBusyError | StoreReadOnlyError):
            for commit in commits:  # no write can be made now: do not try each, and wait for each
                commit.reply.fail(error)
            return
        for commit in commits:
            began = trio.current_time()
            try:
                commit.reply.set(await self._call(self._store.commit, [commit.write]))
                self._wrote(1, trio.current_time() - began)
            except StoreError as own_error:
                self.tallies.failed += 1
                commit.reply.fail(own_error)

    async def _load(self, loads: list[Load]) -> None:
        session_ids = [load.session_id for load in loads]
        found = await self._call(self._store.load_each, session_ids)
        for load, state in zip(loads, found, strict=True):
            if isinstance(state, StoreError):
                load.reply.fail(state)
            else:
                load.reply.set(state)

    async def _probe(self, probes: list[Probe]) -> None:
        failure: StoreError | None = None
        if trio.current_time() - self._worked_at > _PROOF_SECONDS:
            try:
                await self._call(self._store.touch)
                self._works()
            except StoreError as error:
                self._note_failure(error)
                failure = error
        for probe in probes:
            if failure is None:
                probe.reply.set(None)
            else:
                probe.reply.fail(failure)

    async def _call(self, function: Callable[..., T], *args: object) -> T:
        # Never abandoned: a commit whose wait was cancelled is made, or is not, before we go on.
        result: T = await self._run_sync(function, *args, limiter=self._limiter)
        return result

    def _wrote(self, commits: int, seconds: float) -> None:
        self.transactions += 1
        self.commits += commits
        self.tallies.sizes.observe(commits)
        self.tallies.seconds.observe(seconds)
        self._works()
        if (dropped := self._store.dead_letters_dropped) != self._dead_letters_dropped:
            log.warning(
                "there were too many dead letters; the oldest were dropped",
                dropped=dropped - self._dead_letters_dropped,
                advice="LMCache keeps their chunks; see eviction.dead_letters_max",
            )
            self._dead_letters_dropped = dropped

    def _works(self) -> None:
        self._worked_at = trio.current_time()
        if self._failing:
            self._failing = False
            log.info("the store works again")

    def _note_failure(self, error: StoreError) -> None:
        self._worked_at = -math.inf
        if not self._failing:
            self._failing = True
            log.error("the store cannot commit; events are refused until it can", cause=str(error))


class _Books:
    """Bookkeeping that waits for a commit to go with, merged.

    Nobody waits for it, and an fsync of its own would be a waste; but it is due in the end.
    What does not fit is dropped: it is the oldest, and costs no more than an evict repeated
    after the next start.
    """

    def __init__(self) -> None:
        self.due = math.inf
        self._not_before = -math.inf
        self._obsolete: dict[ChunkHash, int] = {}
        self._others: deque[Bookkeeping] = deque(maxlen=_BOOKS_OTHERS_KEPT)

    def __bool__(self) -> bool:
        return bool(self._obsolete or self._others)

    def add(self, books: Bookkeeping, now: float) -> None:
        """Take books in; those that are more than obsolete rows are due at once."""
        for chunk, generation in books.obsolete:
            self._obsolete[chunk] = max(generation, self._obsolete.get(chunk, generation))
        while len(self._obsolete) > _BOOKS_ROWS_KEPT:
            del self._obsolete[next(iter(self._obsolete))]
        more = books.dead or books.reopened or books.forget_closed_before_ms is not None
        if more:
            self._others.append(replace(books, obsolete=()))
        if more or len(self._obsolete) >= _BOOKS_ROWS_MAX:
            self.due = min(self.due, max(now, self._not_before))
        self.due = min(self.due, max(now + _BOOKS_SECONDS, self._not_before))

    def writes(self) -> list[Bookkeeping]:
        """What is to be written."""
        return [Bookkeeping(obsolete=list(self._obsolete.items())), *self._others] if self else []

    def postpone(self, now: float) -> None:
        """Try again a while after a failure."""
        self._not_before = now + _BOOKS_SECONDS
        self.due = self._not_before if self else math.inf
