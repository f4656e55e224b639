"""The wire: what clients send to `POST /event` and what they get back.

These structs are the one source of validation, of `list_events` and of the JSON Schemas.
Fields that an event does not know are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeVar

from msgspec import Meta, Struct, UnsetType

Integer64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""What SQLite can keep."""
NonEmptyText = Annotated[str, Meta(min_length=1)]


class Event(Struct, frozen=True, tag_field="type"):
    """Base of all events."""


class SessionEvent(Event, frozen=True):
    """Base of the events that are about one session."""

    session_id: NonEmptyText


class TurnStart(SessionEvent, frozen=True, tag="turn_start"):
    """Before inference: prefetch the session's chunks, in prefix order."""

    lookup_id: NonEmptyText | None = None


class KVTransferParams(Struct, frozen=True):
    """What the inference engine reports of a finished request."""

    chunk_hashes: list[NonEmptyText]


class Timing(Struct, frozen=True):
    """Milliseconds of one turn."""

    ttft_ms: int | float | None = None
    total_time_ms: int | float | None = None
    tpot_ms: int | float | None = None


class DebugContext(Struct, frozen=True):
    """What goes into a turn's debug file beside its chunks."""

    messages: list[Any] | None = None
    timing: Timing | None = None


class TurnEnd(SessionEvent, frozen=True, tag="turn_end"):
    """After inference: replace the session's chunk map and evict what nobody references."""

    kv_transfer_params: KVTransferParams
    debug_context: DebugContext | None = None
    seq: Integer64 | None = None
    finish_reason: str | None = None


class SnapshotRestore(SessionEvent, frozen=True, tag="snapshot_restore"):
    """Load a session's map from memory or the store, reference its chunks and prefetch them."""

    source_session_id: NonEmptyText | None = None


class SessionMap(SessionEvent, frozen=True, tag="session_map"):
    """Tell which chunks the session references now."""


class SessionClose(SessionEvent, frozen=True, tag="session_close"):
    """End a session for good: release its references and forget it."""


class SessionSuspend(SessionEvent, frozen=True, tag="session_suspend"):
    """Release the references and the hot tier; keep the map for a later restore."""


class SessionFork(SessionEvent, frozen=True, tag="session_fork"):
    """Take one more reference on each chunk of the session, for a child that goes its own way."""

    child_session_id: NonEmptyText | None = None


class SessionForkEnd(SessionEvent, frozen=True, tag="session_fork_end"):
    """Release exactly what a fork took."""

    fork_id: Integer64 | None = None


class Health(Event, frozen=True, tag="health"):
    """Tell that the daemon runs, and how many sessions are active."""


class ListEvents(Event, frozen=True, tag="list_events"):
    """Tell which events there are. A meta-event, not one of the nine."""


AnyEvent = (
    TurnStart
    | TurnEnd
    | SnapshotRestore
    | SessionMap
    | SessionClose
    | SessionSuspend
    | SessionFork
    | SessionForkEnd
    | Health
    | ListEvents
)

EVENTS: dict[str, type[Event]] = {
    str(kind.__struct_config__.tag): kind
    for kind in (
        TurnStart,
        TurnEnd,
        SnapshotRestore,
        SessionMap,
        SessionClose,
        SessionSuspend,
        SessionFork,
        SessionForkEnd,
        Health,
    )
}
"""The nine events by type."""


# What they are answered with ---------------------------------------------------------------


class TurnStartData(Struct, frozen=True):
    """`prefetch_sent`: accepted by LMCache, or still under way when the answer was due."""

    prefetch_sent: bool
    prefetch_count: int
    backend_degraded: bool
    restored: bool


class TurnEndData(Struct, frozen=True):
    """`evicted_count`: chunks that this event queued for eviction."""

    evicted_count: int
    map_updated: bool
    debug_written: bool
    backend_degraded: bool
    chunk_count: int


class SnapshotRestoreData(Struct, frozen=True):
    """Like a turn_start's, with what the target held before and the source does not."""

    prefetch_sent: bool
    prefetch_count: int
    backend_degraded: bool
    evicted_count: int
    pinned: bool
    source_session_id: str
    target_session_id: str


class SessionMapData(Struct, frozen=True):
    """The map in its order."""

    session_id: str
    chunk_hashes: tuple[str, ...]


class SessionCloseData(Struct, frozen=True):
    """`pinned`: the row was kept."""

    closed: bool
    pinned: bool
    evicted_count: int
    backend_degraded: bool


class SessionSuspendData(Struct, frozen=True):
    """`suspended` is false for a session that is not known."""

    suspended: bool
    pinned: bool
    evicted_count: int
    backend_degraded: bool


class SessionForkData(Struct, frozen=True):
    """`fork_id` is never used again, also across restarts."""

    forked: bool
    fork_id: int


class SessionForkEndData(Struct, frozen=True):
    """`matched`: there was such a fork."""

    fork_end: bool
    evicted_count: int
    backend_degraded: bool
    matched: bool


class HealthData(Struct, frozen=True):
    """Active sessions; suspended ones do not count."""

    status: str
    sessions_count: int


Data = (
    TurnStartData
    | TurnEndData
    | SnapshotRestoreData
    | SessionMapData
    | SessionCloseData
    | SessionSuspendData
    | SessionForkData
    | SessionForkEndData
    | HealthData
    | dict[str, Any]
)

D = TypeVar("D")


class Success(Struct, Generic[D], frozen=True):
    """The envelope of an event that was done."""

    ok: bool
    type: str
    data: D


class Failure(Struct, frozen=True):
    """The envelope of an event that was refused; no `type` where none could be read."""

    ok: bool
    type: str | UnsetType
    error: str
