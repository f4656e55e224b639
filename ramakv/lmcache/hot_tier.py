"""Finds out how many chunks LMCache's hot tier holds, and whether residency may act on it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from ramakv.config import Config
from ramakv.core.topology import EMBEDDED_MODEL
from ramakv.errors import BackendError
from ramakv.lmcache.answers import EngineMeta
from ramakv.lmcache.inspecting import LMCacheInspector

_SETTINGS = ("local_cpu", "max_local_cpu_size", "cache_policy", "local_disk", "remote_url")

_BYTES_OF = {"64": 8, "32": 4, "16": 2, "8": 1}
_BITS = re.compile(r"(?:float|int)(64|32|16|8)")

_LEAKS_BELOW = (0, 5)
"""Seen in 0.4.4, whose lookup frees what a prefetch took only for a request of the same id."""


@dataclass(frozen=True, slots=True)
class HotTierFound:
    """The hot tier: how many chunks it holds, and why residency must not act on it, if so."""

    chunks_max: int
    obstacle: str = ""
    has_slower_tier: bool = True
    """Whether a chunk that leaves the hot tier is somewhere yet."""


async def find_hot_tier(config: Config) -> HotTierFound:
    """Ask LMCache, where the configuration does not say. Raises BackendError."""
    wanted = config.residency.hot_chunks_max
    if config.backend_kind == "noop":
        return HotTierFound(0, "there is no LMCache: the backend is noop")
    if config.backend_kind == "embedded":
        leaks = config.embedded.behaviour == "lmcache-0.4.4"
        chunks = config.embedded.hot_chunks_max if wanted == "auto" else wanted
        return HotTierFound(chunks, _leak("0.4.4") if leaks else "")
    seconds = config.backend.connect_timeout_seconds
    async with LMCacheInspector(
        config.lmcache_url,
        connect_timeout_seconds=seconds,
        call_timeout_seconds=seconds,
        connections_max=1,
    ) as inspector:
        version = await inspector.lmc_version()
        meta = await inspector.meta()
        settings = await inspector.conf(_SETTINGS)
    chunks = hot_chunks(settings, meta) if wanted == "auto" else wanted
    slower = bool(settings.get("local_disk") or settings.get("remote_url"))
    return HotTierFound(chunks, _obstacle(version, meta, settings), slower)


def hot_chunks(settings: dict[str, Any], meta: EngineMeta) -> int:
    """Work out how many chunks fit into `max_local_cpu_size` GiB. Raises BackendError."""
    bits = _BITS.search(meta.kv_dtype or "")
    size = settings.get("max_local_cpu_size")
    if bits is None or not meta.kv_shape or not isinstance(size, int | float):
        raise BackendError(
            "LMCache does not say max_local_cpu_size, kv_shape and kv_dtype; set "
            "residency.hot_chunks_max to the number of chunks that its hot tier holds"
        )
    chunk_bytes = math.prod(meta.kv_shape) * _BYTES_OF[bits[1]]
    return max(1, int(size * 2**30 / max(1, chunk_bytes)))


def _obstacle(version: str, meta: EngineMeta, settings: dict[str, Any]) -> str:
    if settings.get("local_cpu") is False:
        return "LMCache has no hot tier: local_cpu is off"
    if str(settings.get("cache_policy", "LRU")).upper() != "LRU":
        return f"LMCache's cache_policy is {settings['cache_policy']}; residency knows LRU only"
    if meta.model_name == EMBEDDED_MODEL:
        return ""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    return _leak(version or "of unknown version") if numbers < _LEAKS_BELOW else ""


def _leak(version: str) -> str:
    return (
        f"LMCache {version} never frees what a prefetch brought up; each one of residency's "
        "would take room from the hot tier for good"
    )
