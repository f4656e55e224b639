"""What a real LMCache 0.4.4 was asked and answered, and a server that plays answers back.

Long answers are shortened: fields that nothing reads are left out. Where the client cannot make
the request that was recorded (a wrong method, a bad body), the nearest it can make stands there.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

import h11
import trio

from ramakv.errors import BackendError
from ramakv.lmcache.operating import LMCacheOperator

Call = Callable[[LMCacheOperator], Awaitable[Any]]


class Recording(NamedTuple):
    """One request and its answer."""

    method: str
    target: str
    status: int
    content_type: str
    body: str


class Request(NamedTuple):
    """One request as it came over the wire."""

    method: str
    target: str
    content_type: str | None
    body: bytes


class Playback:
    """Answers the requests of one connection after another, each with the next answer."""

    def __init__(self, answers: Iterable[tuple[int, str, bytes]]) -> None:
        self._answers = iter(answers)
        self.requests: list[Request] = []

    async def serve(self, stream: trio.SocketStream) -> None:
        connection = h11.Connection(h11.SERVER)
        while (head := await _next_event(stream, connection)) is not None:
            assert isinstance(head, h11.Request)
            body = b""
            while isinstance(data := await _next_event(stream, connection), h11.Data):
                body += data.data
            kind = dict(head.headers).get(b"content-type", b"").decode() or None
            self.requests.append(Request(head.method.decode(), head.target.decode(), kind, body))
            await self._answer(stream, connection)

    async def _answer(self, stream: trio.SocketStream, connection: h11.Connection) -> None:
        status, content_type, body = next(self._answers)
        headers = [("content-type", content_type), ("content-length", str(len(body)))]
        response = h11.Response(status_code=status, headers=headers, reason=b"")
        for event in (response, h11.Data(body), h11.EndOfMessage()):
            if sent := connection.send(event):
                await stream.send_all(sent)
        connection.start_next_cycle()


async def _next_event(
    stream: trio.SocketStream, connection: h11.Connection
) -> h11.Request | h11.Data | h11.EndOfMessage | None:
    """Return what comes next; None once the client has gone."""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await stream.receive_some(65536))
        elif isinstance(event, h11.Request | h11.Data | h11.EndOfMessage):
            return event
        else:
            return None


@asynccontextmanager
async def play(*answers: tuple[int, str, bytes]) -> AsyncIterator[tuple[Playback, str]]:
    """Serve these answers, in this order; yield what notes the requests, and the URL."""
    playback = Playback(answers)
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(
            partial(trio.serve_tcp, playback.serve, 0, host="127.0.0.1")
        )
        yield playback, f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


async def exchange(call: Call, status: int, content_type: str, body: bytes) -> tuple[Request, Any]:
    """Make a call that is answered so; return the request, and what came of it: maybe an error."""
    outcome: Any
    async with play((status, content_type, body)) as (playback, url), make_operator(url) as client:
        try:
            outcome = await call(client)
        except BackendError as error:
            outcome = error
    (request,) = playback.requests
    return request, outcome


def make_operator(url: str) -> LMCacheOperator:
    return LMCacheOperator(
        url, connect_timeout_seconds=5.0, call_timeout_seconds=5.0, connections_max=1
    )


_TRANSCRIPT = """
=== lmc_version: GET /lmc_version -> 200 json
"0.4.4"
=== commit_id: GET /commit_id -> 200 json
"g6fbec463e"
=== version: GET /version -> 200 json
"0.4.4-g6fbec463e"
=== inference_info: GET /inference_info -> 200 json
{"note": "stand-in connector, no vLLM"}
=== inference_info format: GET /inference_info?format=x -> 200 json
{"note": "stand-in connector"}
=== inference_version fails: GET /inference_version -> 500 json
{"error": "Failed to get inference version", "message": "'LMCacheManager' object has no attribute \
'get_inference_version'"}
=== wrong method: PUT /freeze/enable -> 405 json
{"detail":"Method Not Allowed"}
=== unknown path: GET /freeze/status -> 404 json
{"detail":"Not Found"}
=== conf: GET /conf -> 200 text
{
  "chunk_size": 256,
  "local_cpu": true,
  "max_local_cpu_size": 0.0625,
  "remote_url": null,
  "blend_special_str": " # # "
}
=== conf names: GET /conf?names=min_retrieve_tokens,save_decode_cache,nope -> 200 text
{
  "min_retrieve_tokens": 0,
  "save_decode_cache": false
}
=== conf updated: POST /conf -> 200 json
{"updated":{"min_retrieve_tokens":512,"save_decode_cache":true}}
=== conf updated in part: POST /conf -> 200 json
{"updated":{"min_retrieve_tokens":0},"errors":{"unknown_key":"Unknown config"}}
=== conf not updated: POST /conf -> 400 json
{"updated":{},"errors":{"unknown_key":"Unknown config"}}
=== conf of a wrong type: POST /conf -> 400 json
{"updated":{},"errors":{"min_retrieve_tokens":"Failed to set config value"}}
=== conf empty: POST /conf -> 200 json
{"updated":{}}
=== conf understood: POST /conf -> 200 json
{"updated":{"min_retrieve_tokens":7}}
=== conf not JSON: POST /conf -> 400 json
{"error":"Invalid JSON body","message":"Expecting value: line 1 column 1 (char 0)"}
=== conf not an object: POST /conf -> 400 json
{"error":"Request body must be a JSON object"}
=== meta: GET /meta -> 200 text
{
  "chunk_size": 256, "engine_id": "lmctest", "first_rank": 0,
  "kv_connector_extra_config": null, "kv_dtype": "torch.float16",
  "kv_layer_groups_manager": "KVLayerGroupsManager(kv_layer_groups=[])",
  "kv_shape": [2, 2, 256, 4, 16], "local_worker_id": 0, "local_world_size": 2,
  "model_name": "standalone_model", "role": "worker", "served_model_name": null,
  "use_mla": false, "worker_id": 0, "world_size": 2
}
=== meta of a scheduler: GET /meta -> 200 text
{
  "chunk_size": 256, "engine_id": "lmctest", "first_rank": 0,
  "kv_connector_extra_config": null, "kv_dtype": "torch.float16",
  "kv_layer_groups_manager": "KVLayerGroupsManager(kv_layer_groups=[])",
  "kv_shape": [2, 2, 256, 4, 16], "local_worker_id": 0, "local_world_size": 2,
  "model_name": "standalone_model", "role": "scheduler", "served_model_name": null,
  "use_mla": false, "worker_id": 0, "world_size": 2
}
=== meta names: GET /meta?names=worker_id,model_name -> 200 text
{
  "worker_id": 0,
  "model_name": "standalone_model"
}
=== meta unknown: GET /meta?names=nope -> 200 text
{}
=== clear: DELETE /cache/clear?locations=LocalCPUBackend&locations=LocalDiskBackend -> 200 json
{"status": "success", "num_removed": 1024}
=== clear an unknown location: DELETE /cache/clear?locations=Nope -> 200 json
{"status": "success", "num_removed": 0}
=== clear at the scheduler: DELETE /cache/clear -> 503 json
{"error": "LMCache API is unavailable", "message": "LMCache engine not configured."}
=== clear with a bad body: DELETE /cache/clear -> 422 json
{"detail":[{"type":"json_invalid","loc":["body",1],"msg":"JSON decode error","input":{}}]}
=== store: POST /cache/store?tokens_mock=0,1024 -> 200 json
{"status": "success", "num_tokens": 1024}
=== store negative: POST /cache/store?tokens_mock=-5,3 -> 200 json
{"status": "success", "num_tokens": 8}
=== store nothing: POST /cache/store?tokens_mock=0,1 -> 400 json
{"error": "Missing parameters", "message": "Must specify either tokens_input or tokens_mock"}
=== store backwards: POST /cache/store?tokens_mock=9,1 -> 400 json
{"error": "Invalid tokens_mock format", "message": "tokens_mock must be 'start,end': start must \
be less than end"}
=== store at the scheduler: POST /cache/store?tokens_mock=0,100 -> 503 json
{"error": "LMCache API is unavailable", "message": "LMCache engine not configured."}
=== retrieve: POST /cache/retrieve?tokens_mock=0,100 -> 500 json
{"error": "Failed to retrieve cache", "message": "Event cache_api_retrieve of type \
EventType.LOADING is not done or not found.", "exception_type": "AssertionError"}
=== check: GET /cache/kvcache/check?slot_mapping=0,1,2,3&chunk_size=2 -> 200 json
{"status": "success", "slot_mapping_ranges": [[0, 3]], "chunk_size": 2, "num_chunks": 2, \
"chunk_checksums": ["9faf55e74b7d3c71", "95d1e8f0b48b0fb5"], "layerwise": false}
=== check layerwise: GET /cache/kvcache/check?slot_mapping=0,1,2,3&chunk_size=2&layerwise=true -> \
200 json
{"status": "success", "slot_mapping_ranges": [[0, 3]], "chunk_size": 2, "num_chunks": 2, \
"chunk_checksums": {"model.layers.0": ["cd34ddb148a0dcbf", "4dbadc1dad0b5342"], "model.layers.1": \
["4e677a1d4bd83188", "e1ff2482edf52aea"]}, "layerwise": true}
=== check mixed slots: GET /cache/kvcache/check?slot_mapping=1,2,3,[9,12],17,19&chunk_size=3 -> \
200 json
{"status": "success", "slot_mapping_ranges": [[1, 3], [9, 12], 17, 19], "chunk_size": 3, \
"num_chunks": 3, "chunk_checksums": ["a3cda1b2", "fc89bad5", "04ef2fb3"], "layerwise": false}
=== check without a size: GET /cache/kvcache/check?slot_mapping=0,1,2,3 -> 200 json
{"status": "success", "slot_mapping_ranges": [[0, 3]], "chunk_size": null, "num_chunks": 0, \
"chunk_checksums": [], "layerwise": false}
=== check size 0: GET /cache/kvcache/check?slot_mapping=0,1,2,3&chunk_size=0 -> 400 json
{"error": "Invalid chunk_size", "message": "chunk_size must be a positive integer"}
=== check no slots: GET /cache/kvcache/check?slot_mapping=&chunk_size=2 -> 400 json
{"error": "Missing parameters", "message": "slot_mapping parameter is required"}
=== check bad slots: GET /cache/kvcache/check?slot_mapping=[5,2]&chunk_size=2 -> 400 json
{"error": "Invalid slot_mapping format", "message": "slot_mapping must be comma-separated \
integers or ranges like [start,end]: Range start 5 must be <= end 2"}
=== check far slots: GET /cache/kvcache/check?slot_mapping=999999&chunk_size=2 -> 400 json
{"error": "Invalid slot indices", "message": "Slot indices out of bounds: [999999]. Valid range: \
0 to 4095"}
=== check a size that is no number: GET /cache/kvcache/check?slot_mapping=0,1&chunk_size=2 -> 422 \
json
{"detail":[{"type":"int_parsing","loc":["query","chunk_size"],"msg":"Input should be a valid \
integer, unable to parse string as an integer","input":"x"}]}
=== check at the scheduler: GET /cache/kvcache/check?slot_mapping=0,1,2,3&chunk_size=2 -> 404 json
{"error": "kv_caches not available", "message": "kv_caches is empty or not initialized"}
=== record_slot: POST /cache/kvcache/record_slot -> 200 json
{"status": "success", "kvcache_check_log_enabled": false}
=== record_slot on: POST /cache/kvcache/record_slot?enabled=true -> 200 json
{"status": "success", "kvcache_check_log_enabled": true}
=== record_slot at the scheduler: POST /cache/kvcache/record_slot?enabled=true -> 500 json
{"error": "Failed to set record slot status", "message": "'NoneType' object has no attribute \
'kvcache_check_log_enabled'"}
=== info: GET /cache/kvcache/info -> 404 json
{"error": "kv_caches not available", "message": "kv_caches is empty or not initialized"}
=== load: POST /cache/load-fs-chunks -> 200 json
{"status": "success", "loaded_chunks": 0, "total_files": 0, "failed_keys": [], "config_path": \
"/etc/fs.yaml"}
=== load no file: POST /cache/load-fs-chunks -> 400 json
{"detail":"Invalid configuration file: [Errno 2] No such file or directory: '/nope.yaml'"}
=== load a path that is none: POST /cache/load-fs-chunks -> 422 json
{"detail":[{"type":"string_type","loc":["body","config_path"],"msg":"Input should be a valid \
string","input":1}]}
=== load at the scheduler: POST /cache/load-fs-chunks -> 503 json
{"error": "/cache/load-fs-chunks API is unavailable", "message": "LMCache engine not configured."}
=== freeze on: PUT /freeze/enable -> 200 json
{"status": "success", "freeze": true, "message": "Freeze mode enabled successfully"}
=== freeze off: PUT /freeze/disable -> 200 json
{"status": "success", "freeze": false, "message": "Freeze mode disabled successfully"}
=== freeze: GET /freeze/status -> 200 json
{"status": "success", "freeze": false, "message": "Freeze mode is disabled"}
=== freeze at the scheduler: PUT /freeze/enable -> 503 json
{"error": "/freeze/enable API is unavailable", "message": "LMCache engine not configured."}
=== hot cache on: PUT /hot_cache/enable -> 200 json
{"status": "success", "hot_cache": true, "message": "Hot cache enabled successfully"}
=== hot cache off: PUT /hot_cache/disable -> 200 json
{"status": "success", "hot_cache": false, "message": "Hot cache disabled successfully"}
=== hot cache: GET /hot_cache/status -> 200 json
{"status": "success", "hot_cache": true, "message": "Hot cache is enabled"}
=== hot cache at the scheduler: GET /hot_cache/status -> 503 json
{"error": "hot_cache API is unavailable", "message": "LMCache engine not configured."}
=== bypass list: GET /bypass/list -> 200 json
{"status":"success","bypassed_backends":[],"all_backends":["LocalCPUBackend","LocalDiskBackend"]}
=== bypass: PUT /bypass/add?backend_name=LocalDiskBackend -> 200 json
{"status":"success","backend_name":"LocalDiskBackend","bypassed":true,\
"was_already_bypassed":true,"bypassed_backends":["LocalDiskBackend"]}
=== bypass no more: PUT /bypass/remove?backend_name=LocalDiskBackend -> 200 json
{"status":"success","backend_name":"LocalDiskBackend","bypassed":false,"was_bypassed":true,\
"bypassed_backends":[]}
=== bypass the unknown: PUT /bypass/add?backend_name=FooBackend -> 400 json
{"error":"Unknown backend","message":"Backend 'FooBackend' not found. Available: \
['LocalCPUBackend', 'LocalDiskBackend']"}
=== bypass nothing: PUT /bypass/remove?backend_name= -> 400 json
{"error":"Missing parameter","message":"backend_name is required"}
=== bypass at the scheduler: GET /bypass/list -> 503 json
{"error":"Bypass API is unavailable","message": "LMCache engine not configured."}
=== statistics: GET /chunk_statistics/status -> 200 json
{
  "enabled": true, "total_requests": 2,
  "timing": {"total_time_seconds": 0.02058649, "overhead_percentage": 0.418085377},
  "total_chunks": 16, "unique_chunks": 8, "duplicate_chunks": 8, "reuse_rate": 0.5,
  "bloom_filter": {"size_mb": 22.852559089660645, "hash_count": 6, "item_count": 8},
  "async_queue": {"capacity": 100000, "current_size": 0, "utilization": 0.0},
  "timestamp": 1795957497.6969864, "auto_exit_enabled": true,
  "auto_exit_timeout_hours": 0.0, "auto_exit_target_unique_chunks": 0
}
=== statistics start: POST /chunk_statistics/start -> 200 json
{"status": "success", "message": "Started"}
=== statistics stop: POST /chunk_statistics/stop -> 200 json
{"status": "success", "message": "Stopped"}
=== statistics reset: POST /chunk_statistics/reset -> 200 json
{"status": "success", "message": "Reset"}
=== statistics at a worker: GET /chunk_statistics/status -> 503 json
{"error": "API unavailable", "message": "Lookup client not configured."}
=== statistics start at a worker: POST /chunk_statistics/start -> 503 json
{"error": "API unavailable", "message": "Lookup client not configured."}
=== lookup: GET /lookup/info -> 200 json
{"client": "ChunkStatisticsLookupClient(LMCacheAsyncLookupClient)", "server": "None"}
=== lookup at a worker: GET /lookup/info -> 200 json
{"client": "None", "server": "LMCacheAsyncLookupServer"}
=== lookup dry run: POST /lookup/create?dryrun=true -> 200 json
{"new": "LMCacheAsyncLookupServer", "dryrun": true, "role": "worker"}
=== prefetch: POST /memory/prefetch -> 200 json
{"status": "prefetch_started", "lookup_id": "pf-1", "num_chunks": 4}
=== prefetch with a number: POST /memory/prefetch -> 200 json
{"status": "prefetch_started", "lookup_id": 5, "num_chunks": 1}
=== prefetch nothing: POST /memory/prefetch -> 400 json
{"error": "chunk_hashes and lookup_id are required"}
=== prefetch nothing at the scheduler: POST /memory/prefetch -> 500 json
{"error": "Some workers failed to process request", "failures": {"17000": {"error": "HTTP Error \
400: Bad Request"}, "17001": {"error": "HTTP Error 400: Bad Request"}}}
=== evict: POST /memory/evict -> 200 json
{"status": "success", "num_evicted": 2}
=== evict nothing: POST /memory/evict -> 400 json
{"error": "chunk_hashes is required"}
=== evict no hash: POST /memory/evict -> 500 json
{"error": "invalid literal for int() with base 16: 'zz'"}
=== evict no hash at the scheduler: POST /memory/evict -> 500 json
{"error": "Some workers failed to process request", "failures": {"17000": {"error": "HTTP Error \
500: Internal Server Error"}, "17001": {"error": "HTTP Error 500: Internal Server Error"}}}
=== evict with a dead worker: POST /memory/evict -> 500 json
{"error": "Some workers failed to process request", "failures": {"17001": {"error": "<urlopen \
error [Errno 111] Connection refused>"}}}
=== evict with a hung worker: POST /memory/evict -> 500 json
{"error": "Some workers failed to process request", "failures": {"17001": {"error": "timed out"}}}
=== no query: POST /memory/query -> 404 json
{"detail":"Not Found"}
"""

_CONTENT_TYPES = {"json": "application/json", "text": "text/plain; charset=utf-8"}


def _parse(transcript: str) -> dict[str, Recording]:
    recordings = {}
    for entry in transcript.split("\n=== ")[1:]:
        line, body = entry.split("\n", 1)
        name, asked, answered = re.split(": | -> ", line)
        method, target = asked.split()
        status, kind = answered.split()
        recordings[name] = Recording(
            method, target, int(status), _CONTENT_TYPES[kind], body.removesuffix("\n")
        )
    return recordings


RECORDINGS = _parse(_TRANSCRIPT)
