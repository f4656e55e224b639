"""Group commit: many steps, one transaction; and one bad step does not take others along."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from ramakv.actors.journal import Journal
from ramakv.actors.mailbox import Reply
from ramakv.config import Store as StoreConfig
from ramakv.core import session as rules
from ramakv.core.session import SessionState
from ramakv.errors import StoreError, StoreFullError
from ramakv.store.database import Database, map_error
from ramakv.store.store import Bookkeeping, SessionWrite, Store, Write
from tests.fakes import run_inline


class FaultyStore(Store):
    """Fails as told, before anything is written."""

    full = False
    bad_session: str | None = None

    def commit(self, writes: Sequence[Write]) -> int:
        if self.full:
            raise StoreFullError("no space left")
        for write in writes:
            if isinstance(write, SessionWrite) and write.after.session_id == self.bad_session:
                raise map_error(sqlite3.IntegrityError("made up"), self.path)
        return super().commit(writes)


@asynccontextmanager
async def running_journal(
    folder: Path, dead_letters_max: int = 10_000
) -> AsyncIterator[tuple[Journal, FaultyStore]]:
    database = Database.open(folder / "sessions.db")
    store = FaultyStore(database, dead_letters_max=dead_letters_max)
    journal = Journal(store, StoreConfig(), run_inline)
    async with trio.open_nursery() as nursery:
        await nursery.start(journal.run)
        yield journal, store
        journal.close()


def step(session_id: str, *hashes: str) -> SessionWrite:
    new = SessionState(session_id)
    done = rules.turn_end(new, hashes, None)
    return SessionWrite(new, done.next, done.outbox, done.scope, 0)


async def hand_in(journal: Journal, *writes: SessionWrite) -> list[Reply[int]]:
    replies: list[Reply[int]] = [Reply() for _ in writes]
    for write, reply in zip(writes, replies, strict=True):
        await journal.commit(write, reply)
    await wait_all_tasks_blocked()
    return replies


async def test_steps_that_wait_share_one_transaction(tmp_path: Path) -> None:
    async with running_journal(tmp_path) as (journal, _):
        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(journal.commit, step(f"{number}", "a"), Reply())
        assert (await journal.load("99")).chunk_map == ("a",)
        assert journal.statistics()["commits"] == 100
        assert journal.statistics()["transactions"] <= 3


async def test_a_load_sees_what_was_handed_in_before_it(tmp_path: Path) -> None:
    async with running_journal(tmp_path) as (journal, _):
        await journal.commit(step("s", "a"), Reply())
        assert (await journal.load("s")).chunk_map == ("a",)


async def test_one_bad_step_fails_alone(tmp_path: Path) -> None:
    async with running_journal(tmp_path) as (journal, store):
        store.bad_session = "bad"
        replies = await hand_in(journal, step("x", "a"), step("bad", "b"), step("y", "c"))
        with pytest.raises(StoreError, match="made up"):
            replies[1].result()
        assert replies[0].result() < replies[2].result()
        assert (await journal.load("y")).chunk_map == ("c",)


async def test_a_full_disk_fails_what_waits_and_ends_with_it(tmp_path: Path) -> None:
    async with running_journal(tmp_path) as (journal, store):
        store.full = True
        for reply in await hand_in(journal, step("x", "a"), step("y", "b")):
            with pytest.raises(StoreFullError):
                reply.result()
        store.full = False
        (reply,) = await hand_in(journal, step("x", "a"))
        assert reply.result() > 0


async def test_bookkeeping_that_could_not_be_written_is_written_later(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with running_journal(tmp_path) as (journal, store):
        active = SessionState("s", rules.Status.ACTIVE, ("a",))
        release = rules.turn_end(active, (), None)
        write = SessionWrite(active, release.next, release.outbox, release.scope, 0)
        (reply,) = await hand_in(journal, write)
        store.full = True
        for _ in range(5):
            await journal.tell(Bookkeeping(obsolete=[("a", reply.result())]))
            await trio.sleep(2)
        store.full = False
        await hand_in(journal, step("t", "b"))
        assert store.recovery().outbox() == ([], [])


async def test_bookkeeping_waits_for_a_commit_but_not_for_ever(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with running_journal(tmp_path) as (journal, _):
        await journal.tell(Bookkeeping(obsolete=[("a", 1)]))
        await wait_all_tasks_blocked()
        assert journal.statistics()["transactions"] == 0
        await hand_in(journal, step("s", "b"))
        assert journal.statistics()["transactions"] == 1
        await journal.tell(Bookkeeping(obsolete=[("a", 1)]))
        await trio.sleep(2)
        assert journal.statistics()["transactions"] == 2
        await journal.tell(Bookkeeping(dead=[("a", 1)], dead_reason="refused"))
        await wait_all_tasks_blocked()
        assert journal.statistics()["transactions"] == 3
        await trio.sleep(100)
        assert journal.statistics()["transactions"] == 3


async def test_much_bookkeeping_does_not_wait_for_long(tmp_path: Path) -> None:
    async with running_journal(tmp_path) as (journal, _):
        for part in range(10):
            rows = [(f"{part} {number}", 1) for number in range(512)]
            await journal.tell(Bookkeeping(obsolete=rows))
        await wait_all_tasks_blocked()
        assert journal.statistics()["transactions"] >= 1


async def test_dropped_dead_letters_are_counted(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with running_journal(tmp_path, dead_letters_max=10) as (journal, _):
        for number in range(12):
            active = SessionState("s", rules.Status.ACTIVE, (f"c{number}",))
            release = rules.turn_end(active, (), None)
            write = SessionWrite(active, release.next, release.outbox, release.scope, 0)
            (reply,) = await hand_in(journal, write)
            rows = [(f"c{number}", reply.result())]
            await journal.tell(Bookkeeping(dead=rows, dead_reason="refused"))
            await wait_all_tasks_blocked()
        assert journal.statistics()["dead_letters_dropped"] == 2


async def test_closing_writes_what_waits(tmp_path: Path) -> None:
    reply: Reply[int] = Reply()
    async with running_journal(tmp_path) as (journal, _):
        await journal.commit(step("s", "a"), reply)
    assert reply.result() > 0
    store = Store(Database.open(tmp_path / "sessions.db"))
    assert store.load("s").chunk_map == ("a",)
    store.close()
