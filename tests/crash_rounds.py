"""Kill the real daemon under load, again and again, and look for anything lost.

    python -m tests.crash_rounds --rounds 30

Agents send events and note what was acknowledged. After each SIGKILL the database and the
restarted daemon must show, for each session, the state after its last acknowledged event or
after the one that was under way. At the end all sessions and forks are closed; each chunk
must then be evicted exactly once, by whoever let go of it last.
"""

from __future__ import annotations

import argparse
import random
import sqlite3
import tempfile
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import trio

from tests.daemons import Daemon

SESSIONS = 12
CHUNKS = 40
ROUND_SECONDS_MAX = 0.8


@dataclass(frozen=True)
class State:
    """What a session should look like in the database."""

    status: str = "none"
    chunks: tuple[str, ...] = ()
    turns: int = 0
    seq: int | None = None
    forks: frozenset[tuple[str, ...]] = frozenset()
    """Chunks of each open fork, with a number that tells equal forks apart."""


@dataclass
class Agent:
    """One session's client: sends one event at a time."""

    session_id: str
    rng: random.Random
    state: State = State()
    under_way: State | None = None
    seq: int = 0
    acknowledged: int = 0
    fork_ids: dict[int, tuple[str, ...]] = field(default_factory=dict)

    async def work(self, http: httpx.AsyncClient) -> None:
        """Send events until the daemon dies."""
        while True:
            event, after = self.next_event()
            self.under_way = after
            try:
                reply = (await http.post("/event", json=event)).json()
            except (httpx.HTTPError, ValueError):
                return
            assert reply["ok"], (event, reply)
            self.acknowledged += 1
            if event["type"] == "session_fork":
                self.fork_ids[reply["data"]["fork_id"]] = self.state.chunks
            elif event["type"] == "session_fork_end":
                assert reply["data"]["matched"], event
                del self.fork_ids[event["fork_id"]]
            self.state, self.under_way = after, None

    def next_event(self) -> tuple[dict[str, Any], State]:
        state, named = self.state, {"session_id": self.session_id}
        choice = self.rng.random()
        if state.status == "none" and choice < 0.3:
            return {"type": "turn_start", **named}, state
        if state.status == "suspended" or choice < 0.1:
            woken = replace(state, status="active" if state.status != "none" else "none")
            return {"type": "turn_start", **named}, woken
        if state.status == "active" and choice < 0.2:
            return {"type": "session_suspend", **named}, replace(state, status="suspended")
        if state.status == "active" and choice < 0.3:
            added = (str(self.rng.random()), *dict.fromkeys(state.chunks))
            return {"type": "session_fork", **named}, replace(state, forks=state.forks | {added})
        if self.fork_ids and choice < 0.4:
            fork_id = self.rng.choice(sorted(self.fork_ids))
            chunks = tuple(dict.fromkeys(self.fork_ids[fork_id]))
            gone = next(fork for fork in sorted(state.forks) if fork[1:] == chunks)
            after = replace(state, forks=state.forks - {gone})
            return {"type": "session_fork_end", **named, "fork_id": fork_id}, after
        self.seq += 1
        chunks = tuple(f"c{self.rng.randrange(CHUNKS)}" for _ in range(self.rng.randrange(12)))
        event = {
            "type": "turn_end",
            **named,
            "kv_transfer_params": {"chunk_hashes": chunks},
            "seq": self.seq,
        }
        after = replace(state, status="active", chunks=chunks, turns=state.turns + 1, seq=self.seq)
        return event, after

    def check(self, stored: State, open_forks: dict[int, tuple[str, ...]]) -> None:
        """Accept what is stored, if it is a state this session may be in."""
        possible = [self.state] if self.under_way is None else [self.state, self.under_way]
        found = [state for state in possible if _plain(state) == _plain(stored)]
        assert found, f"{self.session_id}: stored {stored}, possible {possible}"
        self.state, self.under_way = found[0], None
        self.fork_ids = open_forks


def _plain(state: State) -> object:
    forks = sorted(fork[1:] for fork in state.forks)
    return state.status, state.chunks, state.turns, state.seq, forks


