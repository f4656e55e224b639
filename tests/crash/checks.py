"""Compares a dead daemon's database, and a living daemon's answers, with the model."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import httpx
import trio

from tests.crash import model
from tests.crash.agents import CHUNKS, Agent
from tests.crash.lmcache import LMCache
from tests.crash.model import State
from tests.crash.stored import Stored, read_stored
from tests.daemons import Daemon

_probes = itertools.count()

TRACE_SECONDS_MAX = 20.0
DEBTS_SECONDS_MAX = 20.0


def counts_of(agents: Sequence[Agent]) -> Counter[str]:
    return model.counts(agent.world for agent in agents)


# While the daemon is dead ------------------------------------------------------------------


def check_at_rest(daemon: Daemon, agents: Sequence[Agent], lmcache: LMCache) -> Stored:
    """Each session is as after its last acknowledged event, or the one that was under way.

    And each chunk that nobody references any more is owed, or was evicted since it was let go.
    """
    stored = read_stored(daemon.folder / "sessions.db")
    for agent in agents:
        agent.settle(stored.world(agent.world))
    assert not lmcache.violations, f"evicted while referenced: {lmcache.violations}"
    if lmcache.mood.startswith("embedded"):
        # Its engine died with it, so what is not owed any more counts as evicted.
        for chunk in CHUNKS:
            if chunk not in stored.owed | stored.dead_letters:
                lmcache.evicted_at[chunk] = time.monotonic()
    lost = forgotten(stored, agents, lmcache)
    assert not lost, f"neither referenced, nor owed, nor evicted: {lost}"
    return stored


def forgotten(stored: Stored, agents: Sequence[Agent], lmcache: LMCache) -> list[str]:
    """Chunks that nobody references, and whose evict is neither owed nor done."""
    counts = counts_of(agents)
    released_at: dict[str, float] = {}
    for agent in agents:
        for chunk, at in agent.released_at.items():
            released_at[chunk] = max(at, released_at.get(chunk, at))
    return [
        chunk
        for chunk, at in released_at.items()
        if not counts[chunk]
        and chunk not in stored.owed | stored.dead_letters
        and lmcache.evicted_at.get(chunk, 0.0) <= at
    ]


# While it lives ----------------------------------------------------------------------------


async def check_debts(
    owed: Iterable[str], began: float, agents: Sequence[Agent], lmcache: LMCache
) -> None:
    """What the last life left owed and nobody references is evicted by this one, unasked."""
    if lmcache.mood not in ("well", "slow"):
        return
    counts = counts_of(agents)
    debts = {chunk for chunk in owed if not counts[chunk]}
    with trio.move_on_after(DEBTS_SECONDS_MAX):
        while True:
            debts = {chunk for chunk in debts if lmcache.evicted_at.get(chunk, 0.0) < began}
            if not debts:
                break
            await trio.sleep(0.01)
    assert not debts, f"owed by the last life, and not evicted by this one: {debts}"


async def check_alive(daemon: Daemon, http: httpx.AsyncClient, agents: Sequence[Agent]) -> None:
    """Every session answers as the model says; late turn_ends are refused; counts are right."""
    states = {name: state for agent in agents for name, state in agent.world.items()}
    maps = await send(http, [{"type": "session_map", "session_id": name} for name in states])
    for (name, state), found in zip(states.items(), maps, strict=True):
        if state.status == "active":
            assert found["ok"], (state, found)
            assert tuple(found["data"]["chunk_hashes"]) == state.chunks
        else:
            wanted = "is suspended" if state.status == "suspended" else f"'{name}' not found"
            assert wanted in found["error"], (state, found)
    late = [name for name, state in states.items() if state.status == "closed"]
    for refused in await send(http, [turn_end(name, CHUNKS) for name in late]):
        assert "was closed" in refused["error"], refused
    [health] = await send(http, [{"type": "health"}])
    active = sum(state.status == "active" for state in states.values())
    assert health["data"]["sessions_count"] == active
    await probe_counts(daemon, http, agents)


async def probe_counts(daemon: Daemon, http: httpx.AsyncClient, agents: Sequence[Agent]) -> None:
    """Let a session reference every chunk: its trace tells all counts, its close all zeros.

    Nobody else may be at work.
    """
    expected = counts_of(agents)
    probe = f"probe-{next(_probes)}"
    found = await traced_counts(daemon, http, probe, CHUNKS)
    assert found == {chunk: expected[chunk] + 1 for chunk in CHUNKS}
    sent_at = time.monotonic()
    agents[0].released_at.update(dict.fromkeys(CHUNKS, sent_at))
    [answer] = await send(http, [{"type": "session_close", "session_id": probe}])
    assert answer["data"]["evicted_count"] == sum(not expected[chunk] for chunk in CHUNKS)


async def traced_counts(
    daemon: Daemon, http: httpx.AsyncClient, name: str, chunks: Sequence[str]
) -> dict[str, int]:
    """Reference chunks by a new session, and read their counts from its line in the log."""
    offset = daemon.log.stat().st_size
    [answer] = await send(http, [turn_end(name, chunks)])
    assert answer["ok"], answer
    with trio.fail_after(TRACE_SECONDS_MAX):
        while True:
            with daemon.log.open("rb") as log:
                log.seek(offset)
                for line in log.read().splitlines():
                    if line.endswith(b"}") and name.encode() in line and b'"trace"' in line:
                        counts: dict[str, int] = json.loads(line)["counts"]
                        return counts
            await trio.sleep(0.01)


async def close_everything(http: httpx.AsyncClient, agents: Sequence[Agent]) -> None:
    """End all sessions and forks one by one: each end owes exactly what it was the last to hold."""
    owners = counts_of(agents)
    for agent in agents:
        agent.released_at.update(dict.fromkeys(counts_of([agent]), time.monotonic()))
        for name, state in agent.world.items():
            for fork_id, chunks in sorted(state.forks):
                event = {"type": "session_fork_end", "session_id": name, "fork_id": fork_id}
                await _end(http, event, set(chunks), owners)
            event = {"type": "session_close", "session_id": name}
            asleep = set(state.chunks) if state.status == "suspended" else set()
            await _end(http, event, state.held, owners, asleep)
        agent.world = {
            name: State("none" if state.status == "none" else "closed")
            for name, state in agent.world.items()
        }
    assert not any(owners.values())


async def _end(
    http: httpx.AsyncClient,
    event: dict[str, Any],
    held: set[str],
    owners: Counter[str],
    asleep: set[str] | None = None,
) -> None:
    owners.subtract(held)
    [answer] = await send(http, [event])
    gone = {chunk for chunk in held | (asleep or set()) if not owners[chunk]}
    assert answer["data"]["evicted_count"] == len(gone), (event, answer)
    assert answer["data"].get("matched", True), (event, answer)


def turn_end(name: str, chunks: Sequence[str]) -> dict[str, Any]:
    params = {"chunk_hashes": list(chunks)}
    return {"type": "turn_end", "session_id": name, "kv_transfer_params": params}


async def send(http: httpx.AsyncClient, events: list[dict[str, Any]]) -> list[Any]:
    if not events:
        return []
    answers: list[Any] = (await http.post("/event", json=events)).json()
    return answers
