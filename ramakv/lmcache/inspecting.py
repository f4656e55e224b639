"""The calls that only look: what an operator may ask a live LMCache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ramakv.errors import BackendUnavailableError
from ramakv.lmcache.answers import (
    BypassList,
    ChunkStatistics,
    EngineMeta,
    FreezeState,
    HotCacheState,
    InferenceVersion,
    KVCacheCheck,
    KVCacheInfo,
    LookupInfo,
    SlotRecording,
)
from ramakv.lmcache.transport import Caller, Reply

VERSION_CHARS_MAX = 200

Slots = str | Sequence[int | tuple[int, int]]
"""Slots: LMCache's own notation, or numbers and pairs of first and last, both included."""


class LMCacheInspector(Caller):
    """Asks one port of LMCache what it is and what it holds, and changes nothing.

    Methods are named after their paths. Each raises BackendRejectedError where LMCache refuses,
    BackendUnsupportedError where that port or version has no such thing, and otherwise
    BackendUnavailableError where no answer comes in time, or none that can be used: a scheduler
    answers so to what only workers have, and a worker to what only a scheduler has.
    """

    async def lmc_version(self) -> str:
        """GET /lmc_version: the version of LMCache."""
        return await self._words("/lmc_version")

    async def commit_id(self) -> str:
        """GET /commit_id: the commit LMCache was built from; empty if unknown."""
        return await self._words("/commit_id")

    async def version(self) -> str:
        """GET /version: version and commit in one."""
        return await self._words("/version")

    async def inference_info(self, format_name: str | None = None) -> dict[str, Any]:
        """GET /inference_info: what the inference engine tells of itself; may be empty.

        LMCache reserves `format_name` for later.
        """
        params = {"format": format_name}
        return await self._ask(dict[str, Any], "GET", "/inference_info", params=params)

    async def inference_version(self) -> InferenceVersion:
        """GET /inference_version. LMCache 0.4.4 always fails: no sign of its health."""
        return await self._ask(InferenceVersion, "GET", "/inference_version")

    async def conf(self, names: Sequence[str] = ()) -> dict[str, Any]:
        """GET /conf: settings by name; all of them without names. Unknown names are left out."""
        return await self._ask(dict[str, Any], "GET", "/conf", params=_filter(names))

    async def meta(self, names: Sequence[str] = ()) -> EngineMeta:
        """GET /meta: metadata of the process; all of it without names."""
        reply = await self._call("GET", "/meta", params=_filter(names))
        reply.require_success()
        attributes = reply.convert(reply.json(), dict[str, Any])
        return reply.convert({**attributes, "attributes": attributes}, EngineMeta)

    async def metrics(self) -> str:
        """GET /metrics: Prometheus text; only live gauges are up to date."""
        reply = await self._call("GET", "/metrics")
        reply.require_success()
        return reply.text

    async def kvcache_check(
        self, slots: Slots, chunk_size: int | None, *, layerwise: bool = False
    ) -> KVCacheCheck:
        """GET /cache/kvcache/check: MD5 of so many slots each, over all layers or layer by layer.

        Without a chunk size, which the document demands, LMCache 0.4.4 computes nothing.
        """
        params = {
            "slot_mapping": _slot_mapping(slots),
            "chunk_size": chunk_size,
            "layerwise": layerwise or None,
        }
        return await self._ask(KVCacheCheck, "GET", "/cache/kvcache/check", params=params)

    async def kvcache_record_slot(self) -> SlotRecording:
        """POST /cache/kvcache/record_slot without a value: whether slots are logged."""
        return await self._ask(SlotRecording, "POST", "/cache/kvcache/record_slot")

    async def kvcache_info(self) -> KVCacheInfo:
        """GET /cache/kvcache/info. Up to 0.4.7, LMCache answers that it has none."""
        return await self._ask(KVCacheInfo, "GET", "/cache/kvcache/info")

    async def freeze_status(self) -> FreezeState:
        """GET /freeze/status."""
        return await self._ask(FreezeState, "GET", "/freeze/status")

    async def hot_cache_status(self) -> HotCacheState:
        """GET /hot_cache/status."""
        return await self._ask(HotCacheState, "GET", "/hot_cache/status")

    async def lookup_info(self) -> LookupInfo:
        """GET /lookup/info."""
        return await self._ask(LookupInfo, "GET", "/lookup/info")

    async def chunk_statistics_status(self) -> ChunkStatistics:
        """GET /chunk_statistics/status, of a scheduler. LMCache takes 0.3 s for it, or more."""
        reply = await self._call("GET", "/chunk_statistics/status")
        reply.require_success()
        body = reply.convert(reply.json(), dict[str, Any])
        if "enabled" in body:
            body.setdefault("is_collecting", body["enabled"])
        return reply.convert(body, ChunkStatistics)

    async def bypass_list(self) -> BypassList:
        """GET /bypass/list: all storage backends, and those that are bypassed."""
        return await self._ask(BypassList, "GET", "/bypass/list")

    async def memory_query(self, chunk_hashes: Sequence[str]) -> dict[str, list[str]]:
        """POST /memory/query: the locations of each chunk. Many an LMCache has no such route."""
        body = {"chunk_hashes": chunk_hashes}
        return await self._ask(dict[str, list[str]], "POST", "/memory/query", body=body)

    async def _words(self, path: str) -> str:
        reply = await self._call("GET", path)
        reply.require_success()
        return _plain_words(reply)


def _plain_words(reply: Reply) -> str:
    """Return a line of text that came bare, as documented, or as a JSON string, as observed."""
    text = reply.text.strip()
    if text == "null":
        return ""
    if text.startswith('"'):
        try:
            text = msgspec.json.decode(reply.content, type=str)
        except (msgspec.DecodeError, UnicodeDecodeError):
            text = text.strip('"')
    if len(text) > VERSION_CHARS_MAX or "\n" in text or text.startswith(("<", "{", "[")):
        raise BackendUnavailableError(
            f"{reply.path}: the answer is no version: {text[:VERSION_CHARS_MAX]}",
            status=reply.status,
        )
    return text


def _filter(names: Sequence[str]) -> dict[str, str | None]:
    return {"names": ",".join(names) or None}


def _slot_mapping(slots: Slots) -> str:
    if isinstance(slots, str):
        return slots
    return ",".join(str(s) if isinstance(s, int) else f"[{s[0]},{s[1]}]" for s in slots)