def stored_states(path: Path) -> dict[str, tuple[State, dict[int, tuple[str, ...]]]]:
    """Read the sessions and forks that the database has."""
    with closing(sqlite3.connect(path)) as database:
        rows = database.execute(
            "SELECT session_id, map_json, suspended, turn_count, seq FROM sessions"
        ).fetchall()
        fork_rows = database.execute("SELECT fork_id, session_id, map_json FROM forks").fetchall()
    found = {
        session_id: (
            State("suspended" if suspended else "active", _chunks(map_json), turn_count, seq),
            {},
        )
        for session_id, map_json, suspended, turn_count, seq in rows
    }
    states: dict[str, tuple[State, dict[int, tuple[str, ...]]]] = dict(found)
    for fork_id, session_id, map_json in fork_rows:
        state, forks = states.get(session_id, (State(), {}))
        forks[fork_id] = _chunks(map_json)
        added = frozenset({(str(fork_id), *_chunks(map_json))})
        states[session_id] = (replace(state, forks=state.forks | added), forks)
    return states


def _chunks(map_json: str) -> tuple[str, ...]:
    return tuple(msgspec.json.decode(map_json, type=list[str]))


async def kill_under_load(daemon: Daemon, agents: list[Agent], seconds: float) -> None:
    """Let the agents work, and kill the daemon in the middle of it."""
    async with (
        httpx.AsyncClient(base_url=daemon.url, trust_env=False, timeout=30.0) as http,
        trio.open_nursery() as nursery,
    ):
        for agent in agents:
            nursery.start_soon(agent.work, http)
        await trio.sleep(seconds)
        daemon.kill()


def check_after_restart(daemon: Daemon, agents: list[Agent]) -> None:
    """Compare what is stored, and what the daemon says, with what was acknowledged."""
    stored = stored_states(daemon.folder / "sessions.db")
    for agent in agents:
        agent.check(*stored.get(agent.session_id, (State(), {})))
        reply = daemon.send("session_map", agent.session_id)
        assert reply["ok"] == (agent.state.status == "active"), reply
        if reply["ok"]:
            assert tuple(reply["data"]["chunk_hashes"]) == agent.state.chunks
    active = sum(agent.state.status == "active" for agent in agents)
    assert daemon.send("health")["data"]["sessions_count"] == active


def close_everything(daemon: Daemon, agents: list[Agent]) -> None:
    """End all sessions and forks: the counts are right if each end evicts what it must."""
    owners: Counter[str] = Counter()
    for agent in agents:
        if agent.state.status == "active":
            owners.update(set(agent.state.chunks))
        for chunks in agent.fork_ids.values():
            owners.update(set(chunks))
    for agent in agents:
        for fork_id, chunks in agent.fork_ids.items():
            owners.subtract(set(chunks))
            ended = daemon.send("session_fork_end", agent.session_id, fork_id=fork_id)["data"]
            assert ended["matched"]
            assert ended["evicted_count"] == sum(owners[chunk] == 0 for chunk in set(chunks))
        chunks = agent.state.chunks if agent.state.status == "active" else ()
        owners.subtract(set(chunks))
        closed = daemon.send("session_close", agent.session_id)["data"]
        assert closed["evicted_count"] == sum(owners[chunk] == 0 for chunk in set(chunks))
    assert not any(owners.values())


def owed(path: Path) -> int:
    with closing(sqlite3.connect(path)) as database:
        return int(database.execute("SELECT count(*) FROM outbox").fetchone()[0])


def run_rounds(folder: Path, rounds: int, seed: int) -> int:
    """Kill and check `rounds` times, then stop in peace; returns how much was acknowledged."""
    rng = random.Random(seed)
    agents = [Agent(f"s{number}", random.Random(rng.random())) for number in range(SESSIONS)]
    daemon = Daemon(folder)
    try:
        for _ in range(rounds):
            daemon.start()
            check_after_restart(daemon, agents)
            trio.run(kill_under_load, daemon, agents, rng.uniform(0.02, ROUND_SECONDS_MAX))
        daemon.start()
        check_after_restart(daemon, agents)
        close_everything(daemon, agents)
        assert daemon.stop() == 0, daemon.log.read_text()
        assert owed(folder / "sessions.db") == 0
        assert stored_states(folder / "sessions.db") == {}
    finally:
        daemon.kill()
    return sum(agent.acknowledged for agent in agents)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)  # noqa: T201
    with tempfile.TemporaryDirectory() as folder:
        acknowledged = run_rounds(Path(folder), arguments.rounds, arguments.seed)
    print(f"rounds: {arguments.rounds}, acknowledged: {acknowledged}, lost: 0")  # noqa: T201


if __name__ == "__main__":
    main()
