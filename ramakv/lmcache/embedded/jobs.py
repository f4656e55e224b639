"""What the disk's lane is given to do, and how its callers wait for that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import trio

from ramakv.errors import BackendUnavailableError
from ramakv.lmcache.embedded.files import Changed

STOPPING = "the embedded engine is stopping"

T = TypeVar("T")


@dataclass(eq=False)
class Job(Generic[T]):
    """One thing for the lane to do: each of `hops` in the thread, then `adopt` its outcome."""

    hops: Sequence[Callable[[], T]]
    adopt: Callable[[T], None]
    chunks: int
    done: trio.Event = field(default_factory=trio.Event)
    outcomes: list[T] = field(default_factory=list)

    async def wait(self) -> list[T]:
        """Return the outcome of each hop. Raises BackendUnavailableError when it was not done."""
        await self.done.wait()
        if len(self.outcomes) < len(self.hops):
            raise BackendUnavailableError(STOPPING)
        return self.outcomes


class Change(NamedTuple):
    """A change of the index that was made; `wait` for its files if need be."""

    chunks: int
    job: Job[Changed] | None

    async def wait(self) -> int:
        """Return how many chunks were changed, when their files are as the index says.

        Raises BackendUnavailableError when the tier stopped before that.
        """
        if self.job is None:
            return self.chunks
        return self.chunks - sum(len(outcome.failed) for outcome in await self.job.wait())
