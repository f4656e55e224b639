"""The bound: a hot tier that knows the future, and lets go what is next used farthest off. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from bench.residency.engine import Found

NEVER = 1 << 40
_PLACES = 1 << 20
"""More than a request has blocks."""


def replay(requests: Sequence[Sequence[str]], capacity: int) -> Iterator[Found]:
    """Say where each request's blocks are found, with a disk that holds everything.

    Every block of a request is stored, as an engine does it; then what is too much goes, which
    may be a block just stored. Of those next used by the same request the one farthest back in
    its prefix goes first: a block is of no use without those before it.
    """
    next_uses = _next_uses(requests)
    hot: dict[str, int] = {}
    """Block → when it is used next, as in the heap."""
    farthest: list[tuple[int, str]] = []
    seen: set[str] = set()
    for blocks, uses in zip(requests, next_uses, strict=True):
        found = _prefix(blocks, hot)
        known = _prefix(blocks, seen)
        yield Found(found, known - found, len(blocks) - known)
        seen.update(blocks)
        for place, (block, use) in enumerate(zip(blocks, uses, strict=True)):
            hot[block] = when = use * _PLACES + place
            heapq.heappush(farthest, (-when, block))
        while len(hot) > capacity:
            _let_go(hot, farthest)


def _let_go(hot: dict[str, int], farthest: list[tuple[int, str]]) -> None:
    while True:
        when, block = heapq.heappop(farthest)
        if hot.get(block) == -when:  # else it was used since, or has gone
            del hot[block]
            return


def _prefix(blocks: Sequence[str], held: dict[str, int] | set[str]) -> int:
    for place, block in enumerate(blocks):
        if block not in held:
            return place
    return len(blocks)


def _next_uses(requests: Sequence[Sequence[str]]) -> list[list[int]]:
    """Return for each block of each request the number of the next request that has it."""
    following: dict[str, int] = {}
    uses: list[list[int]] = []
    for number in range(len(requests) - 1, -1, -1):
        blocks = requests[number]
        uses.append([following.get(block, NEVER) for block in blocks])
        following.update(dict.fromkeys(blocks, number))
    uses.reverse()
    return uses
