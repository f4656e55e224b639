"""The calls that change LMCache: for operators and their tools, and never made by the daemon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ramakv.errors import BackendError
from ramakv.lmcache.answers import (
    Answer,
    BypassAdded,
    BypassRemoved,
    CacheCleared,
    ConfUpdate,
    Evicted,
    FreezeState,
    FSChunksLoaded,
    HotCacheState,
    LookupChange,
    PrefetchStarted,
    SlotRecording,
    TokensRetrieved,
    TokensStored,
)
from ramakv.lmcache.inspecting import LMCacheInspector


class LMCacheOperator(LMCacheInspector):
    """Changes one port of LMCache. Nothing is repeated: whether to call again is for the caller.

    A call that times out may still be carried out. Errors are those of LMCacheInspector.
    """

    async def conf_update(self, values: Mapping[str, Any]) -> ConfUpdate:
        """POST /conf: change settings of this process, each for itself.

        Returns what was changed and what was not, even where all of it failed. Many settings are
        read once, when LMCache starts: a change is then accepted and without effect.
        """
        reply = await self._call("POST", "/conf", body=values)
        if reply.status != 400:
            reply.require_success()
            return reply.convert(reply.json(), ConfUpdate)
        with suppress(BackendError):
            body = reply.convert(reply.json(), dict[str, Any])
            if "updated" in body or "errors" in body:
                return reply.convert(body, ConfUpdate)
        raise reply.refusal()

    async def cache_clear(self, locations: Sequence[str] = ()) -> CacheCleared:
        """DELETE /cache/clear: forget what these storage backends hold; all without locations.

        LMCache 0.4.4 clears its CPU tier only, and skips what is in use.
        """
        params = {"locations": locations}
        return await self._ask(CacheCleared, "DELETE", "/cache/clear", params=params)

    async def cache_store(self, start: int, end: int) -> TokensStored:
        """POST /cache/store: store KV for the mock tokens from `start` up to, not with, `end`."""
        params = {"tokens_mock": f"{start},{end}"}
        return await self._ask(TokensStored, "POST", "/cache/store", params=params)

    async def cache_retrieve(self, start: int, end: int) -> TokensRetrieved:
        """POST /cache/retrieve: retrieve KV for the mock tokens from `start` up to `end`.

        LMCache 0.4.4 refuses with status 500 where it loads asynchronously.
        """
        params = {"tokens_mock": f"{start},{end}"}
        return await self._ask(TokensRetrieved, "POST", "/cache/retrieve", params=params)

    async def kvcache_record_slot_set(self, enabled: bool) -> SlotRecording:
        """POST /cache/kvcache/record_slot: have the slots of each store and retrieve logged."""
        params = {"enabled": enabled}
        return await self._ask(SlotRecording, "POST", "/cache/kvcache/record_slot", params=params)

    async def load_fs_chunks(
        self, config_path: str, *, max_chunks: int | None = None, max_failed_keys: int | None = None
    ) -> FSChunksLoaded:
        """POST /cache/load-fs-chunks: load chunk files into the hot tier.

        The path is that of an LMCache configuration file on LMCache's own host. LMCache names
        up to 10 keys that failed, unless told otherwise.
        """
        body: dict[str, Any] = {"config_path": config_path}
        if max_chunks is not None:
            body["max_chunks"] = max_chunks
        if max_failed_keys is not None:
            body["max_failed_keys"] = max_failed_keys
        return await self._ask(FSChunksLoaded, "POST", "/cache/load-fs-chunks", body=body)

    async def freeze_enable(self) -> FreezeState:
        """PUT /freeze/enable: store nothing, and retrieve from the CPU tier only.

        Evicts and clears are carried out all the same.
        """
        return await self._ask(FreezeState, "PUT", "/freeze/enable")

    async def freeze_disable(self) -> FreezeState:
        """PUT /freeze/disable: store again."""
        return await self._ask(FreezeState, "PUT", "/freeze/disable")

    async def hot_cache_enable(self) -> HotCacheState:
        """PUT /hot_cache/enable: keep chunks in the CPU tier."""
        return await self._ask(HotCacheState, "PUT", "/hot_cache/enable")

    async def hot_cache_disable(self) -> HotCacheState:
        """PUT /hot_cache/disable: clear the CPU tier, and keep nothing more in it."""
        return await self._ask(HotCacheState, "PUT", "/hot_cache/disable")

    async def lookup_close(self) -> LookupChange:
        """POST /lookup/close. Not on a live engine: a scheduler of LMCache 0.4.4 may abort."""
        return await self._ask(LookupChange, "POST", "/lookup/close")

    async def lookup_create(self, *, dryrun: bool = False) -> LookupChange:
        """POST /lookup/create: make a lookup client or server as configured now, or say which.

        Not on a live engine: a scheduler of LMCache 0.4.4 may abort or hang, dryrun or not.
        """
        params = {"dryrun": dryrun or None}
        return await self._ask(LookupChange, "POST", "/lookup/create", params=params)

    async def lookup_recreate(self) -> LookupChange:
        """POST /lookup/recreate: close and create. Not on a live engine, as with create."""
        return await self._ask(LookupChange, "POST", "/lookup/recreate")

    async def chunk_statistics_start(self) -> Answer:
        """POST /chunk_statistics/start, of a scheduler that is set up for it."""
        return await self._ask(Answer, "POST", "/chunk_statistics/start")

    async def chunk_statistics_stop(self) -> Answer:
        """POST /chunk_statistics/stop."""
        return await self._ask(Answer, "POST", "/chunk_statistics/stop")

    async def chunk_statistics_reset(self) -> Answer:
        """POST /chunk_statistics/reset: forget all counts."""
        return await self._ask(Answer, "POST", "/chunk_statistics/reset")

    async def bypass_add(self, backend_name: str) -> BypassAdded:
        """PUT /bypass/add: leave a storage backend out of every lookup, store and retrieve."""
        params = {"backend_name": backend_name}
        return await self._ask(BypassAdded, "PUT", "/bypass/add", params=params)

    async def bypass_remove(self, backend_name: str) -> BypassRemoved:
        """PUT /bypass/remove: use a storage backend again."""
        params = {"backend_name": backend_name}
        return await self._ask(BypassRemoved, "PUT", "/bypass/remove", params=params)

    async def memory_prefetch(self, chunk_hashes: Sequence[str], lookup_id: str) -> PrefetchStarted:
        """POST /memory/prefetch: start to bring chunks up, in prefix order.

        The id must be new: the same one twice leaks memory in LMCache.
        """
        body = {"chunk_hashes": chunk_hashes, "lookup_id": lookup_id}
        return await self._ask(PrefetchStarted, "POST", "/memory/prefetch", body=body)

    async def memory_evict(
        self, chunk_hashes: Sequence[str], locations: Sequence[str] | None
    ) -> Evicted:
        """POST /memory/evict: remove chunks from these locations; None is every location.

        Every location includes copies that other engines share.
        """
        body: dict[str, Any] = {"chunk_hashes": chunk_hashes}
        if locations is not None:
            body["locations"] = locations
        return await self._ask(Evicted, "POST", "/memory/evict", body=body)
