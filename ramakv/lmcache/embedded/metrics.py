"""`GET /metrics`: the engine's state as Prometheus text, under LMCache's names. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from ramakv.lmcache.embedded.engine import Engine
from ramakv.lmcache.embedded.tiers import DISK_LOCATION, HOT_LOCATION, REMOTE_LOCATION

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_GAUGE, _COUNTER = "gauge", "counter"


def prometheus_text(engine: Engine, labels: Mapping[str, str]) -> str:
    """Return every metric of the engine with these labels."""
    statistics = engine.statistics()
    tiers, prefetches = statistics.tiers, statistics.prefetches
    hot, disk = tiers[HOT_LOCATION], tiers[DISK_LOCATION]
    remote_bytes = tiers[REMOTE_LOCATION].payload_bytes if REMOTE_LOCATION in tiers else 0
    metrics = [
        ("local_cpu_evict_count_total", _COUNTER, "Chunks displaced", hot.evictions_lru),
        ("forced_unpin_count_total", _COUNTER, "Pins that timed out", 0),
        ("local_cache_usage", _GAUGE, "Bytes in the hot tier", hot.payload_bytes),
        ("local_storage_usage", _GAUGE, "Bytes in the disk tier", disk.payload_bytes),
        ("remote_cache_usage", _GAUGE, "Bytes in the remote tier", remote_bytes),
        ("pinned_memory_objs_count", _GAUGE, "Chunks held", engine.pinned),
        ("local_cpu_hot_cache_count", _GAUGE, "Chunks in the hot tier", hot.chunks),
        ("pin_monitor_pinned_objects_count", _GAUGE, "Chunks held", engine.pinned),
        (
            "storage_events_ongoing_count",
            _GAUGE,
            "Prefetches in progress",
            engine.prefetches_in_progress,
        ),
        (
            "storage_events_done_count",
            _GAUGE,
            "Prefetches done that nobody consumed",
            engine.prefetches_unconsumed,
        ),
        ("storage_events_not_found_count", _GAUGE, "Prefetches not found", 0),
        ("num_retrieve_hit_chunks_total", _COUNTER, "Chunks retrieved hot", hot.hits),
        ("num_prefetched_chunks_total", _COUNTER, "Chunks loaded", prefetches.chunks_loaded),
    ]
    told = ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())
    return "".join(
        f"# HELP lmcache:{name} {help_text}.\n# TYPE lmcache:{name} {kind}\n"
        f"lmcache:{name}{{{told}}} {float(value)}\n"
        for name, kind, help_text, value in metrics
    )


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
