"""The operators' client over real HTTP: what it asks, and what it makes of documented answers."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest.mock import ANY

import msgspec
import pytest

from ramakv.errors import (
    BackendError,
    BackendRejectedError,
    BackendUnavailableError,
    BackendUnsupportedError,
)
from ramakv.lmcache import answers
from ramakv.lmcache.inspecting import LMCacheInspector
from ramakv.lmcache.operating import LMCacheOperator
from tests.lmcache_recordings import Call, exchange, make_operator, play

JSON = "application/json"
OK = {"status": "success"}


class Case(NamedTuple):
    """One call: the request that is documented for it, its answer, and what comes out."""

    call: Call
    request: str
    body: Any
    """What is sent, decoded; None for nothing."""
    answer: Any
    outcome: Any


CASES = [
    Case(lambda c: c.inference_info(), "GET /inference_info", None,
         {"vllm_config": {"model": "m"}, "lmcache": {}},
         {"vllm_config": {"model": "m"}, "lmcache": {}}),
    Case(lambda c: c.inference_info("json"), "GET /inference_info?format=json", None, {}, {}),
    Case(lambda c: c.inference_version(), "GET /inference_version", None,
         {"vllm_version": "0.8.0"}, answers.InferenceVersion(vllm_version="0.8.0")),
    Case(lambda c: c.conf(), "GET /conf", None, {"chunk_size": 256}, {"chunk_size": 256}),
    Case(lambda c: c.conf(["min_retrieve_tokens", "save_decode_cache"]),
         "GET /conf?names=min_retrieve_tokens,save_decode_cache", None,
         {"min_retrieve_tokens": 0, "save_decode_cache": False},
         {"min_retrieve_tokens": 0, "save_decode_cache": False}),
    Case(lambda c: c.conf_update({"min_retrieve_tokens": 512, "save_decode_cache": True}),
         "POST /conf", {"min_retrieve_tokens": 512, "save_decode_cache": True},
         {"updated": {"min_retrieve_tokens": 512, "save_decode_cache": True}},
         answers.ConfUpdate(updated={"min_retrieve_tokens": 512, "save_decode_cache": True})),
    Case(lambda c: c.meta(), "GET /meta", None,
         {"worker_id": 1, "model_name": "m", "kv_shape": [32, 2, 256, 8, 128]},
         answers.EngineMeta(
             worker_id=1, model_name="m", kv_shape=[32, 2, 256, 8, 128],
             attributes={"worker_id": 1, "model_name": "m", "kv_shape": [32, 2, 256, 8, 128]})),
    Case(lambda c: c.meta(["worker_id", "model_name"]), "GET /meta?names=worker_id,model_name",
         None, {}, answers.EngineMeta(attributes={})),
    Case(lambda c: c.cache_clear(), "DELETE /cache/clear", None, OK | {"num_removed": 10},
         answers.CacheCleared(status="success", num_removed=10)),
    Case(lambda c: c.cache_clear(["LocalCPUBackend", "LocalDiskBackend"]),
         "DELETE /cache/clear?locations=LocalCPUBackend&locations=LocalDiskBackend", None,
         OK | {"num_removed": 10}, answers.CacheCleared(status="success", num_removed=10)),
    Case(lambda c: c.cache_store(0, 100), "POST /cache/store?tokens_mock=0,100", None,
         OK | {"num_tokens": 100}, answers.TokensStored(status="success", num_tokens=100)),
    Case(lambda c: c.cache_retrieve(0, 100), "POST /cache/retrieve?tokens_mock=0,100", None,
         OK | {"num_tokens": 100, "num_retrieved": 80},
         answers.TokensRetrieved(status="success", num_tokens=100, num_retrieved=80)),
    Case(lambda c: c.kvcache_check("0,1,2,3", 2),
         "GET /cache/kvcache/check?slot_mapping=0,1,2,3&chunk_size=2", None,
         OK | {"slot_mapping_ranges": [[0, 3]], "chunk_size": 2, "num_chunks": 2,
               "chunk_checksums": ["abc123...", "def456..."], "layerwise": False},
         answers.KVCacheCheck(
             status="success", slot_mapping_ranges=[(0, 3)], chunk_size=2, num_chunks=2,
             chunk_checksums=["abc123...", "def456..."], layerwise=False)),
    Case(lambda c: c.kvcache_check([0, 1, 2, 3], 2, layerwise=True),
         "GET /cache/kvcache/check?slot_mapping=0,1,2,3&chunk_size=2&layerwise=true", None,
         OK | {"slot_mapping_ranges": [[0, 3]], "chunk_size": 2, "num_chunks": 2,
               "chunk_checksums": {"layer_0": ["abc123...", "def456..."],
                                   "layer_1": ["ghi789...", "jkl012..."]}, "layerwise": True},
         answers.KVCacheCheck(
             status="success", slot_mapping_ranges=[(0, 3)], chunk_size=2, num_chunks=2,
             chunk_checksums={"layer_0": ["abc123...", "def456..."],
                              "layer_1": ["ghi789...", "jkl012..."]}, layerwise=True)),
    Case(lambda c: c.kvcache_check([1, 2, 3, (9, 12), 17, 19], 4),
         "GET /cache/kvcache/check?slot_mapping=1,2,3,[9,12],17,19&chunk_size=4", None,
         OK | {"slot_mapping_ranges": []},
         answers.KVCacheCheck(status="success", slot_mapping_ranges=[])),
    Case(lambda c: c.kvcache_record_slot_set(True),
         "POST /cache/kvcache/record_slot?enabled=true", None,
         OK | {"kvcache_check_log_enabled": True},
         answers.SlotRecording(status="success", kvcache_check_log_enabled=True)),
    Case(lambda c: c.kvcache_record_slot_set(False),
         "POST /cache/kvcache/record_slot?enabled=false", None,
         OK | {"kvcache_check_log_enabled": False},
         answers.SlotRecording(status="success", kvcache_check_log_enabled=False)),
    Case(lambda c: c.kvcache_record_slot(), "POST /cache/kvcache/record_slot", None,
         OK | {"kvcache_check_log_enabled": True},
         answers.SlotRecording(status="success", kvcache_check_log_enabled=True)),
    Case(lambda c: c.kvcache_info(), "GET /cache/kvcache/info", None,
         OK | {"num_layers": 32, "layers": {"layer_0": {
             "shape": [2, 128, 16, 64, 128], "dtype": "torch.bfloat16", "device": "cuda:0"}}},
         answers.KVCacheInfo(
             status="success", num_layers=32,
             layers={"layer_0": answers.KVLayer(
                 shape=[2, 128, 16, 64, 128], dtype="torch.bfloat16", device="cuda:0")})),
    Case(lambda c: c.load_fs_chunks("/path/to/lmcache.yaml", max_chunks=100),
         "POST /cache/load-fs-chunks",
         {"config_path": "/path/to/lmcache.yaml", "max_chunks": 100},
         OK | {"loaded_chunks": 95, "total_files": 100, "failed_keys": ["key1", "key2"],
               "config_path": "/path/to/lmcache.yaml"},
         answers.FSChunksLoaded(
             status="success", loaded_chunks=95, total_files=100, failed_keys=["key1", "key2"],
             config_path="/path/to/lmcache.yaml")),
    Case(lambda c: c.load_fs_chunks("/x.yaml", max_failed_keys=3), "POST /cache/load-fs-chunks",
         {"config_path": "/x.yaml", "max_failed_keys": 3},
         OK | {"loaded_chunks": 0, "total_files": 0},
         answers.FSChunksLoaded(status="success", loaded_chunks=0, total_files=0)),
    *[Case(call, request, None, OK | {"freeze": frozen, "message": f"Freeze mode {said}"},
           answers.FreezeState(status="success", freeze=frozen, message=f"Freeze mode {said}"))
      for call, request, frozen, said in (
          (lambda c: c.freeze_enable(), "PUT /freeze/enable", True, "enabled successfully"),
          (lambda c: c.freeze_disable(), "PUT /freeze/disable", False, "disabled successfully"),
          (lambda c: c.freeze_status(), "GET /freeze/status", True, "is enabled"))],
    *[Case(call, request, None, OK | {"hot_cache": hot, "message": f"Hot cache {said}"},
           answers.HotCacheState(status="success", hot_cache=hot, message=f"Hot cache {said}"))
      for call, request, hot, said in (
          (lambda c: c.hot_cache_enable(), "PUT /hot_cache/enable", True, "enabled successfully"),
          (lambda c: c.hot_cache_disable(), "PUT /hot_cache/disable", False, "disabled"),
          (lambda c: c.hot_cache_status(), "GET /hot_cache/status", True, "is enabled"))],
    Case(lambda c: c.lookup_info(), "GET /lookup/info", None,
         {"client": "HitLimitLookupClient(LMCacheBypassLookupClient)", "server": "None",
          "role": "scheduler"},
         answers.LookupInfo(client="HitLimitLookupClient(LMCacheBypassLookupClient)",
                            server="None", role="scheduler")),
    Case(lambda c: c.lookup_info(), "GET /lookup/info", None,
         {"client": "None", "server": "LMCacheLookupServer", "role": "worker"},
         answers.LookupInfo(client="None", server="LMCacheLookupServer", role="worker")),
    Case(lambda c: c.lookup_close(), "POST /lookup/close", None,
         {"old": "HitLimitLookupClient(LMCacheBypassLookupClient)", "role": "scheduler"},
         answers.LookupChange(old="HitLimitLookupClient(LMCacheBypassLookupClient)",
                              role="scheduler")),
    Case(lambda c: c.lookup_create(dryrun=True), "POST /lookup/create?dryrun=true", None,
         {"new": "LMCacheLookupClient", "dryrun": True, "role": "scheduler"},
         answers.LookupChange(new="LMCacheLookupClient", dryrun=True, role="scheduler")),
    Case(lambda c: c.lookup_create(), "POST /lookup/create", None,
         {"new": "LMCacheLookupClient", "role": "scheduler"},
         answers.LookupChange(new="LMCacheLookupClient", role="scheduler")),
    Case(lambda c: c.lookup_recreate(), "POST /lookup/recreate", None,
         {"old": "HitLimitLookupClient(LMCacheBypassLookupClient)", "new": "LMCacheLookupClient",
          "role": "scheduler"},
         answers.LookupChange(old="HitLimitLookupClient(LMCacheBypassLookupClient)",
                              new="LMCacheLookupClient", role="scheduler")),
    Case(lambda c: c.lookup_recreate(), "POST /lookup/recreate", None,
         {"old": "LMCacheLookupServer", "new": "LMCacheAsyncLookupServer", "role": "worker"},
         answers.LookupChange(old="LMCacheLookupServer", new="LMCacheAsyncLookupServer",
                              role="worker")),
    Case(lambda c: c.chunk_statistics_start(), "POST /chunk_statistics/start", None,
         OK | {"message": "Started"}, answers.Answer(status="success", message="Started")),
    Case(lambda c: c.chunk_statistics_stop(), "POST /chunk_statistics/stop", None,
         OK | {"message": "Stopped"}, answers.Answer(status="success", message="Stopped")),
    Case(lambda c: c.chunk_statistics_reset(), "POST /chunk_statistics/reset", None,
         OK | {"message": "Reset"}, answers.Answer(status="success", message="Reset")),
    Case(lambda c: c.chunk_statistics_status(), "GET /chunk_statistics/status", None,
         {"is_collecting": True, "total_chunks": 1000, "unique_chunks": 500,
          "timestamp": 1706745600.0, "auto_exit_enabled": True, "auto_exit_timeout_hours": 24.0,
          "auto_exit_target_unique_chunks": 1000},
         answers.ChunkStatistics(
             is_collecting=True, total_chunks=1000, unique_chunks=500, timestamp=1706745600.0,
             auto_exit_enabled=True, auto_exit_timeout_hours=24.0,
             auto_exit_target_unique_chunks=1000)),
    Case(lambda c: c.bypass_list(), "GET /bypass/list", None,
         OK | {"bypassed_backends": ["RemoteBackend"],
               "all_backends": ["LocalCPUBackend", "RemoteBackend"]},
         answers.BypassList(status="success", bypassed_backends=["RemoteBackend"],
                            all_backends=["LocalCPUBackend", "RemoteBackend"])),
    Case(lambda c: c.bypass_add("RemoteBackend"), "PUT /bypass/add?backend_name=RemoteBackend",
         None,
         OK | {"backend_name": "RemoteBackend", "bypassed": True, "was_already_bypassed": False,
               "bypassed_backends": ["RemoteBackend"]},
         answers.BypassAdded(status="success", backend_name="RemoteBackend", bypassed=True,
                             was_already_bypassed=False, bypassed_backends=["RemoteBackend"])),
    Case(lambda c: c.bypass_remove("RemoteBackend"),
         "PUT /bypass/remove?backend_name=RemoteBackend", None,
         OK | {"backend_name": "RemoteBackend", "bypassed": False, "was_bypassed": True,
               "bypassed_backends": []},
         answers.BypassRemoved(status="success", backend_name="RemoteBackend", bypassed=False,
                               was_bypassed=True, bypassed_backends=[])),
    Case(lambda c: c.memory_prefetch(["a", "-b"], "id-1"), "POST /memory/prefetch",
         {"chunk_hashes": ["a", "-b"], "lookup_id": "id-1"},
         {"status": "prefetch_started", "lookup_id": "id-1", "num_chunks": 2},
         answers.PrefetchStarted(status="prefetch_started", lookup_id="id-1", num_chunks=2)),
    Case(lambda c: c.memory_evict(["a"], ["LocalCPUBackend"]), "POST /memory/evict",
         {"chunk_hashes": ["a"], "locations": ["LocalCPUBackend"]},
         OK | {"num_evicted": 1}, answers.Evicted(status="success", num_evicted=1)),
    Case(lambda c: c.memory_evict(["a"], None), "POST /memory/evict", {"chunk_hashes": ["a"]},
         OK | {"num_evicted": 2}, answers.Evicted(status="success", num_evicted=2)),
    Case(lambda c: c.memory_query(["a", "b"]), "POST /memory/query",
         {"chunk_hashes": ["a", "b"]}, {"a": ["LocalCPUBackend"], "b": []},
         {"a": ["LocalCPUBackend"], "b": []}),
]  # fmt: skip

NO_STATISTICS = "Client does not support statistics."
NO_BACKEND = "Backend 'FooBackend' not found. Available: ['LocalCPUBackend', 'RemoteBackend']"
NO_TOKENS = "Must specify either tokens_input or tokens_mock"

REFUSALS: list[tuple[Call, int, str, str]] = [
    (lambda c: c.inference_info(), 500, "Failed to get inference info", "..."),
    (lambda c: c.cache_store(0, 0), 400, "Missing parameters", NO_TOKENS),
    (lambda c: c.load_fs_chunks("/x"), 400, "Failed to load chunks from FSConnector",
     "Configuration file not found"),
    (lambda c: c.chunk_statistics_start(), 400, "Not available", NO_STATISTICS),
    (lambda c: c.bypass_add("FooBackend"), 400, "Unknown backend", NO_BACKEND),
    (lambda c: c.bypass_remove("FooBackend"), 400, "Unknown backend", NO_BACKEND),
]  # fmt: skip


async def answered(call: Call, status: int, body: bytes, content_type: str = JSON) -> Any:
    """Return what came of a call that is answered so: maybe an error."""
    return (await exchange(call, status, content_type, body))[1]


@pytest.mark.parametrize("case", CASES, ids=[case.request for case in CASES])
async def test_a_call_is_made_and_understood_as_documented(case: Case) -> None:
    request, outcome = await exchange(case.call, 200, JSON, msgspec.json.encode(case.answer))
    assert f"{request.method} {request.target}" == case.request
    assert (msgspec.json.decode(request.body) if request.body else None) == case.body
    assert request.content_type == (JSON if request.body else None)
    assert outcome == case.outcome


@pytest.mark.parametrize(("call", "status", "error", "message"), REFUSALS)
async def test_a_documented_refusal_says_what_lmcache_said(
    call: Call, status: int, error: str, message: str
) -> None:
    body = msgspec.json.encode({"error": error, "message": message, "config_path": "/x"})
    outcome = await answered(call, status, body)
    assert type(outcome) is BackendRejectedError
    assert (outcome.status, outcome.error, outcome.detail) == (status, error, message)
    assert str(outcome).endswith(f"status {status}: {error}: {message}")


def test_every_method_has_a_case() -> None:
    tried = {name for case in CASES for name in case.call.__code__.co_names}
    public = {name for name in dir(LMCacheOperator) if not name.startswith("_")}
    # The versions are tried below, the metrics in test_care.py.
    assert public - tried == {"lmc_version", "commit_id", "version", "metrics"}


def test_what_only_looks_cannot_change() -> None:
    assert not {"conf_update", "cache_clear", "memory_evict"} & set(dir(LMCacheInspector))


@pytest.mark.parametrize(
    ("sent", "version"),
    [
        (b"0.4.4", "0.4.4"),
        (b"0.4.4\n", "0.4.4"),
        (b'"0.4.4"', "0.4.4"),
        (b'"0.4.4-g6fbec463e"\n', "0.4.4-g6fbec463e"),
        (b"0.5", "0.5"),
        (b"1234567", "1234567"),
        (b'"a\\u00e9"', "a\u00e9"),
        (b"", ""),
        (b"null", ""),
    ],
)
@pytest.mark.parametrize("content_type", ["text/plain", JSON])
@pytest.mark.parametrize("path", ["lmc_version", "commit_id", "version"])
async def test_a_version_may_come_bare_or_quoted(
    path: str, sent: bytes, version: str, content_type: str
) -> None:
    request, outcome = await exchange(lambda c: getattr(c, path)(), 200, content_type, sent)
    assert request[:2] == ("GET", f"/{path}")
    assert outcome == version


@pytest.mark.parametrize("sent", [b"<html></html>", b'{"a": 1}', b"[]", b"v" * 201, b"a\nb"])
async def test_what_is_no_version_is_not_taken_for_one(sent: bytes) -> None:
    assert type(await answered(lambda c: c.version(), 200, sent)) is BackendUnavailableError


async def test_settings_may_come_as_plain_text() -> None:
    outcome = await answered(lambda c: c.conf(), 200, b'{\n  "a": null\n}', "text/plain")
    assert outcome == {"a": None}


@pytest.mark.parametrize("status", [200, 400])
async def test_an_update_that_fails_in_part_tells_both_parts(status: int) -> None:
    sent = b'{"updated":{"min_retrieve_tokens":512},"errors":{"unknown_key":"Unknown config"}}'
    outcome = await answered(lambda c: c.conf_update({"unknown_key": 1}), status, sent)
    assert outcome.updated == {"min_retrieve_tokens": 512}
    assert outcome.errors == {"unknown_key": "Unknown config"}


async def test_an_update_that_fails_in_all_parts_may_tell_only_those() -> None:
    sent = b'{"errors":{"a":"Config is not mutable at runtime"}}'
    outcome = await answered(lambda c: c.conf_update({"a": 1}), 400, sent)
    assert outcome == answers.ConfUpdate(errors={"a": "Config is not mutable at runtime"})


@pytest.mark.parametrize(
    "sent", [b"no", b"[]", b'{"error":"Invalid JSON body"}', b'{"updated": 1}', b'{"errors": []}']
)
async def test_an_update_that_was_not_understood_is_refused(sent: bytes) -> None:
    outcome = await answered(lambda c: c.conf_update({}), 400, sent)
    assert type(outcome) is BackendRejectedError
    assert outcome.status == 400


@pytest.mark.parametrize(
    ("sent", "collecting"),
    [
        (b'{"is_collecting": true, "total_chunks": 1, "unique_chunks": 1}', True),
        (b'{"enabled": true, "total_chunks": 1, "unique_chunks": 1}', True),
        (b'{"enabled": true, "is_collecting": false, "total_chunks": 1, "unique_chunks": 1}',
         False),
    ],
)  # fmt: skip
async def test_statistics_say_under_either_name_whether_they_collect(
    sent: bytes, collecting: bool
) -> None:
    outcome = await answered(lambda c: c.chunk_statistics_status(), 200, sent)
    assert outcome.is_collecting is collecting


async def test_fields_and_words_yet_unknown_are_no_trouble() -> None:
    sent = b'{"status": "frozen solid", "freeze": true, "since": {"day": 1}}'
    outcome = await answered(lambda c: c.freeze_status(), 200, sent)
    assert outcome == answers.FreezeState(status="frozen solid", freeze=True)


async def test_slots_can_be_read_as_pairs() -> None:
    sent = b'{"slot_mapping_ranges": [[1, 3], 9]}'
    outcome = await answered(lambda c: c.kvcache_check([(1, 3), 9], 1), 200, sent)
    assert outcome.ranges == [(1, 3), (9, 9)]


@pytest.mark.parametrize(
    ("sent", "error", "detail"),
    [
        (b'{"error": "E", "message": "M"}', "E", "M"),
        (b'{"error": "E", "role": "worker"}', "E", ""),
        (b'{"error": "E", "detail": "D"}', "E", "D"),
        (b'{"detail": "D"}', "", "D"),
        (b'{"detail": [{"loc": ["body", 1], "msg": "M", "type": "t"}, {"msg": "N"}, "O"]}',
         "", "body.1: M; N; O"),
        (b'{"detail": [{"loc": [], "msg": "M"}]}', "", "M"),
        (b'{"error": {"message": "M"}}', "M", ""),
        (b'{"error": 7}', "7", ""),
        (b"{}", "", ""),
        (b"", "", ""),
        (b"[1]", "", "[1]"),
        (b"Internal Server Error\n", "", "Internal Server Error"),
        (b"\xff", "", "\ufffd"),
        (b"[" * 100_000, "", "[" * 300),
        (b'{"detail": ' + b"[" * 900 + b"]" * 900 + b"}", "", ANY),
    ],
)  # fmt: skip
async def test_an_error_is_read_from_whatever_form_it_has(
    sent: bytes, error: str, detail: str
) -> None:
    outcome = await answered(lambda c: c.lookup_close(), 400, sent)
    assert type(outcome) is BackendRejectedError
    assert (outcome.error, outcome.detail, outcome.failures) == (error, detail, {})
    assert len(str(outcome)) < 400


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, BackendRejectedError),
        (401, BackendUnavailableError),
        (403, BackendUnavailableError),
        (404, BackendUnsupportedError),
        (405, BackendUnsupportedError),
        (422, BackendRejectedError),
        (429, BackendUnavailableError),
        (500, BackendRejectedError),
        (501, BackendUnsupportedError),
        (502, BackendUnavailableError),
        (503, BackendUnavailableError),
        (504, BackendUnavailableError),
    ],
)
async def test_a_status_tells_an_outage_from_a_refusal(
    status: int, kind: type[BackendError]
) -> None:
    outcome = await answered(lambda c: c.freeze_status(), status, b'{"error": "E"}')
    assert type(outcome) is kind
    assert (outcome.status, outcome.error) == (status, "E")


@pytest.mark.parametrize(
    ("failures", "kind", "expected"),
    [
        ({"7001": {"error": "'NoneType' object has no attribute 'batched_remove'"}},
         BackendRejectedError, {"7001": "'NoneType' object has no attribute 'batched_remove'"}),
        ({"7001": {"error": "HTTP Error 500: Internal Server Error"}, "7002": "timed out"},
         BackendUnavailableError,
         {"7001": "HTTP Error 500: Internal Server Error", "7002": "timed out"}),
        ({str(7000 + n): {"error": "HTTP Error 500"} for n in range(64)} | {"7064": "timed out"},
         BackendUnavailableError,
         {str(7000 + n): "HTTP Error 500" for n in range(64)} | {"7064": "timed out"}),
        ({"7001": None}, BackendRejectedError, {"7001": ""}),
        (["7001"], BackendRejectedError, {}),
    ],
)  # fmt: skip
async def test_the_workers_that_failed_are_named(
    failures: Any, kind: type[BackendError], expected: dict[str, str]
) -> None:
    sent = {"error": "Some workers failed to process request", "failures": failures}
    outcome = await answered(lambda c: c.memory_evict(["a"], []), 500, msgspec.json.encode(sent))
    assert type(outcome) is kind
    assert outcome.failures == expected


@pytest.mark.parametrize("sent", [b"{}", b"[]", b"1", b'{"freeze": "maybe"}'])
async def test_an_answer_of_a_wrong_form_is_refused(sent: bytes) -> None:
    outcome = await answered(lambda c: c.freeze_status(), 200, sent)
    assert type(outcome) is BackendRejectedError
    assert "/freeze/status answered in a wrong form" in str(outcome)


@pytest.mark.parametrize("sent", [b"", b"<html>", b"\xff", b'{"freeze": true', b"[" * 100_000])
async def test_an_answer_that_is_not_json_is_an_outage(sent: bytes) -> None:
    outcome = await answered(lambda c: c.freeze_status(), 200, sent)
    assert type(outcome) is BackendUnavailableError
    assert outcome.status == 200


async def test_words_that_mean_something_in_a_query_arrive_as_they_are() -> None:
    request, _ = await exchange(lambda c: c.bypass_add("a&b=c d"), 400, JSON, b"{}")
    assert request.target == "/bypass/add?backend_name=a%26b%3Dc+d"


async def test_nobody_there_has_no_status() -> None:
    async with make_operator("http://127.0.0.1:9") as operator:
        with pytest.raises(BackendUnavailableError, match="/lmc_version") as caught:
            await operator.lmc_version()
    assert caught.value.status is None


async def test_nothing_is_asked_twice() -> None:
    """A server that would answer a second time is asked once only."""
    refusal, fine = (503, JSON, b"{}"), (200, JSON, b'{"freeze": true}')
    async with play(refusal, fine) as (playback, url), make_operator(url) as operator:
        with pytest.raises(BackendUnavailableError):
            await operator.freeze_status()
        assert len(playback.requests) == 1
        assert (await operator.freeze_status()).freeze
