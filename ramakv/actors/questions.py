"""Questions that operators have for LMCache: where do these chunks lie."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from ramakv.actors.mailbox import Reply
from ramakv.core.chunks import ChunkHash, ChunkMap
from ramakv.errors import BackendError, BackendUnavailableError
from ramakv.lmcache.backend import KVBackend

WAIT_SECONDS_MAX = 2.0
_WAITING_MAX = 4

Places = dict[ChunkHash, list[str]] | None
"""The locations of each chunk; None where this LMCache cannot tell."""


@dataclass(slots=True, eq=False)
class Question:
    """One question that waits for its turn."""

    chunks: ChunkMap
    deadline: float
    answer: Reply[Places]


class Questions:
    """Lets questions wait until there is nothing better to send, and not for long.

    Owned by the backend actor, whose workers put them. How they end says nothing of LMCache:
    they neither open the breaker nor close it.
    """

    def __init__(self, client: KVBackend) -> None:
        self._client = client
        self._waiting: deque[Question] = deque()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def add(self, chunks: ChunkMap, now: float) -> Reply[Places]:
        """Let a question wait. The reply is a BackendError where it was not answered."""
        question = Question(chunks, now + WAIT_SECONDS_MAX, Reply())
        if len(self._waiting) >= _WAITING_MAX:
            question.answer.fail(BackendUnavailableError("too many ask LMCache; try again"))
        else:
            self._waiting.append(question)
        return question.answer

    def refuse(self, why: str) -> None:
        """Answer those that wait: nobody will put them."""
        while self._waiting:
            self._waiting.popleft().answer.fail(BackendUnavailableError(why))

    def drop_late(self, now: float) -> None:
        """Give up those that waited too long."""
        while self._waiting and self._waiting[0].deadline <= now:
            late = self._waiting.popleft()
            late.answer.fail(BackendUnavailableError("LMCache has more important things to do"))

    @property
    def next_deadline(self) -> float:
        """When the first of them is given up."""
        return self._waiting[0].deadline if self._waiting else math.inf

    def take(self) -> Question | None:
        """Take the one that waits longest."""
        return self._waiting.popleft() if self._waiting else None

    async def put(self, question: Question) -> None:
        """Ask LMCache."""
        try:
            question.answer.set(await self._client.query(question.chunks))
        except BackendError as error:
            question.answer.fail(error)
