"""The client against a real LMCache 0.4.4, and the embedded engine's replies beside its.

Every call is made to both, in one order. `make test-lmcache` runs this; nothing else does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx
import pytest
import trio

from ramakv.core.topology import Condition
from ramakv.errors import BackendError, BackendUnsupportedError
from ramakv.lmcache.care import LMCacheCare
from ramakv.lmcache.client import LMCacheClient
from ramakv.lmcache.operating import LMCacheOperator
from tests.daemons import free_port
from tests.real_lmcache import running_lmcache
from tests.test_embedded_document import open_served_engine

PYTHON = os.environ.get("RAMAKV_REAL_LMCACHE", "")

pytestmark = [
    pytest.mark.real_lmcache,
    pytest.mark.skipif(not PYTHON, reason="RAMAKV_REAL_LMCACHE does not name a Python"),
]

NEVER = {"lookup_close", "lookup_create"}
"""What a real one may abort at; see docs/lmcache.md."""

DISK = "LocalDiskBackend"
HASHES = ["1a2b", "-3c4d"]


class Case(NamedTuple):
    """A call of the client, and the status with which the real LMCache refuses it, if it does."""

    name: str
    method: str
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = MappingProxyType({})
    refused: int | None = None


CASES = [
    Case("load synchronously", "conf_update", ({"enable_async_loading": False},)),
    Case("version of LMCache", "lmc_version"),
    Case("commit", "commit_id"),
    Case("version and commit", "version"),
    Case("inference info", "inference_info"),
    Case("inference info in a format", "inference_info", ("json",)),
    Case("inference version", "inference_version", refused=500),
    Case("conf", "conf"),
    Case("conf by name", "conf", (["min_retrieve_tokens", "save_decode_cache", "nope"],)),
    Case("conf update", "conf_update", ({"min_retrieve_tokens": 512, "save_decode_cache": True},)),
    Case("conf update in part", "conf_update", ({"min_retrieve_tokens": 0, "nope": 1},)),
    Case("conf update of nothing known", "conf_update", ({"nope": 1},)),
    Case("conf update of nothing", "conf_update", ({},)),
    Case("meta", "meta"),
    Case("meta by name", "meta", (["worker_id", "model_name"],)),
    Case("store", "cache_store", (0, 1024)),
    Case("store backwards", "cache_store", (9, 1), refused=400),
    Case("retrieve", "cache_retrieve", (0, 1024)),
    Case("retrieve of the unknown", "cache_retrieve", (5000, 6024)),
    Case("clear", "cache_clear"),
    Case("clear by location", "cache_clear", (["LocalCPUBackend", DISK],)),
    Case("retrieve from disk", "cache_retrieve", (0, 1024)),
    Case("metrics", "metrics"),
    Case("check", "kvcache_check", ("0,1,2,3", 2)),
    Case("check layer by layer", "kvcache_check", ([0, 1, 2, 3], 2), {"layerwise": True}),
    Case("check without a size", "kvcache_check", ("0,1,2,3", None)),
    Case("check of a bad size", "kvcache_check", ("0,1,2,3", 0), refused=400),
    Case("slots recorded?", "kvcache_record_slot"),
    Case("record slots", "kvcache_record_slot_set", (True,)),
    Case("record slots no more", "kvcache_record_slot_set", (False,)),
    Case("kvcache info", "kvcache_info", refused=404),
    Case("load chunk files", "load_fs_chunks", ("{folder}/fs.yaml",), {"max_chunks": 9}),
    Case("load without a file", "load_fs_chunks", ("{folder}/nope.yaml",), refused=400),
    Case("load from nowhere", "load_fs_chunks", ("{folder}/local.yaml",), refused=500),
    Case("freeze", "freeze_enable"),
    Case("frozen?", "freeze_status"),
    Case("freeze no more", "freeze_disable"),
    Case("hot cache off", "hot_cache_disable"),
    Case("hot cache?", "hot_cache_status"),
    Case("hot cache on", "hot_cache_enable"),
    Case("lookup info", "lookup_info"),
    Case("lookup recreate", "lookup_recreate", refused=400),
    Case("statistics", "chunk_statistics_status", refused=503),
    Case("statistics start", "chunk_statistics_start", refused=503),
    Case("statistics stop", "chunk_statistics_stop", refused=503),
    Case("statistics reset", "chunk_statistics_reset", refused=503),
    Case("bypasses", "bypass_list"),
    Case("bypass", "bypass_add", (DISK,)),
    Case("bypass again", "bypass_add", (DISK,)),
    Case("bypass no more", "bypass_remove", (DISK,)),
    Case("bypass the unknown", "bypass_add", ("FooBackend",), refused=400),
    Case("bypass nothing", "bypass_remove", ("",), refused=400),
    Case("prefetch", "memory_prefetch", (HASHES, "ramakv-real-1"), refused=404),
    Case("evict", "memory_evict", (HASHES, ["LocalCPUBackend"]), refused=404),
    Case("query", "memory_query", (HASHES,), refused=404),
]

REAL_SETTINGS = """
app_id audit_actual_remote_url blend_check_layers blend_min_tokens blend_recompute_ratios
blend_special_str blend_thresholds controller_pull_url controller_reply_url
enable_lazy_memory_allocator extra_config gds_backend gds_buffer_size gds_path gds_path_sharding
internal_api_server_host internal_api_server_include_index_list
internal_api_server_socket_path_prefix lazy_memory_expand_trigger_ratio lazy_memory_initial_ratio
lazy_memory_safe_size lazy_memory_step_ratio lmcache_worker_heartbeat_delay_time
lmcache_worker_heartbeat_time lmcache_worker_ids lmcache_worker_ports local_disk_path_sharding
maru_path maru_pool_size nixl_backends nixl_buffer_device nixl_buffer_size numa_mode p2p_host
p2p_init_ports p2p_lookup_ports pd_buffer_device pd_buffer_size pd_peer_alloc_port pd_peer_host
pd_peer_init_port pd_proxy_host pd_proxy_port pd_role pd_skip_proxy_notification py_enable_gc
remote_config_url remote_storage_plugins reserve_local_cpu_size runtime_plugin_locations
script_allowed_imports storage_plugins transfer_channel use_gds use_gpu_connector_v3
"""

NO_VLLM = "standalone mode has no vLLM that could tell; the embedded engine tells of itself"
NO_LOOKUP = "standalone mode has no lookup server to make anew; the embedded worker has one"
NO_MEMORY = "the routes come with LMCache-Ascend, which is not on PyPI"

EXPECTED_DIFFERENCES: dict[tuple[str, str], tuple[str, str, str]] = {
    ("inference info", "body: keys"): ("", "lmcache vllm_config", NO_VLLM),
    ("inference info in a format", "body: keys"): ("", "lmcache vllm_config", NO_VLLM),
    ("conf", "body: keys"): (
        " ".join(REAL_SETTINGS.split()),
        "enable_chunk_hashes_return lookup_hashes_cache_size",
        "settings of what the embedded engine has not; its own two are LMCache-Ascend's",
    ),
    ("meta", "body.engine_id"): (
        "null",
        "string",
        "standalone mode is given no engine id; vLLM gives one",
    ),
    ("metrics", "content type"): (
        "text/plain; charset=utf-8",
        "text/plain; version=0.0.4; charset=utf-8",
        "the embedded engine names the version of the text format, as Prometheus asks",
    ),
    ("lookup recreate", "status"): ("400", "200", NO_LOOKUP),
    ("lookup recreate", "body: keys"): ("error", "new old", NO_LOOKUP),
    ("prefetch", "status"): ("404", "200", NO_MEMORY),
    ("prefetch", "body: keys"): ("detail", "lookup_id num_chunks status", NO_MEMORY),
    ("evict", "status"): ("404", "200", NO_MEMORY),
    ("evict", "body: keys"): ("detail", "num_evicted status", NO_MEMORY),
    ("query", "status"): ("404", "200", NO_MEMORY),
    ("query", "body: keys"): ("detail", "-3c4d 1a2b", NO_MEMORY),
}
"""By case and place: what the real one has, what the embedded engine has, and why that stays."""


class Exchange(NamedTuple):
    """What came over the wire for one call, and what the client made of it."""

    status: int
    content_type: str
    shape: Any
    outcome: Any


def shape_of(value: Any) -> Any:
    """Return the JSON type of a value; of an object also its keys, of an array its elements'."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            kinds: list[Any] = []
            for shape in map(shape_of, value):
                if shape not in kinds:
                    kinds.append(shape)
            return kinds
    return {key: shape_of(inner) for key, inner in value.items()}


