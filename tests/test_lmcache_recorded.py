"""What a real LMCache answered, and what the client makes of it, over real HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from ramakv.errors import (
    BackendError,
    BackendRejectedError,
    BackendUnavailableError,
    BackendUnsupportedError,
)
from ramakv.lmcache.answers import (
    Answer,
    BypassAdded,
    BypassList,
    BypassRemoved,
    CacheCleared,
    ChunkStatistics,
    ConfUpdate,
    Evicted,
    FreezeState,
    FSChunksLoaded,
    HotCacheState,
    KVCacheCheck,
    LookupChange,
    LookupInfo,
    PrefetchStarted,
    SlotRecording,
    TokensStored,
)
from ramakv.lmcache.client import LMCacheClient
from tests.lmcache_recordings import RECORDINGS, Call, exchange, play

NO_ENGINE = "LMCache engine not configured."
NO_LOOKUP = "Lookup client not configured."
NO_CACHES = "kv_caches is empty or not initialized"
SOME_FAILED = "Some workers failed to process request"
BACKENDS = ["LocalCPUBackend", "LocalDiskBackend"]

ANSWERED: list[tuple[str, Call, Any]] = [
    ("lmc_version", lambda c: c.lmc_version(), "0.4.4"),
    ("commit_id", lambda c: c.commit_id(), "g6fbec463e"),
    ("version", lambda c: c.version(), "0.4.4-g6fbec463e"),
    ("inference_info", lambda c: c.inference_info(), {"note": "stand-in connector, no vLLM"}),
    ("inference_info format", lambda c: c.inference_info("x"), {"note": "stand-in connector"}),
    ("conf", lambda c: c.conf(),
     {"chunk_size": 256, "local_cpu": True, "max_local_cpu_size": 0.0625, "remote_url": None,
      "blend_special_str": " # # "}),
    ("conf names", lambda c: c.conf(["min_retrieve_tokens", "save_decode_cache", "nope"]),
     {"min_retrieve_tokens": 0, "save_decode_cache": False}),
    ("conf updated",
     lambda c: c.conf_update({"min_retrieve_tokens": 512, "save_decode_cache": True}),
     ConfUpdate(updated={"min_retrieve_tokens": 512, "save_decode_cache": True})),
    ("conf updated in part",
     lambda c: c.conf_update({"min_retrieve_tokens": 0, "unknown_key": 1}),
     ConfUpdate(updated={"min_retrieve_tokens": 0}, errors={"unknown_key": "Unknown config"})),
    ("conf not updated", lambda c: c.conf_update({"unknown_key": 1}),
     ConfUpdate(errors={"unknown_key": "Unknown config"})),
    ("conf of a wrong type", lambda c: c.conf_update({"min_retrieve_tokens": "abc"}),
     ConfUpdate(errors={"min_retrieve_tokens": "Failed to set config value"})),
    ("conf empty", lambda c: c.conf_update({}), ConfUpdate()),
    ("conf understood", lambda c: c.conf_update({"min_retrieve_tokens": "7"}),
     ConfUpdate(updated={"min_retrieve_tokens": 7})),
    ("clear", lambda c: c.cache_clear(BACKENDS), CacheCleared(status="success", num_removed=1024)),
    ("clear an unknown location", lambda c: c.cache_clear(["Nope"]),
     CacheCleared(status="success", num_removed=0)),
    ("store", lambda c: c.cache_store(0, 1024), TokensStored(status="success", num_tokens=1024)),
    ("store negative", lambda c: c.cache_store(-5, 3),
     TokensStored(status="success", num_tokens=8)),
    ("check", lambda c: c.kvcache_check([0, 1, 2, 3], 2),
     KVCacheCheck(status="success", slot_mapping_ranges=[(0, 3)], chunk_size=2, num_chunks=2,
                  chunk_checksums=["9faf55e74b7d3c71", "95d1e8f0b48b0fb5"])),
    ("check layerwise", lambda c: c.kvcache_check("0,1,2,3", 2, layerwise=True),
     KVCacheCheck(status="success", slot_mapping_ranges=[(0, 3)], chunk_size=2, num_chunks=2,
                  layerwise=True,
                  chunk_checksums={"model.layers.0": ["cd34ddb148a0dcbf", "4dbadc1dad0b5342"],
                                   "model.layers.1": ["4e677a1d4bd83188", "e1ff2482edf52aea"]})),
    ("check mixed slots", lambda c: c.kvcache_check([1, 2, 3, (9, 12), 17, 19], 3),
     KVCacheCheck(status="success", slot_mapping_ranges=[(1, 3), (9, 12), 17, 19], chunk_size=3,
                  num_chunks=3, chunk_checksums=["a3cda1b2", "fc89bad5", "04ef2fb3"])),
    ("check without a size", lambda c: c.kvcache_check("0,1,2,3", None),
     KVCacheCheck(status="success", slot_mapping_ranges=[(0, 3)])),
    ("record_slot", lambda c: c.kvcache_record_slot(),
     SlotRecording(status="success", kvcache_check_log_enabled=False)),
    ("record_slot on", lambda c: c.kvcache_record_slot_set(True),
     SlotRecording(status="success", kvcache_check_log_enabled=True)),
    ("load", lambda c: c.load_fs_chunks("/etc/fs.yaml", max_chunks=100),
     FSChunksLoaded(status="success", loaded_chunks=0, total_files=0, config_path="/etc/fs.yaml")),
    ("freeze on", lambda c: c.freeze_enable(),
     FreezeState(status="success", freeze=True, message="Freeze mode enabled successfully")),
    ("freeze off", lambda c: c.freeze_disable(),
     FreezeState(status="success", freeze=False, message="Freeze mode disabled successfully")),
    ("freeze", lambda c: c.freeze_status(),
     FreezeState(status="success", freeze=False, message="Freeze mode is disabled")),
    ("hot cache on", lambda c: c.hot_cache_enable(),
     HotCacheState(status="success", hot_cache=True, message="Hot cache enabled successfully")),
    ("hot cache off", lambda c: c.hot_cache_disable(),
     HotCacheState(status="success", hot_cache=False, message="Hot cache disabled successfully")),
    ("hot cache", lambda c: c.hot_cache_status(),
     HotCacheState(status="success", hot_cache=True, message="Hot cache is enabled")),
    ("bypass list", lambda c: c.bypass_list(),
     BypassList(status="success", bypassed_backends=[], all_backends=BACKENDS)),
    ("bypass", lambda c: c.bypass_add("LocalDiskBackend"),
     BypassAdded(status="success", backend_name="LocalDiskBackend", bypassed=True,
                 was_already_bypassed=True, bypassed_backends=["LocalDiskBackend"])),
    ("bypass no more", lambda c: c.bypass_remove("LocalDiskBackend"),
     BypassRemoved(status="success", backend_name="LocalDiskBackend", bypassed=False,
                   was_bypassed=True)),
    ("statistics", lambda c: c.chunk_statistics_status(),
     ChunkStatistics(
         is_collecting=True, total_requests=2, total_chunks=16, unique_chunks=8,
         duplicate_chunks=8, reuse_rate=0.5, timestamp=1795957497.6969864,
         auto_exit_enabled=True, auto_exit_timeout_hours=0.0, auto_exit_target_unique_chunks=0,
         timing={"total_time_seconds": 0.02058649, "overhead_percentage": 0.418085377},
         bloom_filter={"size_mb": 22.852559089660645, "hash_count": 6, "item_count": 8},
         async_queue={"capacity": 100000, "current_size": 0, "utilization": 0.0})),
    ("statistics start", lambda c: c.chunk_statistics_start(),
     Answer(status="success", message="Started")),
    ("statistics stop", lambda c: c.chunk_statistics_stop(),
     Answer(status="success", message="Stopped")),
    ("statistics reset", lambda c: c.chunk_statistics_reset(),
     Answer(status="success", message="Reset")),
    ("lookup", lambda c: c.lookup_info(),
     LookupInfo(client="ChunkStatisticsLookupClient(LMCacheAsyncLookupClient)", server="None")),
    ("lookup at a worker", lambda c: c.lookup_info(),
     LookupInfo(client="None", server="LMCacheAsyncLookupServer")),
    ("lookup dry run", lambda c: c.lookup_create(dryrun=True),
     LookupChange(new="LMCacheAsyncLookupServer", dryrun=True, role="worker")),
    ("prefetch", lambda c: c.memory_prefetch(["a", "b", "c", "d"], "pf-1"),
     PrefetchStarted(status="prefetch_started", lookup_id="pf-1", num_chunks=4)),
    ("prefetch with a number", lambda c: c.memory_prefetch(["ab"], "5"),
     PrefetchStarted(status="prefetch_started", lookup_id=5, num_chunks=1)),
    ("evict", lambda c: c.memory_evict(["-2a6a668911175e7d"], None),
     Evicted(status="success", num_evicted=2)),
]  # fmt: skip

Refusal = tuple[type[BackendError], str, str]

REFUSED: list[tuple[str, Call, Refusal]] = [
    ("inference_version fails", lambda c: c.inference_version(),
     (BackendRejectedError, "Failed to get inference version",
      "'LMCacheManager' object has no attribute 'get_inference_version'")),
    ("wrong method", lambda c: c.freeze_enable(),
     (BackendUnsupportedError, "", "Method Not Allowed")),
    ("unknown path", lambda c: c.freeze_status(), (BackendUnsupportedError, "", "Not Found")),
    ("conf not JSON", lambda c: c.conf_update({}),
     (BackendRejectedError, "Invalid JSON body", "Expecting value: line 1 column 1 (char 0)")),
    ("conf not an object", lambda c: c.conf_update({}),
     (BackendRejectedError, "Request body must be a JSON object", "")),
    ("clear at the scheduler", lambda c: c.cache_clear(),
     (BackendUnavailableError, "LMCache API is unavailable", NO_ENGINE)),
    ("clear with a bad body", lambda c: c.cache_clear(),
     (BackendRejectedError, "", "body.1: JSON decode error")),
    ("store nothing", lambda c: c.cache_store(0, 1),
     (BackendRejectedError, "Missing parameters",
      "Must specify either tokens_input or tokens_mock")),
    ("store backwards", lambda c: c.cache_store(9, 1),
     (BackendRejectedError, "Invalid tokens_mock format",
      "tokens_mock must be 'start,end': start must be less than end")),
    ("store at the scheduler", lambda c: c.cache_store(0, 100),
     (BackendUnavailableError, "LMCache API is unavailable", NO_ENGINE)),
    ("retrieve", lambda c: c.cache_retrieve(0, 100),
     (BackendRejectedError, "Failed to retrieve cache",
      "Event cache_api_retrieve of type EventType.LOADING is not done or not found.")),
    ("check size 0", lambda c: c.kvcache_check("0,1,2,3", 0),
     (BackendRejectedError, "Invalid chunk_size", "chunk_size must be a positive integer")),
    ("check no slots", lambda c: c.kvcache_check([], 2),
     (BackendRejectedError, "Missing parameters", "slot_mapping parameter is required")),
    ("check bad slots", lambda c: c.kvcache_check([(5, 2)], 2),
     (BackendRejectedError, "Invalid slot_mapping format",
      "slot_mapping must be comma-separated integers or ranges like [start,end]: "
      "Range start 5 must be <= end 2")),
    ("check far slots", lambda c: c.kvcache_check([999999], 2),
     (BackendRejectedError, "Invalid slot indices",
      "Slot indices out of bounds: [999999]. Valid range: 0 to 4095")),
    ("check a size that is no number", lambda c: c.kvcache_check([0, 1], 2),
     (BackendRejectedError, "",
      "query.chunk_size: Input should be a valid integer, "
      "unable to parse string as an integer")),
    ("check at the scheduler", lambda c: c.kvcache_check("0,1,2,3", 2),
     (BackendUnsupportedError, "kv_caches not available", NO_CACHES)),
    ("record_slot at the scheduler", lambda c: c.kvcache_record_slot_set(True),
     (BackendRejectedError, "Failed to set record slot status",
      "'NoneType' object has no attribute 'kvcache_check_log_enabled'")),
    ("info", lambda c: c.kvcache_info(),
     (BackendUnsupportedError, "kv_caches not available", NO_CACHES)),
    ("load no file", lambda c: c.load_fs_chunks("/nope.yaml"),
     (BackendRejectedError, "",
      "Invalid configuration file: [Errno 2] No such file or directory: '/nope.yaml'")),
    ("load a path that is none", lambda c: c.load_fs_chunks(""),
     (BackendRejectedError, "", "body.config_path: Input should be a valid string")),
    ("load at the scheduler", lambda c: c.load_fs_chunks("/x"),
     (BackendUnavailableError, "/cache/load-fs-chunks API is unavailable", NO_ENGINE)),
    ("freeze at the scheduler", lambda c: c.freeze_enable(),
     (BackendUnavailableError, "/freeze/enable API is unavailable", NO_ENGINE)),
    ("hot cache at the scheduler", lambda c: c.hot_cache_status(),
     (BackendUnavailableError, "hot_cache API is unavailable", NO_ENGINE)),
    ("bypass the unknown", lambda c: c.bypass_add("FooBackend"),
     (BackendRejectedError, "Unknown backend",
      "Backend 'FooBackend' not found. Available: ['LocalCPUBackend', 'LocalDiskBackend']")),
    ("bypass nothing", lambda c: c.bypass_remove(""),
     (BackendRejectedError, "Missing parameter", "backend_name is required")),
    ("bypass at the scheduler", lambda c: c.bypass_list(),
     (BackendUnavailableError, "Bypass API is unavailable", NO_ENGINE)),
    ("statistics at a worker", lambda c: c.chunk_statistics_status(),
     (BackendUnavailableError, "API unavailable", NO_LOOKUP)),
    ("statistics start at a worker", lambda c: c.chunk_statistics_start(),
     (BackendUnavailableError, "API unavailable", NO_LOOKUP)),
    ("prefetch nothing", lambda c: c.memory_prefetch([], "x"),
     (BackendRejectedError, "chunk_hashes and lookup_id are required", "")),
    ("prefetch nothing at the scheduler", lambda c: c.memory_prefetch([], "x"),
     (BackendRejectedError, SOME_FAILED, "")),
    ("evict nothing", lambda c: c.memory_evict([], None),
     (BackendRejectedError, "chunk_hashes is required", "")),
    ("evict no hash", lambda c: c.memory_evict(["zz"], []),
     (BackendRejectedError, "invalid literal for int() with base 16: 'zz'", "")),
    ("evict no hash at the scheduler", lambda c: c.memory_evict(["zz"], []),
     (BackendRejectedError, SOME_FAILED, "")),
    ("evict with a dead worker", lambda c: c.memory_evict(["a"], []),
     (BackendUnavailableError, SOME_FAILED, "")),
    ("evict with a hung worker", lambda c: c.memory_evict(["a"], []),
     (BackendUnavailableError, SOME_FAILED, "")),
    ("no query", lambda c: c.memory_query(["a"]), (BackendUnsupportedError, "", "Not Found")),
]  # fmt: skip

OF_METADATA = {"meta", "meta of a scheduler", "meta names", "meta unknown"}


async def ask(name: str, call: Call) -> Any:
    """Make a call that the recording answers; what was asked must be what was recorded."""
    recording = RECORDINGS[name]
    request, outcome = await exchange(call, *recording[2:4], recording.body.encode())
    assert request.method == recording.method
    assert request.target in (recording.target, recording.target.partition("?")[0])
    return outcome


@pytest.mark.parametrize(("name", "call", "expected"), ANSWERED, ids=[row[0] for row in ANSWERED])
async def test_an_answer_is_understood(name: str, call: Call, expected: object) -> None:
    assert await ask(name, call) == expected


@pytest.mark.parametrize(("name", "call", "refusal"), REFUSED, ids=[row[0] for row in REFUSED])
async def test_a_refusal_is_understood(name: str, call: Call, refusal: Refusal) -> None:
    error = await ask(name, call)
    assert (type(error), error.error, error.detail) == refusal
    assert error.status == RECORDINGS[name].status
    assert RECORDINGS[name].target.split("?")[0] in str(error)


async def test_every_recording_is_used() -> None:
    used = {row[0] for row in ANSWERED} | {row[0] for row in REFUSED} | OF_METADATA
    assert used == set(RECORDINGS)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("prefetch nothing at the scheduler", "HTTP Error 400: Bad Request"),
        ("evict no hash at the scheduler", "HTTP Error 500: Internal Server Error"),
    ],
)
async def test_a_scheduler_names_the_workers_that_failed(name: str, why: str) -> None:
    calls = {row[0]: row[1] for row in REFUSED}
    error = await ask(name, calls[name])
    assert error.failures == {"17000": why, "17001": why}
    assert str(error).endswith(f"{SOME_FAILED}: 17000: {why}, 17001: {why}")


async def test_a_worker_that_cannot_be_reached_is_named() -> None:
    error = await ask("evict with a dead worker", lambda c: c.memory_evict(["a"], []))
    assert error.failures == {"17001": "<urlopen error [Errno 111] Connection refused>"}


async def test_what_is_not_there_is_said_plainly() -> None:
    error = await ask("info", lambda c: c.kvcache_info())
    assert str(error) == (
        "/cache/kvcache/info: not available here: status 404: "
        "kv_caches not available: kv_caches is empty or not initialized"
    )


async def test_metadata_is_typed_and_complete() -> None:
    meta = await ask("meta", lambda c: c.meta())
    assert (meta.role, meta.model_name, meta.worker_id) == ("worker", "standalone_model", 0)
    assert (meta.world_size, meta.chunk_size, meta.use_mla) == (2, 256, False)
    assert (meta.kv_dtype, meta.kv_shape) == ("torch.float16", [2, 2, 256, 4, 16])
    assert len(meta.attributes) == 15
    assert meta.attributes["engine_id"] == "lmctest"
    assert meta.attributes["served_model_name"] is None


async def test_metadata_tells_a_scheduler() -> None:
    assert (await ask("meta of a scheduler", lambda c: c.meta())).role == "scheduler"


async def test_metadata_that_was_not_asked_for_is_none() -> None:
    meta = await ask("meta names", lambda c: c.meta(["worker_id", "model_name"]))
    assert (meta.worker_id, meta.model_name, meta.role) == (0, "standalone_model", None)
    assert (await ask("meta unknown", lambda c: c.meta(["nope"]))).attributes == {}


async def test_mixed_slots_can_be_read_as_pairs() -> None:
    check = await ask("check mixed slots", lambda c: c.kvcache_check("1,2,3,[9,12],17,19", 3))
    assert check.ranges == [(1, 3), (9, 12), (17, 17), (19, 19)]


async def test_the_daemons_client_takes_the_same_answers() -> None:
    names = ["prefetch", "evict", "no query"]
    answers = [(r.status, r.content_type, r.body.encode()) for r in map(RECORDINGS.get, names) if r]
    timeouts = {"connect_timeout_seconds": 5.0, "call_timeout_seconds": 5.0}
    async with (
        play(*answers) as (playback, url),
        LMCacheClient(url, **timeouts, connections_max=1) as client,
    ):
        await client.prefetch(["a"], "pf-1")
        await client.evict(["a"], ["LocalCPUBackend"])
        assert await client.query(["a"]) is None
    assert len(playback.requests) == 3
