"""The backend actor's last lane: what residency wants of LMCache, when nobody else wants it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain

from ramakv.core.chunks import ChunkHash, ChunkMap
from ramakv.core.orders import Action

ERRANDS_MAX = 64
"""Errands that wait at most: more are not worth waiting for."""

ERRAND_SECONDS = 5.0
"""How long an errand is worth anything."""


@dataclass(slots=True, eq=False)
class Errand:
    """One call that residency wants."""

    action: Action
    parts: Mapping[str, ChunkMap]
    """The chunks of each session that it is for, distinct and in the map's order."""
    stands: Callable[[str], bool]
    """Whether what was decided about a session still holds: it has no turn, and had none."""
    deadline: float
    done: Callable[[bool], None]
    """Is told, once, whether LMCache accepted it."""

    def chunks(self, references: Callable[[ChunkHash], int]) -> ChunkMap:
        """The chunks that the call is to name now; none if it is not to be made any more.

        Nothing is demoted that more than the one session references: another may be in a turn.
        """
        parts = [part for session_id, part in self.parts.items() if self.stands(session_id)]
        chunks = parts[0] if len(parts) == 1 else tuple(dict.fromkeys(chain.from_iterable(parts)))
        if self.action is Action.DEMOTE:
            return tuple(chunk for chunk in chunks if references(chunk) == 1)
        return chunks


class Errands:
    """Errands that wait, the first come first. All of it is synchronous."""

    def __init__(self) -> None:
        self._waiting: deque[Errand] = deque()
        self.is_busy = False
        """Whether one is under way: the next one waits, so that all need one connection."""

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def add(self, errand: Errand) -> None:
        """Let one wait, or refuse it: where many wait, it would come too late."""
        if len(self._waiting) >= ERRANDS_MAX:
            errand.done(False)
        else:
            self._waiting.append(errand)

    def take(
        self, now: float, references: Callable[[ChunkHash], int]
    ) -> tuple[Errand, ChunkMap] | None:
        """Take the first that is worth a call, with the chunks it is for; drop those before it."""
        while self._waiting and not self.is_busy:
            errand = self._waiting.popleft()
            if errand.deadline > now and (chunks := errand.chunks(references)):
                self.is_busy = True
                return errand, chunks
            errand.done(False)
        return None

    def refuse(self) -> None:
        """Give all of them up."""
        while self._waiting:
            self._waiting.popleft().done(False)
