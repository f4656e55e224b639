"""LMCache's configuration as `/conf` shows and changes it: typed values, some of them fixed. Pure.

Setting a value changes the value and nothing else. Read while running are `save_unfull_chunk`
and the limits of the chunk statistics; what the lookup client and server are made from is read
when they are created again. Every other key is kept for those who ask.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ramakv.config import Embedded, resolve_path

UNKNOWN = "Unknown config"
IMMUTABLE = "Config is not mutable at runtime"
FAILED = "Failed to set config value"

TEXT_CHARS_MAX = 4096


class Definition(NamedTuple):
    """One key."""

    convert: Callable[[Any], Any]
    default: Any
    mutable: bool = True


class Updated(NamedTuple):
    """What became of a change: the values as they are now, and why others were refused."""

    updated: dict[str, Any]
    errors: dict[str, str]


def _to_int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str | float):
        raise ValueError
    if isinstance(value, float) and not value.is_integer():
        raise ValueError
    number = int(value)
    if abs(number) >= 2**63:
        raise ValueError
    return number


def _to_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | str | float):
        raise ValueError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    words = {"true": True, "1": True, "false": False, "0": False}
    return words[str(value).strip().lower()]


def _to_text(value: Any) -> str:
    if not isinstance(value, str | int | float) or len(str(value)) > TEXT_CHARS_MAX:
        raise ValueError
    return str(value)


def _to_names(value: Any) -> list[str]:
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, list):
        raise ValueError
    if sum(len(name) for name in map(_to_text, value)) > TEXT_CHARS_MAX:
        raise ValueError
    return [_to_text(name) for name in value]


def _or_null(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else convert(value)


def _definitions(config: Embedded, port: int) -> dict[str, Definition]:
    asynchronous = config.behaviour == "lmcache-0.4.4"  # whose prefetch asks for it
    gigabyte = 2**30
    remote_url = f"fs://localhost:0{resolve_path(config.remote_dir)}" if config.remote_dir else None
    text_or_null, int_or_null = _or_null(_to_text), _or_null(_to_int)
    fixed = {
        "chunk_size": Definition(_to_int, config.chunk_size, mutable=False),
        "local_cpu": Definition(_to_bool, True, mutable=False),
        "max_local_cpu_size": Definition(
            _to_float, config.hot_chunks_max * config.chunk_bytes / gigabyte, mutable=False
        ),
        "local_disk": Definition(text_or_null, str(resolve_path(config.disk_dir)), mutable=False),
        "max_local_disk_size": Definition(
            _to_float, config.disk_chunks_max * config.chunk_bytes / gigabyte, mutable=False
        ),
        "remote_url": Definition(text_or_null, remote_url, mutable=False),
        "lmcache_instance_id": Definition(
            text_or_null, f"lmcacheengineconfig_{uuid.uuid4().hex}", mutable=False
        ),
        "internal_api_server_enabled": Definition(_to_bool, True, mutable=False),
        "internal_api_server_port_start": Definition(_to_int, port, mutable=False),
        "enable_chunk_hashes_return": Definition(_to_bool, True, mutable=False),
    }
    changing = {
        "remote_serde": Definition(_to_text, "naive"),
        "use_layerwise": Definition(_to_bool, False),
        "save_decode_cache": Definition(_to_bool, False),
        "save_unfull_chunk": Definition(_to_bool, False),
        "pre_caching_hash_algorithm": Definition(_to_text, "builtin"),
        "enable_blending": Definition(_to_bool, False),
        "retrieve_locations": Definition(_or_null(_to_names), None),
        "store_location": Definition(text_or_null, None),
        "enable_p2p": Definition(_to_bool, False),
        "enable_controller": Definition(_to_bool, False),
        "enable_pd": Definition(_to_bool, False),
        "blocking_timeout_secs": Definition(_to_int, 10),
        "external_lookup_client": Definition(text_or_null, None),
        "cache_policy": Definition(_to_text, "LRU"),
        "enable_async_loading": Definition(_to_bool, asynchronous),
        "priority_limit": Definition(int_or_null, None),
        "lookup_timeout_ms": Definition(_to_int, 30_000),
        "min_retrieve_tokens": Definition(_to_int, 0),
        "hit_miss_ratio": Definition(_or_null(_to_float), None),
        "lookup_server_worker_ids": Definition(_or_null(_to_names), None),
        "enable_scheduler_bypass_lookup": Definition(_to_bool, False),
        "enable_chunk_statistics": Definition(_to_bool, True),
        "chunk_statistics_auto_start_statistics": Definition(_to_bool, False),
        "chunk_statistics_auto_exit_timeout_hours": Definition(_to_float, 0.0),
        "chunk_statistics_auto_exit_target_unique_chunks": Definition(_to_int, 0),
        "chunk_statistics_strategy": Definition(_to_text, "memory_bloom_filter"),
        "enable_kv_events": Definition(_to_bool, False),
        "pin_timeout_sec": Definition(_to_int, 300),
        "pin_check_interval_sec": Definition(_to_int, 30),
        "lookup_hashes_cache_size": Definition(_to_int, 1024),
    }
    return fixed | changing


class Conf:
    """The values of one process."""

    def __init__(self, config: Embedded, *, port: int = 6999) -> None:
        """Start with the defaults; where this project has a key for it, with that one's value."""
        self._definitions = _definitions(config, port)
        self._all_mutable = config.behaviour == "lmcache-0.4.4"
        self._values = {name: known.default for name, known in self._definitions.items()}

    def __getitem__(self, name: str) -> Any:
        """Return a value."""
        return self._values[name]

    def values(self, names: str | None = None) -> dict[str, Any]:
        """Return all values, or those of a comma-separated list; unknown names are left out."""
        return select(self._values, names)

    def update(self, changes: Mapping[str, Any]) -> Updated:
        """Change what can be changed, each key for itself."""
        result = Updated({}, {})
        for name, value in changes.items():
            known = self._definitions.get(name)
            if known is None:
                result.errors[name] = UNKNOWN
            elif not (known.mutable or self._all_mutable):
                result.errors[name] = IMMUTABLE
            else:
                try:
                    self._values[name] = result.updated[name] = known.convert(value)
                except (ValueError, TypeError, KeyError, OverflowError):
                    result.errors[name] = FAILED
        return result


def select(values: Mapping[str, Any], names: str | None) -> dict[str, Any]:
    """Return the named ones of these values, or all of them."""
    if not names:
        return dict(values)
    return {name: values[name] for name in names.split(",") if name in values}
