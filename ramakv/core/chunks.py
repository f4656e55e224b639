"""Chunk maps: ordered hashes of the chunks that a session's context is made of."""

from __future__ import annotations

import operator
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
    alike: int
    """How many hashes the two begin with in common."""


def distinct(hashes: Iterable[ChunkHash]) -> ChunkMap:
    """Each hash once, in the order of its first place."""
    return tuple(dict.fromkeys(hashes))


def diff(old: ChunkMap, new: ChunkMap) -> Diff:
    """Compare two maps as sets; the order of the result follows the maps.

    Hashes are chained, so two maps of a session begin alike: that part costs a comparison each,
    and nothing is hashed for it.
    """
    alike = _alike(old, new)
    before, after = dict.fromkeys(old[alike:]), dict.fromkeys(new[alike:])
    added = [chunk for chunk in after if chunk not in before]
    removed = [chunk for chunk in before if chunk not in after]
    if not {*added, *removed}.isdisjoint(old[:alike]):  # listed again further on
        kept = set(old[:alike])
        added = [chunk for chunk in added if chunk not in kept]
        removed = [chunk for chunk in removed if chunk not in kept]
    return Diff(tuple(added), tuple(removed), alike)


def _alike(old: ChunkMap, new: ChunkMap) -> int:
    """How many hashes two maps begin with in common."""
    try:
        return operator.indexOf(map(operator.ne, old, new), True)
    except ValueError:
        return min(len(old), len(new))
