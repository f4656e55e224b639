"""How Hypothesis makes histories up, and so how it makes failing ones smaller."""

from __future__ import annotations

from typing import Any, get_args

from hypothesis import strategies as st

from tests.simulation.history import (
    Disk,
    DiskMode,
    Engine,
    EngineMode,
    EngineRestart,
    Event,
    Fail,
    FailurePoint,
    History,
    Kill,
    Pause,
    Point,
    Restart,
    Send,
    Settle,
    Step,
)

SESSIONS = 6
SHARED_PREFIX = tuple(range(8))
"""Chunks of a system prompt and tools that most sessions begin with."""
CHUNKS = 20
_EVENTS = (
    *("turn_end",) * 8,
    *("turn_start",) * 4,
    *("session_fork", "session_fork_end", "session_suspend", "snapshot_restore") * 2,
    *("session_close",) * 2,
    "session_map",
)
_PAUSES = (0.0, 0.001, 0.02, 0.3, 1.0, 5.0, 12.0, 70.0)

sessions = st.integers(0, SESSIONS - 1)


@st.composite
def chunk_maps(draw: st.DrawFn) -> tuple[int, ...]:
    """A shared prefix and something of one's own; chunks may be listed twice."""
    prefix = SHARED_PREFIX[: draw(st.integers(0, len(SHARED_PREFIX)))]
    own = draw(st.lists(st.integers(len(SHARED_PREFIX), CHUNKS - 1), max_size=4))
    return (*prefix, *own)


@st.composite
def agents_events(draw: st.DrawFn) -> Event:
    """Any event but health and list_events, which change nothing."""
    type_, session = draw(st.sampled_from(_EVENTS)), draw(sessions)
    if type_ == "turn_end":
        seq = draw(st.none() | st.integers(1, 30))
        return Event(type_, session, chunks=draw(chunk_maps()), seq=seq)
    if type_ in ("session_fork", "snapshot_restore"):
        other = draw(st.none() | sessions)
        itself = type_ == "session_fork" and other == session
        return Event(type_, session, other=None if itself else other)
    if type_ == "session_fork_end":
        return Event(type_, session, fork=draw(st.none() | st.integers(1, 12)))
    return Event(type_, session)


sends = st.builds(
    Send,
    st.lists(agents_events(), min_size=1, max_size=1).map(tuple)
    | st.lists(agents_events(), min_size=2, max_size=5).map(tuple),
    patience_seconds=st.sampled_from((None, None, None, None, 0.0, 0.05, 1.0)),
    waits=st.booleans(),
)
pauses = st.builds(Pause, st.sampled_from(_PAUSES))
bad_hashes = st.sampled_from(((), (), (0,), (9, 13), (2, 8, 17)))
troubles = (
    st.builds(Engine, st.sampled_from(get_args(EngineMode)), bad=bad_hashes)
    | st.builds(Disk, st.sampled_from(("well", *get_args(DiskMode))))
    | st.just(EngineRestart())
    | st.just(Restart())
    | st.builds(Kill, st.none() | st.sampled_from(get_args(Point)), st.integers(1, 4))
    | st.builds(
        Fail,
        st.sampled_from(get_args(FailurePoint)),
        st.integers(1, 4),
        st.sampled_from(("full", "locked", "failing", "read-only")),
    )
    | st.just(Settle())
)


def steps() -> st.SearchStrategy[Step]:
    """Mostly events, some pauses, and now and then trouble."""
    kinds: tuple[st.SearchStrategy[Any], ...] = (sends, sends, sends, sends, pauses, troubles)
    return st.sampled_from(kinds).flatmap(lambda kind: kind)


settings_of_the_daemon = st.fixed_dictionaries(
    {
        "backend__calls_per_second": st.sampled_from((200.0, 50.0, 3.0)),
        "backend__burst_calls_max": st.sampled_from((50, 5, 1)),
        "backend__calls_in_flight_max": st.sampled_from((8, 2, 1)),
        "backend__chunks_per_call_max": st.sampled_from((4096, 3, 2)),
        "backend__prefetches_waiting_max": st.sampled_from((1024, 2)),
        "backend__call_timeout_seconds": st.sampled_from((2.0, 0.5)),
        "backend__evict_tries_max": st.sampled_from((5, 2)),
        "backend__retry_base_seconds": st.just(0.05),
        "backend__retry_max_seconds": st.just(2.0),
        "backend__breaker_failures_max": st.sampled_from((5, 1)),
        "backend__breaker_open_seconds": st.sampled_from((5.0, 0.2)),
        "eviction__batch_chunks_max": st.sampled_from((512, 3, 1)),
        "eviction__batch_age_seconds": st.sampled_from((0.5, 0.01)),
        "eviction__close_locations": st.sampled_from(
            (["LocalCPUBackend"], ["LocalCPUBackend", "LocalDiskBackend"])
        ),
        "backend__kind": st.just("embedded"),  # then nobody asks it what its hot tier holds
        "residency__policy": st.sampled_from(("off", "sticky")),
        "residency__hot_chunks_max": st.sampled_from((6, 2)),
        "limits__event_timeout_seconds": st.sampled_from((10.0, 0.3)),
        "limits__mailbox_events_max": st.sampled_from((64, 2)),
        "limits__sessions_max": st.sampled_from((200_000, 4)),
        "limits__awake_sessions_max": st.sampled_from((1000, 2)),
        "limits__forks_per_session_max": st.sampled_from((1000, 2)),
        "store__group_commits_max": st.sampled_from((128, 3, 1)),
        "store__mailbox_commits_max": st.sampled_from((2048, 3, 1)),
        "sessions__idle_suspend_seconds": st.sampled_from((3600.0, 10.0, 0.0)),
        "sessions__idle_close_seconds": st.sampled_from((604_800.0, 60.0, 20.0, 0.0)),
        "sessions__fork_ttl_seconds": st.sampled_from((86_400.0, 15.0, 0.0)),
        "sessions__passivate_seconds": st.sampled_from((60.0, 10.0)),
        "sessions__closed_memory_seconds": st.sampled_from((60.0, 10.0)),
        "sessions__keep_pinned_on_close": st.booleans(),
    }
)


def histories(steps_max: int) -> st.SearchStrategy[History]:
    """Histories of up to so many steps."""
    return st.builds(
        History,
        st.integers(0, 2**32 - 1),
        settings_of_the_daemon,
        st.lists(steps(), min_size=steps_max // 3, max_size=steps_max).map(tuple),
    )
