"""Agents that come and go: no session id and no chunk hash is ever used by two of them."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import trio

TURNS_MAX = 8
CHUNKS_PER_TURN_MAX = 40
REFUSED_HASH_CHARS = 1100
"""LMCache refuses a hash that is so long; the daemon is configured to take it."""

REFUSED_SHARE = 0.02
ABANDONED_SHARE = 0.15
STORED_SHARE = 0.2


@dataclass
class Crowd:
    """All agents; each lives one short life after the other."""

    events: httpx.AsyncClient
    engine: httpx.AsyncClient
    rng: random.Random
    engine_is_up: bool = True
    lives: int = 0
    sent: int = 0
    refused: int = 0
    seconds: list[float] = field(default_factory=list)
    """How long each event took since the last sample."""
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def live(self) -> None:
        """Live one life after the other, until cancelled."""
        while True:
            await self._one_life(f"session-{next(self._numbers)}")
            self.lives += 1

    async def _one_life(self, name: str) -> None:
        rng, chunks = self.rng, list[str]()
        forks = []
        for _ in range(rng.randint(1, TURNS_MAX)):
            await self._send("turn_start", name)
            chunks = chunks[: rng.randint(len(chunks) // 2, len(chunks))]
            chunks += [self._chunk() for _ in range(rng.randrange(CHUNKS_PER_TURN_MAX))]
            await self._send("turn_end", name, kv_transfer_params={"chunk_hashes": chunks})
            if rng.random() < STORED_SHARE:
                await self._store(chunks)
            if rng.random() < 0.2:
                fork = await self._send("session_fork", name)
                forks.append(fork["fork_id"])
            if rng.random() < 0.1:
                child = {"child_session_id": f"{name}-child"}
                forks.append((await self._send("session_fork", name, **child))["fork_id"])
            if rng.random() < 0.1:
                await self._send("session_suspend", name)
        if rng.random() < ABANDONED_SHARE:
            return  # it never says goodbye: the daemon suspends, closes and releases by itself
        for fork_id in forks:
            await self._send("session_fork_end", name, fork_id=fork_id)
        await self._send("session_close", name)

    def _chunk(self) -> str:
        number = f"{self.rng.getrandbits(63):x}"
        if self.rng.random() < REFUSED_SHARE / CHUNKS_PER_TURN_MAX:
            return number.ljust(REFUSED_HASH_CHARS, "0")
        return number

    async def _store(self, chunks: list[str]) -> None:
        """Be the inference engine, which stores what was computed."""
        good = [chunk for chunk in chunks if len(chunk) < REFUSED_HASH_CHARS]
        if good and self.engine_is_up:
            await self.engine.post("/engine/store", json={"chunk_hashes": good})

    async def _send(self, type_: str, name: str, **fields: Any) -> Any:
        began = time.monotonic()
        response = await self.events.post(
            "/event", json={"type": type_, "session_id": name, **fields}
        )
        self.seconds.append(time.monotonic() - began)
        self.sent += 1
        reply = response.json()
        if not reply["ok"]:  # idle for too long while the machine was busy, say
            self.refused += 1
            await trio.sleep(0.01)
        return reply.get("data") or {"fork_id": None}
