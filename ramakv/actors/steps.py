"""How a session's step is carried out, and what becomes of it when that breaks half-way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from msgspec import Struct, field

from ramakv.actors.mailbox import Reply
from ramakv.actors.refcount import Owner
from ramakv.actors.surroundings import Surroundings
from ramakv.core.session import SessionState, Step
from ramakv.errors import StoreError
from ramakv.store.store import ParentsFork, SessionWrite
from ramakv.tracing import span


class _Pending(Struct, eq=False):
    """A step between its acquire and its settle."""

    step: Step
    owner: Owner
    adopt: Callable[[SessionState], None]
    committed: Reply[int] = field(default_factory=Reply)
    sent: bool = False


class Steps:
    """Carries out one session's steps, one at a time: acquire, commit, adopt, settle.

    It knows its actor while a step is under way, and not for longer: an actor that went to
    sleep would wait, map and all, for the garbage collector.
    """

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._pending: _Pending | None = None

    async def carry_out(
        self,
        before: SessionState,
        step: Step,
        owner: Owner,
        parents_fork: ParentsFork | None,
        adopt: Callable[[SessionState], None],
        *,
        is_event: bool,
    ) -> int:
        """Make a step durable and adopt its state; returns how many chunks were queued.

        Raises StoreError: then everything is what it was before.
        """
        around = self._around
        write = SessionWrite(
            before, step.next, step.outbox, step.scope, around.now_ms(), parents_fork, is_event
        )
        pending = _Pending(step, owner, adopt)
        with span("acquire"):
            await around.refcount.acquire(owner, step.acquire, step.release)
        self._pending = pending
        await around.journal.commit(write, pending.committed)
        pending.sent = True
        return await self.finish(pending)

    async def finish(self, pending: _Pending) -> int:
        """Wait for the commit of a step, and act on how it went."""
        step, refcount = pending.step, self._around.refcount
        try:
            with span("commit") as trace:
                generation = await pending.committed.wait()
                if trace is not None:
                    trace.note({"ramakv.generation": generation})
        except StoreError:
            self._pending = None
            await refcount.undo(pending.owner, step.acquire, step.release)
            raise
        pending.adopt(step.next)
        self._pending = None
        with span("settle"):
            return await refcount.settle(
                pending.owner,
                acquired=step.acquire,
                released=step.release,
                forgotten=step.forget,
                generation=generation,
                scope=step.scope,
            )

    async def recover(self) -> None:
        """Leave the counts right after a crash: finish the step that was under way, or undo it."""
        if (pending := self._pending) is None:
            return
        if pending.sent:
            with suppress(StoreError):
                await self.finish(pending)
        else:
            step = pending.step
            await self._around.refcount.undo(pending.owner, step.acquire, step.release)
