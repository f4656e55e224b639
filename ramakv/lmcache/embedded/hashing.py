"""Tokens and their chunks: mock tokens, and the prefix-chained hash of each chunk. Pure.

A chunk's hash is that of the hash before it and of its tokens, so equal hashes stand for equal
prefixes. It is a signed 64-bit number, written as Python writes it in hex: `-af2f5548dde4cdb`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

TOKENS_PER_CALL_MAX = 1_048_576

_TOKEN_MIN, _TOKEN_MAX = -(2**63), 2**63 - 1


class TokenChunk(NamedTuple):
    """A run of tokens that is stored as one unit."""

    chunk_hash: str
    first: int
    """Position of its first token."""
    tokens: int


def parse_tokens_mock(text: str) -> range:
    """Read `"start,end"`. Raises ValueError with the reason LMCache gives."""
    numbers = text.split(",")
    if len(numbers) != 2:
        raise ValueError("tokens_mock must contain exactly 2 numbers")
    start, end = int(numbers[0]), int(numbers[1])
    if start >= end:
        raise ValueError("start must be less than end")
    if start < _TOKEN_MIN or end > _TOKEN_MAX or end - start > TOKENS_PER_CALL_MAX:
        raise ValueError(f"there may be at most {TOKENS_PER_CALL_MAX} tokens of 64 bits")
    return range(start, end)


def split_tokens(
    tokens: Sequence[int], chunk_size: int, *, keep_last: bool = False
) -> list[TokenChunk]:
    """Return the full chunks of these tokens, and with `keep_last` the rest as one more."""
    chunks: list[TokenChunk] = []
    before = b""
    for first in range(0, len(tokens), chunk_size):
        run = tokens[first : first + chunk_size]
        if len(run) < chunk_size and not keep_last:
            break
        before = blake2b(
            before + struct.pack(f"<{len(run)}q", *run), digest_size=8, person=b"ramakv-chunk"
        ).digest()
        number = int.from_bytes(before, "big", signed=True)
        chunks.append(TokenChunk(format(number, "x"), first, len(run)))
    return chunks
