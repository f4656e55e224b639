"""One event on its way: what it is, whether it may be sent twice, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ramakv.errors import ClientError, EventInvalidError

_READS = frozenset({"session_map", "health", "list_events"})
_REPEATABLE = frozenset(
    {"turn_end", "snapshot_restore", "session_close", "session_suspend", *_READS}
)
"""Events that, applied twice in a row, leave what applying them once leaves.

A turn_start is not among them (a second prefetch leaks in a real LMCache), nor a session_fork
(it would take a second hold on each chunk).
"""


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of an event. `data` and `error` are the daemon's words, as far as it spoke."""

    ok: bool
    data: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    cause: ClientError | None = None
    """What went wrong, as the exception that strict clients raise; None where `ok`."""

    def raise_for_error(self) -> Reply:
        """Return the reply itself if it is ok. Raises ClientError if it is not."""
        if self.cause is not None:
            raise self.cause
        return self


def failed(cause: ClientError) -> Reply:
    """Wrap what went wrong."""
    return Reply(False, error=str(cause), cause=cause)


@dataclass(eq=False, slots=True)
class Message:
    """An event to send."""

    type: str
    fields: dict[str, Any]
    sessions: tuple[str, ...] = ()
    """Sessions that it touches: it keeps its place among the events of each."""
    fresh_seconds: float | None = None
    """It is worth nothing when it could not be sent for so long; None: it always is."""
    complete: Callable[[], dict[str, Any]] | None = None
    """Tells the fields that are known only once the events before it are answered.

    Raises ClientError where there is nothing to send then.
    """
    _body: bytes = b""

    def freeze(self) -> None:
        """Fix what will be sent: the caller's lists may change later. Raises EventInvalidError."""
        _check(self.type, self.fields)
        self._body = self._encode()

    def body(self) -> bytes:
        """Return the JSON to send. Raises ClientError."""
        if self.complete is not None:
            self.fields |= self.complete()
            self.complete = None
            self._body = self._encode()
        return self._body

    def _encode(self) -> bytes:
        try:
            return msgspec.json.encode({"type": self.type, **self.fields})
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise EventInvalidError(f"{self.type}: cannot be written as JSON: {error}") from error

    @property
    def is_read(self) -> bool:
        """Whether it only asks: whoever got no answer may ask again."""
        return self.type in _READS

    @property
    def is_repeatable(self) -> bool:
        """Whether it may be sent again when nobody knows what became of it."""
        # A fork that is named can end only once; without a name, another one would.
        return self.type in _REPEATABLE or "fork_id" in self.fields


def _check(type_: str, fields: dict[str, Any]) -> None:
    for name in ("session_id", "source_session_id", "child_session_id"):
        value = fields.get(name, "-")
        if not isinstance(value, str) or not value:
            raise EventInvalidError(f"{type_}: {name}: expected a non-empty string, got {value!r}")
    if type_ == "turn_end":
        params = fields.get("kv_transfer_params")
        hashes = params.get("chunk_hashes") if isinstance(params, dict) else None
        if not isinstance(hashes, Sequence) or isinstance(hashes, str | bytes):
            raise EventInvalidError(
                f"turn_end: chunk_hashes: expected a list of non-empty strings, got {hashes!r}"
            )
        if bad := [each for each in hashes if not isinstance(each, str) or not each]:
            raise EventInvalidError(
                f"turn_end: chunk_hashes: expected non-empty strings, got {bad[0]!r}"
            )
