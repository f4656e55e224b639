"""Clients: each uses two sessions, one event at a time, and notes what was acknowledged."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import trio

from tests.crash import model
from tests.crash.model import Chunks, State, World

CHUNKS = tuple(f"c{number}" for number in range(40))
CHUNKS_PER_TURN_MAX = 12


@dataclass(frozen=True)
class Intent:
    """An event, the sessions after it, and the status that it must be answered with."""

    event: dict[str, Any]
    after: World
    status: int = 200


@dataclass
class Agent:
    """Two sessions' only client. The second one is, now and then, a child of the first."""

    name: str
    rng: random.Random
    fork_ids: set[int]
    """All that forks ever had, whosever they were."""
    world: World = field(init=False)
    under_way: Intent | None = None
    sent_at: float = 0.0
    acknowledged: int = 0
    seq: int = 0
    reopened: set[str] = field(default_factory=set)
    released_at: dict[str, float] = field(default_factory=dict)
    """When the event was sent that last made an owner give up a chunk."""

    def __post_init__(self) -> None:
        self.world = {self.name: State(), f"{self.name}-child": State()}

    async def work(self, http: httpx.AsyncClient, pause: trio.Event) -> None:
        """Send events until the daemon is gone, or `pause` is set."""
        while not pause.is_set():
            intent = self.next_intent()
            self.under_way, self.sent_at = intent, time.monotonic()
            try:
                response = await http.post("/event", json=intent.event)
                reply = response.json()
            except (httpx.HTTPError, ValueError):
                return
            if response.status_code == 503:  # it drains: nothing was changed
                assert "shutting down" in reply["error"], (intent.event, reply)
                self.under_way = None
                await trio.sleep(0.005)
                continue
            assert response.status_code == intent.status, (intent.event, reply)
            self.acknowledged += 1
            self.adopt(intent.after, reply.get("data") or {})

    def adopt(self, after: World, data: dict[str, Any]) -> None:
        """Go on from what an event left."""
        assert self.under_way is not None
        event = self.under_way.event
        session_id = event["session_id"]
        if "fork_id" in data:
            assert data["fork_id"] not in self.fork_ids, "a fork id is never used again"
            named = model.with_fork_id(after[session_id], data["fork_id"])
            after = {**after, session_id: named}
        if event["type"] == "session_fork_end":
            assert data["matched"], event
        if event["type"] == "turn_start" and self.world[session_id].status == "closed":
            self.reopened.add(session_id)
        self._move(after)

    def settle(self, stored: World) -> None:
        """Find out, from what is stored, whether the event under way has happened."""
        possible = [self.world]
        if self.under_way is not None:
            possible.append(self.under_way.after)
        for world in possible:
            if all(
                model.is_same(stored[name], state, reopened=name in self.reopened)
                for name, state in world.items()
            ):
                self._move({name: stored[name] for name in world})
                return
        raise AssertionError(f"{self.name}: stored {stored}, possible {possible}")

    def _move(self, after: World) -> None:
        for chunk in model.let_go(self.world, after):
            self.released_at[chunk] = self.sent_at
        self.world, self.under_way = after, None
        self.fork_ids.update(fork_id for state in after.values() for fork_id, _ in state.forks)
        self.reopened -= {name for name, state in after.items() if state.status != "none"}

    # What to do next -----------------------------------------------------------------------

    def next_intent(self) -> Intent:
        name = self.rng.choices(list(self.world), weights=(3, 1))[0]
        return self.rng.choice(list(self._choices(name)))()

    def _choices(self, name: str) -> Iterator[Callable[[], Intent]]:
        """What may be done to a session as it is; more often what agents do more often."""
        state = self.world[name]
        other = next(known for known in self.world if known != name)
        yield lambda: self._intent("turn_start", name, model.woken(state))
        if state.status == "closed":
            yield lambda: self._turn_end(name, self._next_seq(), state, status=409)
        else:
            for _ in range(4):
                yield lambda: self._turned(name)
        if state.status in ("active", "suspended"):
            yield lambda: self._intent("session_close", name, model.closed(state))
            if state.chunks:
                kept = model.restored(state, state.chunks, pin=True)
                yield lambda: self._intent("snapshot_restore", name, kept)
            if (seq := state.seq) is not None:
                yield lambda: self._turn_end(name, seq, state, status=409)
        if state.status == "active":
            yield lambda: self._intent("session_suspend", name, model.suspended(state))
            yield lambda: self._intent("session_fork", name, model.forked(state))
            yield lambda: self._fork_into(name, other)
        if self.world[other].status in ("active", "suspended") and self.world[other].chunks:
            taken = model.restored(state, self.world[other].chunks, pin=True)
            yield lambda: self._intent("snapshot_restore", name, taken, source_session_id=other)
        open_forks = sorted(fork_id for fork_id, _ in state.forks)
        for fork_id in self.rng.sample(open_forks, min(3, len(open_forks))):
            ended = model.fork_ended(state, fork_id)
            yield lambda f=fork_id, e=ended: self._intent(  # type: ignore[misc]
                "session_fork_end", name, e, fork_id=f
            )

    def _intent(self, type_: str, name: str, state: State, **fields: Any) -> Intent:
        event = {"type": type_, "session_id": name, **fields}
        return Intent(event, {**self.world, name: state})

    def _turned(self, name: str) -> Intent:
        chunks = tuple(self.rng.choices(CHUNKS, k=self.rng.randrange(CHUNKS_PER_TURN_MAX)))
        seq = self._next_seq()
        return self._turn_end(name, seq, model.turned(self.world[name], chunks, seq), chunks)

    def _turn_end(
        self, name: str, seq: int, state: State, chunks: Chunks = CHUNKS, status: int = 200
    ) -> Intent:
        params = {"chunk_hashes": chunks}
        event = self._intent("turn_end", name, state, kv_transfer_params=params, seq=seq)
        return Intent(event.event, event.after, status)

    def _fork_into(self, name: str, child: str) -> Intent:
        """Two sessions change, in one transaction."""
        parent = self.world[name]
        begun = model.restored(self.world[child], parent.chunks, pin=False)
        intent = self._intent("session_fork", name, model.forked(parent), child_session_id=child)
        return Intent(intent.event, {**intent.after, child: begun})

    def _next_seq(self) -> int:
        self.seq += 1
        return self.seq
