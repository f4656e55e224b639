"""Stand-ins where time or faults must be controlled; everything else in the tests is real."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import trio

from bench.virtual_time import run_inline, wall_clock
from ramakv import codec, events
from ramakv.config import Config
from ramakv.core.topology import Condition
from ramakv.errors import BackendUnavailableError
from ramakv.service import Service, open_service


@dataclass(frozen=True)
class Call:
    """One call that reached LMCache."""

    kind: str
    chunks: tuple[str, ...]
    detail: Any
    """Locations of an evict, lookup_id of a prefetch."""
    at: float


@dataclass
class FakeLMCache:
    """Records calls; as slow, or as broken, as a test sets it."""

    seconds_per_call: float = 0.0
    fault: Callable[[Call], BaseException | None] | None = None
    watch: Callable[[Call], None] | None = None
    calls: list[Call] = field(default_factory=list)
    under_way: Counter[str] = field(default_factory=Counter)
    conflicts: list[str] = field(default_factory=list)

    async def prefetch(self, chunk_hashes: Sequence[str], lookup_id: str) -> None:
        await self._call(Call("prefetch", tuple(chunk_hashes), lookup_id, trio.current_time()))

    async def evict(self, chunk_hashes: Sequence[str], locations: Sequence[str]) -> None:
        await self._call(Call("evict", tuple(chunk_hashes), tuple(locations), trio.current_time()))

    async def query(self, chunk_hashes: Sequence[str]) -> dict[str, list[str]] | None:
        return None

    async def _call(self, call: Call) -> None:
        self.calls.append(call)
        if self.watch is not None:
            self.watch(call)
        other = "evict" if call.kind == "prefetch" else "prefetch"
        self.conflicts += [
            f"{call.kind} of {chunk} during its {other}"
            for chunk in call.chunks
            if self.under_way[f"{other} {chunk}"]
        ]
        marks = [f"{call.kind} {chunk}" for chunk in call.chunks]
        self.under_way.update(marks)
        try:
            fault = self.fault(call) if self.fault else None
            await trio.sleep(self.seconds_per_call)
            if fault is not None:
                raise fault
        finally:
            self.under_way.subtract(marks)

    def evicted(self) -> list[str]:
        """All chunks that evicts reached LMCache for, in order."""
        return [chunk for call in self.calls if call.kind == "evict" for chunk in call.chunks]

    def prefetched(self) -> list[tuple[str, ...]]:
        return [call.chunks for call in self.calls if call.kind == "prefetch"]


def outage(call: Call) -> BaseException:
    """A fault: LMCache cannot be reached."""
    return BackendUnavailableError("connection refused")


class Agent:
    """Sends events to a service as the edge does, and returns data or the error's text."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def send(self, type_: str, session_id: str | None = None, **fields: Any) -> Any:
        body: dict[str, Any] = {"type": type_, **fields}
        if session_id is not None:
            body["session_id"] = session_id
        event = codec.decode_event(msgspec.json.encode(body), self.service.config.limits)
        assert isinstance(event, events.Event)
        return msgspec.json.decode(codec.encode(await self.service.handle(event)))

    async def turn_end(self, session_id: str, *hashes: str, **fields: Any) -> Any:
        return await self.send(
            "turn_end", session_id, kv_transfer_params={"chunk_hashes": list(hashes)}, **fields
        )

    def counts(self) -> dict[str, int]:
        return self.service.refcount.counts()


def make_config(folder: Path, **overrides: Any) -> Config:
    """A configuration for tests: dotted keys, such as `backend__calls_per_second=5`."""
    table: dict[str, Any] = {
        "session_store_path": str(folder / "sessions.db"),
        "debug_dir": str(folder / "debug"),
        "embedded": {"disk_dir": str(folder / "chunks")},
    }
    for key, value in overrides.items():
        section, _, name = key.rpartition("__")
        (table.setdefault(section, {}) if section else table)[name] = value
    return msgspec.convert(table, Config)


@dataclass
class FakeCare:
    """Tells of LMCache what a test sets."""

    may_be_called: bool = True
    condition: Condition = field(default_factory=Condition)
    wedged: list[str] = field(default_factory=list)
    diagnoses: int = 0

    async def check_first(self) -> bool:
        return self.may_be_called

    async def look(self) -> Condition:
        seen, self.condition = self.condition, replace(self.condition, restarted=False)
        return seen

    async def find_wedged(self) -> Sequence[str]:
        self.diagnoses += 1
        return self.wedged


@asynccontextmanager
async def open_agent(
    folder: Path,
    lmcache: FakeLMCache | None = None,
    care: FakeCare | None = None,
    **overrides: Any,
) -> AsyncIterator[Agent]:
    """The whole service on the mock clock: real actors and a real database, a fake LMCache."""
    async with open_service(
        make_config(folder, **overrides),
        client=lmcache or FakeLMCache(),
        care=care,
        run_sync=run_inline,
        wall_clock=wall_clock,
        rng=random.Random(1),
    ) as service:
        yield Agent(service)
