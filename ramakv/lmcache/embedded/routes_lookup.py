"""Routes of the lookup client and server, and of the chunk statistics that the client keeps."""

from __future__ import annotations

import time
from typing import Any

from quart import Response
from quart_trio import QuartTrio

from ramakv.lmcache.embedded.lookup import Lookup
from ramakv.lmcache.embedded.node import Node
from ramakv.lmcache.embedded.replies import RefusedError, query_bool, refuse, reply
from ramakv.lmcache.embedded.statistics import ChunkStatistics


def add_lookup_routes(app: QuartTrio, node: Node) -> None:
    """Add `/lookup/*`. A changed configuration takes effect with create or recreate."""
    lookup = node.lookup

    @app.get("/lookup/info")
    async def lookup_info() -> Response:
        answer = {"client": lookup.client or "None", "server": lookup.server or "None"}
        return reply(answer if node.observed else answer | {"role": lookup.role})

    @app.post("/lookup/close")
    async def lookup_close() -> Response:
        return reply({"old": lookup.close() or "None", "role": lookup.role})

    @app.post("/lookup/create")
    async def lookup_create() -> Response:
        if query_bool("dryrun"):
            return reply({"new": lookup.planned, "dryrun": True, "role": lookup.role})
        return reply({"new": node.create_lookup(), "role": lookup.role})

    @app.post("/lookup/recreate")
    async def lookup_recreate() -> Response:
        if lookup.current is None:
            error = f"lookup {lookup.kind} not available"
            raise RefusedError(400, {"error": error, "role": lookup.role})
        old = lookup.close()
        return reply({"old": old, "new": node.create_lookup(), "role": lookup.role})


def add_statistics_routes(app: QuartTrio, node: Node) -> None:
    """Add `/chunk_statistics/*`."""

    def done(message: str) -> Response:
        return reply({"status": "success", "message": message})

    @app.post("/chunk_statistics/start")
    async def statistics_start() -> Response:
        _statistics(node).start(time.time())
        return done("Started")

    @app.post("/chunk_statistics/stop")
    async def statistics_stop() -> Response:
        _statistics(node).stop()
        return done("Stopped")

    @app.post("/chunk_statistics/reset")
    async def statistics_reset() -> Response:
        _statistics(node).reset(time.time())
        return done("Reset")

    @app.get("/chunk_statistics/status")
    async def statistics_status() -> Response:
        _statistics(node)
        return reply(_observed_status(node) if node.observed else _status(node))


def _statistics(node: Node) -> ChunkStatistics:
    """Return the statistics, or refuse where the lookup client keeps none."""
    if _has_no_client(node.lookup, observed=node.observed):
        raise refuse(503, "API unavailable", "Lookup client not configured.")
    if not node.lookup.counts_chunks:
        raise refuse(400, "Not available", "Client does not support statistics.")
    return node.statistics


def _has_no_client(lookup: Lookup, *, observed: bool) -> bool:
    """Say whether nobody could keep statistics: documented, a worker keeps its own."""
    return (lookup.client if observed else lookup.current) is None


def _status(node: Node) -> dict[str, Any]:
    statistics, conditions, now = node.statistics, node.exit_conditions, time.time()
    return {
        "is_collecting": statistics.is_collecting(conditions, now),
        "total_chunks": statistics.total_chunks,
        "unique_chunks": statistics.unique_chunks,
        "timestamp": now,
        "auto_exit_enabled": conditions.enabled,
        "auto_exit_timeout_hours": conditions.timeout_hours,
        "auto_exit_target_unique_chunks": conditions.target_unique_chunks,
    }


def _observed_status(node: Node) -> dict[str, Any]:
    """Return what LMCache 0.4.4 reports; its times, and its queue, are those of an idle one."""
    statistics, status = node.statistics, _status(node)
    total, duplicates = statistics.total_chunks, statistics.duplicate_chunks
    timing = ("lookup", "record_statistics", "check_exit_conditions", "total", "overhead")
    return {
        "enabled": status["is_collecting"],
        "total_requests": statistics.total_requests,
        "timing": {f"{name}_time_seconds": 0.0 for name in timing} | {"overhead_percentage": 0.0},
        "total_chunks": total,
        "unique_chunks": statistics.unique_chunks,
        "duplicate_chunks": duplicates,
        "reuse_rate": duplicates / total if total else 0.0,
        "bloom_filter": _bloom_filter(statistics.unique_chunks),
        "async_queue": {
            "capacity": 100_000,
            "current_size": 0,
            "max_size_reached": 0,
            "full_blocks": 0,
            "utilization": 0.0,
        },
        "timestamp": status["timestamp"],
        "auto_exit_enabled": True,
        "auto_exit_timeout_hours": status["auto_exit_timeout_hours"],
        "auto_exit_target_unique_chunks": status["auto_exit_target_unique_chunks"],
    }


def _bloom_filter(items: int) -> dict[str, Any]:
    """Return what a Bloom filter of LMCache's size says of itself with so many items in it."""
    bits, bits_set = 22.852559089660645 * 2**23, 6 * items
    return {
        "size_mb": bits / 2**23,
        "hash_count": 6,
        "item_count": items,
        "bits_set": bits_set,
        "fill_rate": bits_set / bits,
        "expected_elements": 20_000_000,
        "false_positive_rate": 0.01,
    }
