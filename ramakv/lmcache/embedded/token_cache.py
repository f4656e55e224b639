"""Tokens in and out of the cache: what an inference engine does before and after a request.

A store computes the KV of its tokens into the slots 0, 1, … (as the model would) and then
saves the slots of each full chunk; a retrieve puts saved chunks back into the slots. So what
`/cache/kvcache/check` says after a retrieve is what it said after the store, whatever was
computed in between.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ramakv.lmcache.embedded.conf import Conf
from ramakv.lmcache.embedded.engine import Engine
from ramakv.lmcache.embedded.hashing import TokenChunk, split_tokens
from ramakv.lmcache.embedded.kv_cache import KvCache
from ramakv.lmcache.embedded.slots import slot_ranges

_log = logging.getLogger(__name__)


class TokenCache:
    """The KV cache of a worker, and the way between it and the engine's tiers."""

    def __init__(self, engine: Engine, kv_cache: KvCache, conf: Conf) -> None:
        """Save to and load from this engine."""
        self.kv_cache = kv_cache
        self.records_slots = False
        self._engine = engine
        self._conf = conf

    async def store(self, tokens: Sequence[int]) -> None:
        """Compute the tokens' KV and store their chunks. A frozen engine computes only."""
        payloads: dict[str, bytes] = {}
        for chunk in self._chunks(tokens):
            self.kv_cache.compute(chunk)  # chunk by chunk: a later one may need the same slots
            payloads[chunk.chunk_hash] = self.kv_cache.read(chunk)
        self._record("store", len(tokens))
        if payloads:
            await self._engine.store(list(payloads), payloads)

    async def retrieve(self, tokens: Sequence[int]) -> int:
        """Put the saved prefix of these tokens back into the slots. Return how many tokens."""
        chunks = self._chunks(tokens)
        payloads: list[bytes] = []
        await self._engine.retrieve([chunk.chunk_hash for chunk in chunks], payloads)
        retrieved = 0
        for chunk, payload in zip(chunks, payloads, strict=False):
            if not self.kv_cache.write(chunk, payload):  # stored by its hash alone: other bytes
                break
            retrieved += chunk.tokens
        self._record("retrieve", retrieved)
        return retrieved

    def _chunks(self, tokens: Sequence[int]) -> list[TokenChunk]:
        keep_last = bool(self._conf["save_unfull_chunk"])
        return split_tokens(tokens, self._engine.config.chunk_size, keep_last=keep_last)

    def _record(self, operation: str, tokens: int) -> None:
        if self.records_slots:
            slots = self.kv_cache.slots
            ranges = slot_ranges(range(min(tokens, slots)))
            _log.info("kvcache %s of %d tokens, slot_mapping %s", operation, tokens, ranges)
