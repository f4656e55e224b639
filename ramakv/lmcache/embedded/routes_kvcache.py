"""Routes over the KV cache itself: checksums, its shape, and the recording of slots."""

from __future__ import annotations

from typing import Any

from quart import Response, request
from quart_trio import QuartTrio

from ramakv.lmcache.embedded.kv_cache import KvCache
from ramakv.lmcache.embedded.node import Node
from ramakv.lmcache.embedded.replies import (
    RefusedError,
    query_bool,
    query_int,
    refuse,
    reply,
)
from ramakv.lmcache.embedded.slots import SlotBoundsError, parse_slot_mapping, slot_ranges


def add_kvcache_routes(app: QuartTrio, node: Node) -> None:
    """Add `/cache/kvcache/*`."""

    @app.get("/cache/kvcache/check")
    async def check() -> Response:
        layerwise, chunk_size = query_bool("layerwise"), query_int("chunk_size")
        kv_cache = _kv_cache(node)
        slots = _slots(kv_cache)
        _refuse_chunk_size(chunk_size, node)
        checksums: list[str] | dict[str, list[str]] = []
        if layerwise and chunk_size:
            checksums = kv_cache.layer_checksums(slots, chunk_size)
        elif chunk_size:
            checksums = kv_cache.checksums(slots, chunk_size)
        return reply(
            {
                "status": "success",
                "slot_mapping_ranges": slot_ranges(slots),
                "chunk_size": chunk_size,
                "num_chunks": -(-len(slots) // chunk_size) if chunk_size else 0,
                "chunk_checksums": checksums,
                "layerwise": layerwise,
            }
        )

    @app.post("/cache/kvcache/record_slot")
    async def record_slot() -> Response:
        wanted = request.args.get("enabled")
        if wanted is not None and wanted.lower() not in ("true", "false"):
            raise refuse(400, "Invalid parameter", "enabled must be 'true' or 'false'")
        cache = node.token_cache
        if cache is not None and wanted is not None:
            cache.records_slots = wanted.lower() == "true"
        elif wanted is not None:
            message = "'NoneType' object has no attribute 'kvcache_check_log_enabled'"
            raise refuse(500, "Failed to set record slot status", message)
        enabled = cache is not None and cache.records_slots
        return reply({"status": "success", "kvcache_check_log_enabled": enabled})

    @app.get("/cache/kvcache/info")
    async def info() -> Response:
        if node.observed:  # it reads a misspelt attribute there
            raise _no_kv_caches()
        layers: dict[str, Any] = {**_kv_cache(node).info()}
        return reply({"status": "success", "num_layers": len(layers), "layers": layers})


def _kv_cache(node: Node) -> KvCache:
    if node.token_cache is None:
        raise _no_kv_caches()
    return node.token_cache.kv_cache


def _no_kv_caches() -> RefusedError:
    message = "kv_caches is empty or not initialized"
    return refuse(404, "kv_caches not available", message)


def _slots(kv_cache: KvCache) -> list[int]:
    text = request.args.get("slot_mapping")
    if not text:
        raise refuse(400, "Missing parameters", "slot_mapping parameter is required")
    try:
        return parse_slot_mapping(text, kv_cache.slots)
    except SlotBoundsError as error:
        raise refuse(400, "Invalid slot indices", str(error)) from error
    except ValueError as error:
        what = "slot_mapping must be comma-separated integers or ranges like [start,end]"
        raise refuse(400, "Invalid slot_mapping format", f"{what}: {error}") from error


def _refuse_chunk_size(chunk_size: int | None, node: Node) -> None:
    if chunk_size is None and not node.observed:
        raise refuse(400, "Missing parameters", "chunk_size parameter is required")
    if chunk_size is not None and chunk_size <= 0:
        raise refuse(400, "Invalid chunk_size", "chunk_size must be a positive integer")
