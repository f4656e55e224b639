"""The journal actor: everything that goes into the database, or comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
import trio

from ramakv.actors.mailbox import Mailbox, Reply
from ramakv.config import Store as StoreConfig
from ramakv.core.session import SessionState
from ramakv.errors import StoreBusyError, StoreError, StoreFullError, StoreReadOnlyError
from ramakv.store.store import Bookkeeping, SessionWrite, Store, Write

log = structlog.get_logger("ramakv.journal")

T = TypeVar("T")
RunSync = Callable[..., Coroutine[Any, Any, Any]]
"""Runs a synchronous function: `trio.to_thread.run_sync`, or a stand-in of its shape."""

_BOOKKEEPING_WAITS_MAX = 16
"""Failed bookkeeping writes that are merged and tried again with the next commit."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Make one step durable; the reply is the generation of its transaction."""

    write: SessionWrite
    reply: Reply[int]


@dataclass(frozen=True, slots=True)
class Load:
    """Read one session."""

    session_id: str
    reply: Reply[SessionState]


Message = Commit | Load | Bookkeeping


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
        self._unwritten: list[Bookkeeping] = []
        self._failing = False
        self.commits = 0
        self.transactions = 0

    async def commit(self, write: SessionWrite, committed: Reply[int]) -> None:
        """Hand in a step; `committed` becomes its generation, or a StoreError: nothing changed."""
        await self._mailbox.put(Commit(write, committed))

    async def load(self, session_id: str) -> SessionState:
        """Read a session. Raises StoreError."""
        reply: Reply[SessionState] = Reply()
        await self._mailbox.put(Load(session_id, reply))
        return await reply.wait()

    async def tell(self, bookkeeping: Bookkeeping) -> None:
        """Hand in what needs no answer; it is written with the next group."""
        await self._mailbox.put(bookkeeping)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve the mailbox until it is closed."""
        task_status.started()
        try:
            async for first in self._mailbox:
                group: list[Message] = [first]
                while len(group) < self._config.group_commits_max:
                    message = self._mailbox.get_nowait()
                    if message is None:
                        break
                    group.append(message)
                await self._serve(group)
            if self._unwritten:
                await self._write([])
        finally:
            # The thread cannot be interrupted: a cancelled daemon, too, closes its database.
            with trio.CancelScope(shield=True):
                await self._call(self._store.close)

    def close(self) -> None:
        """Accept no more; `run` ends when what waits is written."""
        self._mailbox.close()

    def statistics(self) -> dict[str, int]:
        """Commits made, the transactions they were grouped into, and what waits."""
        return {
            "commits": self.commits,
            "transactions": self.transactions,
            "waiting": len(self._mailbox),
        }

    async def _serve(self, group: list[Message]) -> None:
        """Write a group, then answer its loads: a load sees the commits handed in before it."""
        commits = [message for message in group if isinstance(message, Commit)]
        self._unwritten += [message for message in group if isinstance(message, Bookkeeping)]
        if commits or self._unwritten:
            await self._write(commits)
        for message in group:
            if isinstance(message, Load):
                await self._load(message)

    async def _write(self, commits: list[Commit]) -> None:
        writes: list[Write] = [commit.write for commit in commits]
        try:
            generation = await self._call(self._store.commit, [*self._unwritten, *writes])
        except StoreError as error:
            await self._write_one_by_one(commits, error)
            return
        self._wrote(len(commits))
        self._unwritten = []
        for commit in commits:
            commit.reply.set(generation)

    async def _write_one_by_one(self, commits: list[Commit], error: StoreError) -> None:
        """Find out which writes of a failed group cannot be made; the others must not suffer."""
        self._note_failure(error)
        if isinstance(error, StoreFullError | StoreBusyError | StoreReadOnlyError):
            for commit in commits:  # no write can be made now: do not try each, and wait for each
                commit.reply.fail(error)
            self._merge_unwritten()
            return
        for commit in commits:
            try:
                commit.reply.set(await self._call(self._store.commit, [commit.write]))
                self._wrote(1)
            except StoreError as own_error:
                commit.reply.fail(own_error)
        self._merge_unwritten()

    def _merge_unwritten(self) -> None:
        """Keep bookkeeping for the next group. Losing it would only repeat an evict; cap it."""
        if len(self._unwritten) > _BOOKKEEPING_WAITS_MAX:
            obsolete = [row for write in self._unwritten for row in write.obsolete]
            kept = [write for write in self._unwritten if write.dead or write.reopened]
            self._unwritten = [Bookkeeping(obsolete=obsolete), *kept[-_BOOKKEEPING_WAITS_MAX:]]

    async def _load(self, message: Load) -> None:
        try:
            message.reply.set(await self._call(self._store.load, message.session_id))
        except StoreError as error:
            message.reply.fail(error)

    async def _call(self, function: Callable[..., T], *args: object) -> T:
        # Never abandoned: a commit whose wait was cancelled is made, or is not, before we go on.
        result: T = await self._run_sync(function, *args, limiter=self._limiter)
        return result

    def _wrote(self, commits: int) -> None:
        self.transactions += 1
        self.commits += commits
        if self._failing:
            self._failing = False
            log.info("the store works again")

    def _note_failure(self, error: StoreError) -> None:
        if not self._failing:
            self._failing = True
            log.error("the store cannot commit; events are refused until it can", cause=str(error))
