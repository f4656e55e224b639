"""A trace as the replay wants it: held in memory, each block's hash there once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ramakv.commands.trace import Request, chunk_hash, read_trace
from ramakv.errors import ConfigError

USUAL_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Turn:
    """One request, and the hashes of its blocks in prefix order."""

    request: Request
    hashes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """All turns in the order of their arrival."""

    name: str
    turns: tuple[Turn, ...]
    distinct_blocks: int
    block_tokens: int

    @property
    def blocks(self) -> int:
        """How many blocks all requests have together."""
        return sum(len(turn.hashes) for turn in self.turns)

    def capacity(self, share: float) -> int:
        """Return how many blocks a tier holds that has this share of the distinct ones."""
        return max(1, int(share * self.distinct_blocks))


def load(path: Path, limit: int | None = None) -> Trace:
    """Read a trace, or its first `limit` requests. Raises ConfigError."""
    known: dict[int, str] = {}
    turns = []
    for request in read_trace(path, limit):
        for block in request.hashes:
            if block not in known:
                known[block] = chunk_hash(block)
        turns.append(Turn(request, tuple(map(known.__getitem__, request.hashes))))
    if not known:
        raise ConfigError(f"{path}: holds no request with blocks")
    return Trace(path.name.split(".")[0], tuple(turns), len(known), _block_tokens(turns))


def _block_tokens(turns: list[Turn]) -> int:
    """Return how many tokens a block has: as many as most requests say.

    The last block of a request may be partial, so its tokens lie between so many whole blocks.
    """
    most = sum(len(turn.hashes) for turn in turns)
    tokens = sum(turn.request.tokens_in for turn in turns if turn.hashes)
    estimate = tokens / most
    # Half a block of each request lies beyond its last whole one; powers of two are usual.
    sizes = [1 << power for power in range(4, 14)]
    return min(sizes, key=lambda size: abs(size - estimate))
