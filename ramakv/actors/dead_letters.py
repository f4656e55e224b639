"""Dead letters, tried again: an operator asks for it, when LMCache was mended."""

from __future__ import annotations

import structlog
import trio

from ramakv.actors.journal import Journal
from ramakv.actors.mailbox import Mailbox, Reply
from ramakv.actors.refcount import RefcountActor
from ramakv.errors import RamakvError

log = structlog.get_logger("ramakv.dead_letters")

_WAITING_MAX = 4


class DeadLetters:
    """Lets dead letters be owed again: first on disk, then in the queue.

    Whoever asked may go away in between; a crash in between is made good by the next start,
    which queues what is owed.

    **Owns** nothing. **Receives** requests of operators. **Sends to** journal and refcount.
    **Stops when** its mailbox is closed and empty.
    """

    def __init__(self, journal: Journal, refcount: RefcountActor) -> None:
        self._journal = journal
        self._refcount = refcount
        self._mailbox: Mailbox[Reply[int]] = Mailbox(
            _WAITING_MAX, "dead letters are being tried again already"
        )

    async def retry(self) -> int:
        """Have all dead letters tried again; returns how many wait now. Raises StoreError."""
        reply: Reply[int] = Reply()
        self._mailbox.put_nowait(reply)
        return await reply.wait()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve the mailbox until it is closed."""
        task_status.started()
        async for reply in self._mailbox:
            try:
                revived = await self._journal.revive()
                queued = await self._refcount.revive(revived)
            except RamakvError as error:
                reply.fail(error)
                continue
            log.info("dead letters are tried again", chunks=len(revived), queued=queued)
            reply.set(queued)

    def close(self) -> None:
        """Accept no more."""
        self._mailbox.close()
