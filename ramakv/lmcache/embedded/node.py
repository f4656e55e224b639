"""One port of the engine: its role, and the state that its process would have.

A scheduler has no engine of its own and forwards; a worker has one; a lone engine is both, on
one port, and calls itself a scheduler, because that is where clients look for one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import trio

from ramakv.config import Embedded
from ramakv.core.topology import EMBEDDED_MODEL
from ramakv.lmcache.embedded.conf import Conf
from ramakv.lmcache.embedded.engine import Engine
from ramakv.lmcache.embedded.faults import Faults
from ramakv.lmcache.embedded.kv_cache import KvCache
from ramakv.lmcache.embedded.lookup import Lookup, Role
from ramakv.lmcache.embedded.replies import RefusedError
from ramakv.lmcache.embedded.statistics import ChunkStatistics, ExitConditions
from ramakv.lmcache.embedded.token_cache import TokenCache

NO_ENGINE = "LMCache engine not configured."
MODEL_NAME = EMBEDDED_MODEL


class Node:
    """The state behind one port. Handlers change it in one go, without an await."""

    def __init__(
        self,
        config: Embedded,
        role: Role,
        engine: Engine | None,
        *,
        port_start: int,
        worker_id: int = 0,
        world_size: int = 1,
    ) -> None:
        """Start with everything as configured. `port_start` is the scheduler's port."""
        self.config = config
        self.role = role
        self.engine = engine
        self.port = port_start + (1 + worker_id if role == "worker" else 0)
        self.worker_id = worker_id
        self.world_size = world_size
        self.observed = config.behaviour == "lmcache-0.4.4"
        self.layer_name = "model.layers.{}" if self.observed else "layer_{}"
        self.conf = Conf(config, port=port_start)
        self.lookup = Lookup(self.conf, role, has_engine=engine is not None)
        self.statistics = ChunkStatistics()
        self.faults = Faults(config, 0 if role == "scheduler" else 1 + worker_id)
        self.token_cache: TokenCache | None = None
        if engine is not None:
            engine.on_chunks = self.record_chunks
            self.token_cache = TokenCache(engine, self._make_kv_cache(), self.conf)

    def engine_or_refuse(self, error: str) -> Engine:
        """Return the engine; a scheduler refuses with this error."""
        if self.engine is None:
            raise RefusedError(503, {"error": error, "message": NO_ENGINE})
        return self.engine

    def token_cache_or_refuse(self) -> TokenCache:
        """Return the cache of tokens; a scheduler has none."""
        if self.token_cache is None:
            raise RefusedError(503, {"error": "LMCache API is unavailable", "message": NO_ENGINE})
        return self.token_cache

    @property
    def exit_conditions(self) -> ExitConditions:
        """When the chunk statistics stop by themselves."""
        return ExitConditions(
            timeout_hours=self.conf["chunk_statistics_auto_exit_timeout_hours"],
            target_unique_chunks=self.conf["chunk_statistics_auto_exit_target_unique_chunks"],
        )

    def record_chunks(self, chunk_hashes: Sequence[str]) -> None:
        """Count the chunks of a lookup or store, where the lookup client counts any."""
        if self.lookup.counts_chunks:
            self.statistics.record(chunk_hashes, self.exit_conditions, time.time())

    def create_lookup(self) -> str:
        """Create the lookup client or server; a new client may begin to count by itself."""
        new = self.lookup.create()
        if self.lookup.counts_chunks and self.conf["chunk_statistics_auto_start_statistics"]:
            self.statistics.start(time.time())
        return new

    async def enter(self) -> None:
        """Let a request in: never, when this port hangs; and not before it has met its fault."""
        if self.engine is not None and self.engine.disk_lock.port_hangs:
            await trio.sleep_forever()
        fault = self.faults.draw()
        if fault.latency_seconds:
            await trio.sleep(fault.latency_seconds)
        if fault.hangs:
            await trio.sleep_forever()
        if fault.fails:
            raise RefusedError(500, "injected fault")

    def meta(self) -> dict[str, Any]:
        """Return what `/meta` shows."""
        config = self.config
        return {
            "chunk_size": config.chunk_size,
            "engine_id": self.conf["lmcache_instance_id"],
            "first_rank": 0,
            "kv_connector_extra_config": None,
            "kv_dtype": "torch.uint8",
            "kv_layer_groups_manager": "KVLayerGroupsManager(kv_layer_groups=[])",
            "kv_shape": [config.kv_layers, 1, config.chunk_size, 1, config.kv_slot_bytes],
            "local_worker_id": self.worker_id,
            "local_world_size": self.world_size,
            "model_name": MODEL_NAME,
            "role": self.role,
            "served_model_name": None,
            "use_mla": False,
            "worker_id": self.worker_id,
            "world_size": self.world_size,
        }

    def _make_kv_cache(self) -> KvCache:
        config = self.config
        return KvCache(
            layers=config.kv_layers,
            slots=max(config.kv_slots, config.chunk_size),
            slot_bytes=config.kv_slot_bytes,
            worker_id=self.worker_id,
            layer_name=self.layer_name,
        )