def shape_in(reply: httpx.Response) -> Any:
    try:
        return shape_of(reply.json())
    except ValueError:
        return "text"


def differences(real: Any, embedded: Any, place: str = "body") -> Iterator[tuple[str, Any, Any]]:
    """Name each place where two shapes are not the same."""
    if isinstance(real, dict) and isinstance(embedded, dict):
        only_real, only_embedded = real.keys() - embedded.keys(), embedded.keys() - real.keys()
        if only_real or only_embedded:
            yield f"{place}: keys", " ".join(sorted(only_real)), " ".join(sorted(only_embedded))
        for key in real.keys() & embedded.keys():
            yield from differences(real[key], embedded[key], f"{place}.{key}")
    elif real != embedded:
        yield place, real, embedded


def filled(value: Any, folder: Path) -> Any:
    return value.replace("{folder}", str(folder)) if isinstance(value, str) else value


async def make_calls(url: str, folder: Path) -> dict[str, Exchange]:
    """Make every call, one after the other, and note what came of it."""
    replies: list[httpx.Response] = []

    async def note(response: httpx.Response) -> None:
        await response.aread()
        replies.append(response)

    exchanges = {}
    timeouts = {"connect_timeout_seconds": 5.0, "call_timeout_seconds": 30.0}
    async with LMCacheOperator(url, **timeouts, connections_max=1) as client:
        client._http.event_hooks = {"response": [note]}
        for case in CASES:
            arguments = [filled(argument, folder) for argument in case.arguments]
            outcome: Any
            try:
                outcome = await getattr(client, case.method)(*arguments, **case.options)
            except BackendError as error:
                outcome = error
            reply = replies.pop()
            assert not replies
            exchanges[case.name] = Exchange(
                reply.status_code, reply.headers["content-type"], shape_in(reply), outcome
            )
    return exchanges


