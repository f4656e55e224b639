"""Every error that ramakv raises on purpose, in one tree.

    RamakvError
    ├── ConfigError               the configuration cannot be used; the process exits with 2
    ├── EventError                an event was refused; `status` is its HTTP status
    │   ├── BadRequestError       400  not what the contract asks for
    │   ├── UnauthorizedError     401  bearer token missing or wrong
    │   ├── ForbiddenError        403  a browser was lured here
    │   ├── NotFoundError         404  no such session, or no such path
    │   ├── MethodNotAllowedError 405
    │   ├── BodyTimeoutError      408  the body did not arrive in time
    │   ├── ConflictError         409  a turn_end that comes too late
    │   ├── TooLargeError         413  over a configured limit
    │   ├── InternalError         500  a fault of ours; the log has its cause
    │   └── UnavailableError      503  overloaded or stopping: nothing was changed
    ├── StoreError                SQLite cannot do it; nothing was changed
    │   ├── StoreFullError        the disk, or a quota, is full
    │   ├── StoreBusyError        another process holds the database
    │   ├── StoreReadOnlyError    the file or its folder cannot be written
    │   ├── StoreFormatError      not a database, damaged, or written by a newer ramakv
    │   └── StoreIOError          the disk failed
    ├── BackendError              LMCache did not do it; what it said is in the attributes
    │   ├── BackendUnavailableError  unreachable, too slow, or answering 5xx: try later
    │   │   ├── BackendUnsupportedError  this port, or this version, has no such thing
    │   │   └── BackendTimeoutError      no answer in time
    │   └── BackendRejectedError     it answered, and refused this very call
    └── ClientError               `ramakv.client`: an event did not come through
        ├── EventInvalidError        not sent, for the contract does not allow it
        ├── EventRefusedError        the daemon answered, and refused it
        ├── EventDroppedError        given up: the queue was full, or the client closed
        │   └── EventSkippedError       it would have done nothing good any more
        ├── DaemonUnavailableError   unreachable, or answering 503: nothing was changed
        ├── OutcomeUnknownError      sent, and no answer came: it may have been applied
        └── AnswerTimeoutError       no answer yet; the event still waits for its turn

Errors of libraries are mapped once, where they enter: `store.py` for SQLite,
`lmcache/transport.py` and `client/transport.py` for HTTP, `web/` for what a client sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar


class RamakvError(Exception):
    """Root of the tree."""


class ConfigError(RamakvError):
    """The configuration cannot be used. The message is one line and says what to change."""


class EventError(RamakvError):
    """An event was refused. The message is the `error` of its reply."""

    status: ClassVar[int] = 500
    retry_after_seconds: ClassVar[int | None] = None


class BadRequestError(EventError):
    """The request is not what the contract asks for."""

    status = 400


class UnauthorizedError(EventError):
    """The bearer token is missing or wrong."""

    status = 401


class ForbiddenError(EventError):
    """A browser sent it, and not for a page of ours."""

    status = 403


class NotFoundError(EventError):
    """No such session, or no such path."""

    status = 404


class MethodNotAllowedError(EventError):
    """The path exists; the method does not."""

    status = 405


class BodyTimeoutError(EventError):
    """The body did not arrive in time."""

    status = 408


class ConflictError(EventError):
    """A turn_end for a session closed moments ago, or not newer than what was applied."""

    status = 409


class TooLargeError(EventError):
    """A body, list or string is over a configured limit."""

    status = 413


class InternalError(EventError):
    """A fault of ours. The log has its cause."""

    status = 500


class UnavailableError(EventError):
    """Overloaded, stopping, or the store cannot commit. Nothing was changed."""

    status = 503
    retry_after_seconds = 1


class StoreError(RamakvError):
    """SQLite cannot do it. Nothing was changed."""


class StoreFullError(StoreError):
    """The disk, or a quota, is full."""


class StoreBusyError(StoreError):
    """Another process holds the database."""


class StoreReadOnlyError(StoreError):
    """The file or its folder cannot be written."""


class StoreFormatError(StoreError):
    """Not a database, damaged, or written by a newer ramakv."""


class StoreIOError(StoreError):
    """The disk failed."""


class BackendError(RamakvError):
    """LMCache did not do it. The attributes are what it said, as far as it said anything."""

    status: int | None
    """HTTP status of the answer; None where none came."""
    error: str
    """What LMCache calls the fault; empty where it gives no name."""
    detail: str
    """What LMCache says about it; empty where it says nothing."""
    failures: dict[str, str]
    """Ports of the workers that failed at a call the scheduler forwarded, and why; workers that
    are not named have done it, and one that was too slow may yet. Empty where nothing was
    forwarded."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        error: str = "",
        detail: str = "",
        failures: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error = error
        self.detail = detail
        self.failures = dict(failures or {})


class BackendUnavailableError(BackendError):
    """LMCache is unreachable, too slow, or answers 5xx: the same call may work later."""


class BackendTimeoutError(BackendUnavailableError):
    """No answer came in time: the call may yet be carried out, or LMCache hangs."""


class BackendUnsupportedError(BackendUnavailableError):
    """Not available here: this LMCache, or its process at this port, has no such thing."""


class BackendRejectedError(BackendError):
    """LMCache answered and refused this very call: some of its hashes are not to its liking."""


class ClientError(RamakvError):
    """An event did not come through the client, or not yet."""


class EventInvalidError(ClientError):
    """The event is not what the contract asks for, and was not sent."""


class EventRefusedError(ClientError):
    """The daemon answered, and refused the event; `status` is the answer's HTTP status."""

    status: int

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class EventDroppedError(ClientError):
    """The event was given up: the queue was full, or the client closed before its turn came."""


class EventSkippedError(EventDroppedError):
    """The event was not sent because its moment was over. Nothing is lost with it."""


class DaemonUnavailableError(ClientError):
    """The daemon cannot be reached, is overloaded or stops. The event changed nothing."""


class OutcomeUnknownError(ClientError):
    """The event was sent and no answer came: it may have been applied, or not."""


class AnswerTimeoutError(ClientError):
    """No answer came in the time that the caller waits. The event is still on its way."""


def first_error(error: BaseException) -> BaseException:
    """Dig the first error out of groups that hold groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
