"""Sessions, turns and forks as an agent's code sees them.

Nothing in here waits: each call puts an event into the client's queue and returns its delivery. So
the same classes serve both clients, in `with` and in `async with`; `D` is the client's kind of
delivery.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

from ramakv.client.messages import Message, Reply
from ramakv.errors import EventSkippedError

TURN_START_SECONDS = 2.0
"""A turn_start that could not be sent for so long comes too late for its turn."""

OnExit = Literal["close", "suspend", "keep"]


class HasReply(Protocol):
    """What a session needs of a delivery."""

    @property
    def reply(self) -> Reply | None:
        """The reply, as soon as there is one."""


D = TypeVar("D", bound=HasReply)
Post = Callable[[Message], D]


class _Scope:
    """Something with an end, in `with` as in `async with`: ending it never waits."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, traceback)

    def _leave(self) -> None:
        """Do what is due at the end."""


class Session(_Scope, Generic[D]):
    """One session, for the events about it. Leaving its `with` block ends it as `on_exit` says."""

    def __init__(self, post: Post[D], session_id: str, on_exit: OnExit) -> None:
        self.session_id = session_id
        self._post = post
        self._on_exit = on_exit
        self._is_begun = False

    def turn(self, lookup_id: str | None = None) -> Turn[D]:
        """Start a turn, to be used as a context manager; its turn_start is on its way at once."""
        return Turn(self, self.turn_start(lookup_id))

    def turn_start(self, lookup_id: str | None = None) -> D:
        """Say that inference is about to begin: ramakv prefetches the session's chunks."""
        # The first one also brings back a session that was closed a moment ago: it is never late.
        fresh = TURN_START_SECONDS if self._is_begun else None
        self._is_begun = True
        return self._send("turn_start", fresh_seconds=fresh, lookup_id=lookup_id)

    def turn_end(
        self,
        chunk_hashes: Iterable[str] | None,
        *,
        finish_reason: str | None = None,
        debug_context: dict[str, Any] | None = None,
    ) -> D:
        """Say which chunks the context now consists of, as the engine reported them.

        `None`, which some engines report, is no such list: nothing is sent, and the delivery is
        settled with an error.
        """
        is_list = isinstance(chunk_hashes, Iterable) and not isinstance(chunk_hashes, str | bytes)
        hashes = list(chunk_hashes) if is_list and chunk_hashes is not None else chunk_hashes
        self._is_begun = True
        return self._send(
            "turn_end",
            kv_transfer_params={"chunk_hashes": hashes},
            finish_reason=finish_reason,
            debug_context=debug_context,
        )

    def suspend(self) -> D:
        """Begin a pause: the chunks leave the hot tier, the map stays."""
        return self._send("session_suspend")

    def restore(self, source_session_id: str | None = None) -> D:
        """End a pause, or take over another session's map; the chunks are prefetched."""
        self._is_begun = True
        others = () if source_session_id is None else (source_session_id,)
        return self._send("snapshot_restore", others, source_session_id=source_session_id)

    def map(self) -> D:
        """Ask which chunks the session references now."""
        return self._send("session_map")

    def fork(self, child_session_id: str | None = None) -> Fork[D]:
        """Hold the present chunks for a child that starts from them, until the fork ends."""
        others = () if child_session_id is None else (child_session_id,)
        return Fork(self, self._send("session_fork", others, child_session_id=child_session_id))

    def close(self) -> D:
        """End the session for good."""
        self._is_begun = False
        return self._send("session_close")

    def _send(
        self,
        type_: str,
        others: tuple[str, ...] = (),
        *,
        fresh_seconds: float | None = None,
        complete: Callable[[], dict[str, Any]] | None = None,
        **optional: Any,
    ) -> D:
        fields = {name: value for name, value in optional.items() if value is not None}
        sessions = tuple(filter(lambda each: isinstance(each, str), (self.session_id, *others)))
        return self._post(
            Message(
                type_,
                {"session_id": self.session_id, **fields},
                sessions,
                fresh_seconds=fresh_seconds,
                complete=complete,
            )
        )

    def _leave(self) -> None:
        if self._on_exit == "close":
            self.close()
        elif self._on_exit == "suspend":
            self.suspend()


class Turn(_Scope, Generic[D]):
    """One inference. `end` says what came of it; a turn without it leaves the session as it was."""

    def __init__(self, session: Session[D], started: D) -> None:
        self.session = session
        self.started = started
        """The delivery of the turn_start."""
        self.ended: D | None = None
        """The delivery of the turn_end, once there is one."""

    def end(
        self,
        chunk_hashes: Iterable[str] | None,
        *,
        finish_reason: str | None = None,
        debug_context: dict[str, Any] | None = None,
    ) -> D:
        """Send the turn_end; see `Session.turn_end`."""
        self.ended = self.session.turn_end(
            chunk_hashes, finish_reason=finish_reason, debug_context=debug_context
        )
        return self.ended


class Fork(_Scope, Generic[D]):
    """A hold on the chunks that the session had when it was forked, until it ends."""

    def __init__(self, session: Session[D], started: D) -> None:
        self.session = session
        self.started = started
        """The delivery of the session_fork."""
        self.ended: D | None = None
        """The delivery of the session_fork_end, once there is one."""

    def end(self) -> D:
        """Release exactly what the fork holds; at most once, however often it is called."""
        if self.ended is None:
            self.ended = self.session._send("session_fork_end", complete=self._named)
        return self.ended

    def _named(self) -> dict[str, Any]:
        """Tell the fork's number: its session's events go in order, so its reply is there."""
        reply = self.started.reply
        if reply is None or not reply.ok:
            raise EventSkippedError("there is no fork to end, for it was not made")
        fork_id = reply.data.get("fork_id")  # the Rust daemon does not number them
        return {} if fork_id is None else {"fork_id": fork_id}

    def _leave(self) -> None:
        self.end()