class Both(NamedTuple):
    """What the real LMCache and the embedded engine answered, by case."""

    real: dict[str, Exchange]
    embedded: dict[str, Exchange]


async def ask_embedded(folder: Path) -> dict[str, Exchange]:
    async with open_served_engine(
        folder, behaviour="lmcache-0.4.4", chunk_size=256, kv_slots=4096
    ) as served:
        return await make_calls(f"http://127.0.0.1:{served.ports[1]}", folder)


@pytest.fixture(scope="module")
def real_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_lmcache(PYTHON, tmp_path_factory.mktemp("real")) as real:
        yield real.url


@pytest.fixture(scope="module")
def both(real_url: str, tmp_path_factory: pytest.TempPathFactory) -> Both:
    folder = tmp_path_factory.mktemp("both")
    (folder / "empty").mkdir()
    (folder / "fs.yaml").write_text(
        f"chunk_size: 256\nremote_url: 'fs://host:0{folder}/empty'\nremote_serde: naive\n"
    )
    (folder / "local.yaml").write_text("chunk_size: 256\n")
    real = trio.run(make_calls, real_url, folder)
    return Both(real, trio.run(ask_embedded, folder))


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_client_works_with_a_real_lmcache(case: Case, both: Both) -> None:
    """It understands the answer, or says why there is none."""
    exchange = both.real[case.name]
    if case.refused is None:
        assert not isinstance(exchange.outcome, BackendError), exchange
        assert exchange.status in ({200, 400} if case.method == "conf_update" else {200})
    else:
        assert isinstance(exchange.outcome, BackendError), exchange
        assert (exchange.outcome.status, exchange.status) == (case.refused, case.refused)
        assert exchange.outcome.error or exchange.outcome.detail


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_embedded_engine_answers_in_the_same_form(case: Case, both: Both) -> None:
    """Status, content type, keys and JSON types, but for what EXPECTED_DIFFERENCES lists."""
    real, embedded = both.real[case.name], both.embedded[case.name]
    found = {
        (case.name, place): (str(one), str(other))
        for place, one, other in (
            *differences(real.status, embedded.status, "status"),
            *differences(real.content_type, embedded.content_type, "content type"),
            *differences(real.shape, embedded.shape),
        )
    }
    expected = {
        key: (real_has, embedded_has)
        for key, (real_has, embedded_has, _) in EXPECTED_DIFFERENCES.items()
        if key[0] == case.name
    }
    assert found == expected


