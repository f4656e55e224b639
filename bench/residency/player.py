"""Plays a trace to a coordinator and an engine, in virtual time."""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from bench import virtual_time
from bench.residency import future
from bench.residency.coordinators import (
    Coordinator,
    Nobody,
    Ramakv,
    open_ramakv,
    open_rust_daemon,
    ramakv_config,
)
from bench.residency.costs import MODELS
from bench.residency.engine import EngineTransport, ReplayEngine, open_replay_engine
from bench.residency.meter import Meter
from bench.residency.tally import Tally, first_token_seconds
from bench.residency.trace import Trace, Turn

BASELINES = ("lru", "rust", "future")
POLICIES = ("off", "sticky", "auto")
ALL = ("lru", "rust", *POLICIES, "future")
"""In the order in which a report shows them."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a replay is made with."""

    share: float
    """Capacity of the hot tier, of the trace's distinct blocks."""
    policy: str
    model: str = "8b"
    """Whose disk the prefetches wait for, and whose turns last where the trace does not say."""
    disk_share: float = 1.0
    call_seconds: float = 0.002
    """From the daemon to LMCache and back."""
    suspend_after_seconds: float = 300.0
    """When the Rust daemon's agents suspend a session that pauses."""
    seed: int = 0
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Of ramakv's configuration, by dotted key."""


def check(setting: Setting) -> None:
    """Raise ConfigError where there is no such replay."""
    if setting.policy not in BASELINES:
        ramakv_config(Path(), setting.policy, 1, setting.overrides)


def replay(
    trace: Trace, setting: Setting, on_turn: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Replay a trace and return what came of it. Raises ConfigError."""
    began, cpu = time.perf_counter(), time.process_time()
    capacity = trace.capacity(setting.share)
    tally = Tally(trace.block_tokens)
    if setting.policy == "future":
        found = future.replay([turn.hashes for turn in trace.turns], capacity)
        for turn, where in zip(trace.turns, found, strict=True):
            tally.add(turn.request, where, 0.0)
            on_turn()
        more: dict[str, Any] = _no_calls()
    else:
        with tempfile.TemporaryDirectory(prefix="ramakv-residency-", dir=_memory()) as folder:
            player = _Player(trace, setting, capacity, tally, Path(folder), on_turn)
            virtual_time.run(player.run, seed=setting.seed, instruments=[player.meter])
            more = player.counted()
    return {
        "share": setting.share,
        "policy": setting.policy,
        **tally.summary(setting.model),
        **more,
        "hot_chunks": capacity,
        "turns": tally.turns,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
    }


def _memory() -> str | None:
    """Return a folder in memory, where there is one: the disk is not what is measured."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _no_calls() -> dict[str, Any]:
    return {"evict_calls_per_turn": 0.0, "prefetch_calls_per_turn": 0.0}


class _Player:
    """One replay: sessions side by side, each turn when the trace says."""

    def __init__(
        self,
        trace: Trace,
        setting: Setting,
        capacity: int,
        tally: Tally,
        folder: Path,
        on_turn: Callable[[], None],
    ) -> None:
        self._trace = trace
        self._setting = setting
        self._capacity = capacity
        self._tally = tally
        self._folder = folder
        self._on_turn = on_turn
        self._model = MODELS[setting.model]
        self.meter = Meter()
        self._counted: dict[str, Any] = {}

    async def run(self) -> None:
        """Play all turns, and count the calls that were made by the end of the last one."""
        trace, setting = self._trace, self._setting
        disk_chunks = trace.capacity(setting.disk_share)
        read_seconds = self._model.disk_seconds(trace.block_tokens)
        async with open_replay_engine(
            self._folder,
            hot_chunks=self._capacity,
            disk_chunks=disk_chunks,
            disk_read_seconds=read_seconds,
        ) as engine:
            transport = EngineTransport(engine.engine, setting.call_seconds, self.meter)
            async with self._coordinator(transport) as coordinator:
                began = trio.current_time() - trace.turns[0].request.t
                async with trio.open_nursery() as nursery:
                    for turn in trace.turns:
                        await trio.sleep_until(began + turn.request.t)
                        nursery.start_soon(self._play, turn, engine, coordinator)
                self._count(transport, coordinator)

    def counted(self) -> dict[str, Any]:
        """Return the calls, and what they cost."""
        return self._counted

    @asynccontextmanager
    async def _coordinator(self, transport: EngineTransport) -> AsyncIterator[Coordinator]:
        setting = self._setting
        if setting.policy == "lru":
            yield Nobody()
        elif setting.policy == "rust":
            async with open_rust_daemon(transport, setting.suspend_after_seconds) as rust:
                yield rust
        else:
            config = ramakv_config(self._folder, setting.policy, self._capacity, setting.overrides)
            async with open_ramakv(config, transport, setting.seed) as ramakv:
                yield ramakv

    async def _play(self, turn: Turn, engine: ReplayEngine, coordinator: Coordinator) -> None:
        arrived, request = trio.current_time(), turn.request
        await coordinator.turn_start(turn)
        with self.meter.counting("engine"):
            found = await engine.serve(turn.hashes)
        self._tally.add(request, found, trio.current_time() - arrived)
        seconds = request.dur
        if seconds is None:
            seconds = first_token_seconds(self._model, request, found, self._trace.block_tokens)
            seconds += request.tokens_out / self._model.decode_tokens_per_second
        await trio.sleep_until(arrived + seconds)
        await coordinator.turn_end(turn)
        self._on_turn()

    def _count(self, transport: EngineTransport, coordinator: Coordinator) -> None:
        turns = len(self._trace.turns)
        prefetches = transport.engine.statistics().prefetches
        self._counted = {
            "evict_calls_per_turn": transport.calls["evict"] / turns,
            "prefetch_calls_per_turn": transport.calls["prefetch"] / turns,
            "evict_chunks_per_turn": transport.chunks["evict"] / turns,
            "prefetch_chunks_per_turn": transport.chunks["prefetch"] / turns,
            "loaded_chunks_per_turn": prefetches.chunks_loaded / turns,
            "calls_failed": sum(transport.failed.values()),
        }
        self._counted["cpu_seconds_of"] = dict(self.meter.seconds)
        if isinstance(coordinator, Ramakv):
            daemon = self.meter.seconds["daemon"]
            self._counted["events"] = coordinator.events_sent
            self._counted["events_refused"] = sum(coordinator.refused.values())
            self._counted["daemon_cpu_us_per_event"] = 1e6 * daemon / coordinator.events_sent
