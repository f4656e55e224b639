"""The calls that a scheduler forwards: `/memory/*` of LMCache-Ascend, and `/engine/*` of ours.

Each takes a node and the body as it came, so that a worker's port and a scheduler's forwarding
give the same answer. An absent, null or empty `chunk_hashes` is answered with 400, a body that
cannot be decoded with 500, as a real worker does.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from ramakv.lmcache.embedded.engine import Engine
from ramakv.lmcache.embedded.node import Node
from ramakv.lmcache.embedded.replies import RefusedError
from ramakv.lmcache.embedded.tiers import DISK_LOCATION, HOT_LOCATION, REMOTE_LOCATION

CHUNKS_PER_CALL_MAX = 1_000_000
HASH_CHARS_MAX = 1024

_HASHES_REQUIRED = "chunk_hashes is required"
_HASHES_AND_ID_REQUIRED = "chunk_hashes and lookup_id are required"

ChunkHash = Annotated[str, Meta(min_length=1, max_length=HASH_CHARS_MAX)]
LookupId = str | Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class ChunksBody(msgspec.Struct, kw_only=True):
    """Body of most calls."""

    chunk_hashes: Annotated[list[ChunkHash], Meta(max_length=CHUNKS_PER_CALL_MAX)] | None = None


class LookupBody(ChunksBody, kw_only=True):
    """Body of a prefetch, or of a retrieve that consumes one."""

    lookup_id: LookupId | None = None


class EvictBody(ChunksBody, kw_only=True):
    """Body of an evict. Null locations are all of them."""

    locations: list[str] | None = None


B = TypeVar("B", bound=ChunksBody)

_chunks_decoder = msgspec.json.Decoder(ChunksBody)
_lookup_decoder = msgspec.json.Decoder(LookupBody)
_evict_decoder = msgspec.json.Decoder(EvictBody)


async def _prefetch(node: Node, data: bytes) -> object:
    body = _decode(node, data, _lookup_decoder)
    if not body.chunk_hashes or not body.lookup_id:
        raise RefusedError(400, _HASHES_AND_ID_REQUIRED)
    return _engine(node).prefetch(body.chunk_hashes, body.lookup_id)


async def _evict(node: Node, data: bytes) -> object:
    body = _decode(node, data, _evict_decoder)
    return await _engine(node).evict(_hashes(body), body.locations)


async def _query(node: Node, data: bytes) -> object:
    return _engine(node).query(_hashes(_decode(node, data, _chunks_decoder)))


async def _store(node: Node, data: bytes) -> object:
    return await _engine(node).store(_hashes(_decode(node, data, _chunks_decoder)))


async def _retrieve(node: Node, data: bytes) -> object:
    body = _decode(node, data, _lookup_decoder)
    hashes = _hashes(body)
    if body.lookup_id is not None:
        _engine(node).consume(body.lookup_id)
    return await _engine(node).retrieve(hashes)


async def _statistics(node: Node, _: bytes) -> object:
    return _engine(node).statistics()


Call = Callable[[Node, bytes], Awaitable[object]]

CALLS: Mapping[str, tuple[str, Call]] = {
    "/memory/prefetch": ("POST", _prefetch),
    "/memory/evict": ("POST", _evict),
    "/memory/query": ("POST", _query),
    "/engine/store": ("POST", _store),
    "/engine/retrieve": ("POST", _retrieve),
    "/engine/stats": ("GET", _statistics),
}
"""Method and implementation of each, by path."""


def chunks_of(data: bytes) -> list[str]:
    """Return the chunks that a body names, or none: the workers say what is wrong with it."""
    try:
        return _chunks_decoder.decode(data).chunk_hashes or []
    except (msgspec.DecodeError, RecursionError):
        return []


def _engine(node: Node) -> Engine:
    return node.engine_or_refuse("LMCache API is unavailable")


def _decode(node: Node, data: bytes, decoder: msgspec.json.Decoder[B]) -> B:
    try:
        if node.observed:
            data = json.dumps(_observed_body(data)).encode()
        return decoder.decode(data)
    except (msgspec.DecodeError, ValueError, TypeError, AttributeError) as exc:
        raise RefusedError(500, str(exc)) from exc
    except RecursionError as exc:
        raise RefusedError(500, "the body is nested too deeply") from exc


def _observed_body(data: bytes) -> dict[str, Any]:
    """Decode a body as LMCache 0.4.4 does: hashes are numbers in hex, and all of them must be.

    A text in place of a list is a list of its characters. Raises what Python raises.
    """
    body = json.loads(data)
    if not isinstance(body, dict):
        raise AttributeError(f"{type(body).__name__!r} object has no attribute 'get'")
    hashes = body.get("chunk_hashes")
    if hashes:
        body["chunk_hashes"] = [format(int(chunk_hash, 16), "x") for chunk_hash in hashes]
    if isinstance(locations := body.get("locations"), str):
        body["locations"] = _named_in(locations)
    return body


def _named_in(text: str) -> list[str]:
    """Return the locations that a text names anywhere."""
    return [name for name in (HOT_LOCATION, DISK_LOCATION, REMOTE_LOCATION) if name in text]


def _hashes(body: ChunksBody) -> list[str]:
    if not body.chunk_hashes:
        raise RefusedError(400, _HASHES_REQUIRED)
    return body.chunk_hashes
