"""What the embedded engine answers: the fields of each reply, in the order they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from ramakv.lmcache.embedded.disk import DiskStatistics
from ramakv.lmcache.embedded.tiers import TierStatistics


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a store."""

    status: Literal["success"] = "success"
    num_chunks: int
    num_stored: int
    """Chunks that were not in the hot tier before."""
    num_written: int
    """Chunks written to disk."""


class Retrieved(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a retrieve: the usable prefix, by the tier it was found in, and the rest."""

    status: Literal["success"] = "success"
    num_chunks: int
    found: dict[str, int]
    num_missing: int
    missing: Sequence[str]


class PrefetchStarted(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a prefetch, given before any chunk is loaded."""

    status: Literal["prefetch_started"] = "prefetch_started"
    lookup_id: str | int
    num_chunks: int


class Evicted(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to an evict: removals, summed over the tiers."""

    status: Literal["success"] = "success"
    num_evicted: int


class PrefetchStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the prefetches since the start."""

    started: int
    finished: int
    """Of those started, the ones that have loaded what they could."""
    refused: int
    chunks_hot: int
    """Chunks that were in the hot tier already."""
    chunks_loaded: int
    """Chunks brought from disk into the hot tier."""


class EngineStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the whole engine."""

    tiers: dict[str, TierStatistics | DiskStatistics]
    prefetches: PrefetchStatistics
