"""What a caller holds of an event that is on its way."""

from __future__ import annotations

from collections.abc import Generator

import anyio

from ramakv.client.messages import Reply, failed
from ramakv.errors import AnswerTimeoutError


class Delivery:
    """An event that is on its way, or was. Await it for the reply, or don't."""

    def __init__(self, *, answer_seconds: float, strict: bool) -> None:
        self._answer_seconds = answer_seconds
        self._strict = strict
        self._reply: Reply | None = None
        self._settled = anyio.Event()

    @property
    def reply(self) -> Reply | None:
        """The reply, as soon as there is one."""
        return self._reply

    def settle(self, reply: Reply) -> None:
        """Say what became of the event."""
        if self._reply is None:
            self._reply = reply
            self._settled.set()

    def __await__(self) -> Generator[object, None, Reply]:
        return self._wait().__await__()

    async def _wait(self) -> Reply:
        with anyio.move_on_after(self._answer_seconds):
            await self._settled.wait()
        return self.result()

    def result(self) -> Reply:
        """Return the reply as the client's owner wants it. Raises ClientError if that is so."""
        reply = self._reply or failed(
            AnswerTimeoutError(
                f"no answer within {self._answer_seconds:g} s; the event is still on its way"
            )
        )
        return reply.raise_for_error() if self._strict else reply