def test_values_that_the_client_understood(both: Both) -> None:
    """A few of them, so that a real one that answers nonsense is noticed."""
    said = {name: exchange.outcome for name, exchange in both.real.items()}
    assert said["version of LMCache"] == "0.4.4"
    assert said["meta"].role == "worker"
    assert said["meta"].chunk_size == said["conf"]["chunk_size"] == 256
    assert said["conf update in part"].errors == {"nope": "Unknown config"}
    assert said["retrieve"].num_retrieved == 1024
    assert said["retrieve of the unknown"].num_retrieved == 0
    assert said["retrieve from disk"].num_retrieved == 1024
    assert said["clear"].num_removed == 1024
    assert said["frozen?"].freeze is True
    assert said["hot cache?"].hot_cache is False
    assert said["bypass"].bypassed_backends == [DISK]
    assert said["bypasses"].all_backends == ["LocalCPUBackend", DISK]


async def test_the_daemons_client_meets_a_real_lmcache(real_url: str) -> None:
    """Without LMCache-Ascend there is nothing to prefetch or evict with, and it says so."""
    timeouts = {"connect_timeout_seconds": 5.0, "call_timeout_seconds": 30.0}
    async with LMCacheClient(real_url, **timeouts, connections_max=1) as client:
        with pytest.raises(BackendUnsupportedError):
            await client.prefetch(HASHES, "ramakv-real-2")
        with pytest.raises(BackendUnsupportedError):
            await client.evict(HASHES, ["LocalCPUBackend"])
        assert await client.query(HASHES) is None


async def test_the_daemon_notices_that_a_real_lmcache_was_restarted(tmp_path: Path) -> None:
    """Its instance id is configured, and stays."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    timeouts = {"connect_timeout_seconds": 5.0, "call_timeout_seconds": 30.0}
    async with LMCacheClient(url, **timeouts, connections_max=1) as client:
        care = LMCacheCare(client, url, timeout_seconds=30.0)
        with running_lmcache(PYTHON, tmp_path, port=port):
            assert await care.check_first()
            for _ in range(2):
                assert await care.look() == Condition(restarted=False, held_chunks=0)
        with running_lmcache(PYTHON, tmp_path, port=port):
            assert (await care.look()).restarted
            assert not (await care.look()).restarted


def test_every_method_is_called() -> None:
    methods = {name for name in dir(LMCacheOperator) if not name.startswith("_")}
    assert {case.method for case in CASES} == methods - NEVER


def test_each_expected_difference_is_of_a_case() -> None:
    assert {name for name, _ in EXPECTED_DIFFERENCES} <= {case.name for case in CASES}
