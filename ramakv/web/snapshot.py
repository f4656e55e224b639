"""What the live page is told, once a second: plain structs, made by `overview`."""

from __future__ import annotations

from msgspec import Struct

from ramakv.problems import Problem


class SessionRow(Struct):
    """A session, as far as it is known without asking it."""

    id: str
    state: str
    """in_turn, paused (between two turns), suspended, or closed."""
    chunks: int
    turns: int
    forks: int
    idle_seconds: float
    turn_seconds: float | None
    waiting: int
    """Requests that wait for it, or are under way in it."""
    awake: bool


class SessionCounts(Struct):
    """Sessions by what they do."""

    in_turn: int
    paused: int
    suspended: int
    awake: int
    waiting: int
    """Requests that wait for their session, or are under way in it."""


class SharedChunks(Struct):
    """Chunks that the same sessions hold: mostly a common prefix."""

    first: str
    chunks: int
    references: int
    """Of each: sessions and forks, those that sleep included."""
    sessions: list[str]
    """Some of those that are awake."""
    more: int
    """How many more hold it: awake, asleep, or forks."""


class Chunks(Struct):
    """What is referenced, and so belongs into the hot tier."""

    referenced: int
    references: int
    """Of active sessions, each chunk as often as it is held; forks are not counted."""
    evicting: int
    """Not referenced any more, and in the hot tier until they are evicted."""
    hot_share: float | None
    """Of the chunks that turns began with; None where nobody can tell, or none has begun."""


class Rate(Struct):
    """Events or calls of one kind: how many a second, how fast, and how many in all."""

    name: str
    per_second: float
    p50: float | None
    p99: float | None
    ok: int
    failed: int


class Evictions(Struct):
    """Evictions that are owed, and what became of the others, in chunks since the start."""

    waiting: int
    in_flight: int
    oldest_seconds: float
    dead_letters: int
    queued: int
    done: int
    withdrawn: int
    retried: int
    forgiven: int
    dead: int


class LMCache(Struct):
    """LMCache, as the backend actor sees it."""

    kind: str
    url: str
    trouble: str
    breaker: str
    paused: bool
    tokens: float | None
    """Calls that may be made at once; None where nothing paces them."""
    burst: int
    held: int | None
    held_max: int
    calls: list[Rate]
    prefetches: dict[str, int]


class Store(Struct):
    """The journal."""

    transactions_per_second: float
    commits_per_second: float
    waiting: int
    failed: int


class Snapshot(Struct):
    """All of it, at one moment."""

    at_ms: int
    version: str
    phase: str
    up_seconds: float
    sessions: SessionCounts
    recent: list[SessionRow]
    largest: list[SessionRow]
    chunks: Chunks
    shared: list[SharedChunks]
    events: Rate
    by_type: list[Rate]
    evictions: Evictions
    lmcache: LMCache
    store: Store
    problems: list[Problem]
    point: list[float | None]
    """The newest point of the series: time (ms), events/s, p50 and p99 (s), failed/s."""
