"""Chunk maps: ordered hashes of the chunks that a session's context is made of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

ChunkHash = str
"""Prefix-chained key of one chunk: opaque text, as the engine reports it."""

ChunkMap = tuple[ChunkHash, ...]
"""Hashes in prefix order, as a turn_end listed them; a hash may stand in it twice."""


class Diff(NamedTuple):
    """What a new map adds to an old one and takes from it, each hash once, in map order."""

    added: ChunkMap
    removed: ChunkMap


def distinct(hashes: Iterable[ChunkHash]) -> ChunkMap:
    """Each hash once, in the order of its first place."""
    return tuple(dict.fromkeys(hashes))


def diff(old: ChunkMap, new: ChunkMap) -> Diff:
    """Compare two maps as sets; the order of the result follows the maps."""
    if old == new:
        return Diff((), ())
    before, after = dict.fromkeys(old), dict.fromkeys(new)
    return Diff(
        added=tuple([chunk for chunk in after if chunk not in before]),
        removed=tuple([chunk for chunk in before if chunk not in after]),
    )
