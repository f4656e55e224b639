"""What LMCache says of its hot tier, and whether residency may act on it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from ramakv.errors import BackendError
from ramakv.lmcache.answers import EngineMeta
from ramakv.lmcache.hot_tier import HotTierFound, find_hot_tier, hot_chunks
from ramakv.lmcache.inspecting import LMCacheInspector
from tests.fakes import make_config

SHAPE = [2, 2, 256, 8, 128]  # layers, keys and values, tokens, heads, head size


def meta(**overrides: Any) -> EngineMeta:
    return EngineMeta(
        attributes={}, **{"kv_dtype": "torch.bfloat16", "kv_shape": SHAPE, **overrides}
    )


def test_the_capacity_is_the_pool_divided_by_what_a_chunk_takes() -> None:
    chunk_bytes = 2 * 2 * 256 * 8 * 128 * 2
    assert hot_chunks({"max_local_cpu_size": 5.0}, meta()) == 5 * 2**30 // chunk_bytes
    assert hot_chunks({"max_local_cpu_size": 5}, meta(kv_dtype="torch.float8_e4m3fn")) == (
        5 * 2**30 // (chunk_bytes // 2)
    )
    assert hot_chunks({"max_local_cpu_size": 5}, meta(kv_dtype="torch.uint8")) == (
        5 * 2**30 // (chunk_bytes // 2)
    )


@pytest.mark.parametrize(
    ("settings", "overrides"),
    [
        ({}, {}),
        ({"max_local_cpu_size": "much"}, {}),
        ({"max_local_cpu_size": 5}, {"kv_shape": None}),
        ({"max_local_cpu_size": 5}, {"kv_dtype": None}),
        ({"max_local_cpu_size": 5}, {"kv_dtype": "torch.complex"}),
    ],
)
def test_what_does_not_add_up_is_an_error_that_says_what_to_set(
    settings: dict[str, Any], overrides: dict[str, Any]
) -> None:
    with pytest.raises(BackendError, match=r"set residency\.hot_chunks_max"):
        hot_chunks(settings, meta(**overrides))


ANSWERS: dict[str, Any] = {
    "/lmc_version": "0.5.6",
    "/meta": {"role": "worker", "kv_dtype": "torch.float16", "kv_shape": SHAPE},
    "/conf": {
        "local_cpu": True,
        "max_local_cpu_size": 1.0,
        "cache_policy": "LRU",
        "local_disk": "file:///kv",
    },
}


async def found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, wanted: int | str = "auto", **answers: Any
) -> HotTierFound:
    """Ask an LMCache that answers so, each path as given."""

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={**ANSWERS, **answers}[request.url.path])

    class Inspector(LMCacheInspector):
        def __init__(self, url: str, **options: Any) -> None:
            super().__init__(url, transport=httpx.MockTransport(answer), **options)

    monkeypatch.setattr("ramakv.lmcache.hot_tier.LMCacheInspector", Inspector)
    config = make_config(tmp_path, residency__hot_chunks_max=wanted)
    tier = await find_hot_tier(config)
    assert isinstance(tier, HotTierFound)
    return tier


async def test_auto_asks_lmcache(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    tier = await found(monkeypatch, tmp_path)
    assert tier == HotTierFound(2**30 // (2 * 2 * 256 * 8 * 128 * 2))
    assert tier.has_slower_tier


@pytest.mark.parametrize("beside", [{}, {"local_disk": None, "remote_url": None}])
async def test_an_lmcache_with_a_hot_tier_alone_is_known_for_that(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, beside: dict[str, Any]
) -> None:
    conf = {"local_cpu": True, "max_local_cpu_size": 1.0, **beside}
    assert not (await found(monkeypatch, tmp_path, **{"/conf": conf})).has_slower_tier


async def test_a_number_that_is_set_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    assert await found(monkeypatch, tmp_path, 77) == HotTierFound(77)


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ({"/lmc_version": "0.4.4"}, "never frees"),
        ({"/lmc_version": "0.4.7.dev3"}, "never frees"),
        ({"/lmc_version": ""}, "of unknown version never frees"),
        ({"/conf": {"local_cpu": False, "max_local_cpu_size": 1}}, "has no hot tier"),
        ({"/conf": {"cache_policy": "LFU", "max_local_cpu_size": 1}}, "LRU only"),
    ],
)
async def test_residency_stays_off_where_it_would_do_harm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, answers: dict[str, Any], why: str
) -> None:
    assert why in (await found(monkeypatch, tmp_path, **answers)).obstacle


async def test_an_embedded_engine_elsewhere_does_not_leak(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    embedded = {**ANSWERS["/meta"], "model_name": "ramakv-embedded"}
    answers = {"/lmc_version": "0.4.4", "/meta": embedded}
    assert (await found(monkeypatch, tmp_path, **answers)).obstacle == ""


async def test_the_embedded_engine_in_the_daemon_need_not_be_asked(tmp_path: Any) -> None:
    config = make_config(
        tmp_path,
        backend__kind="embedded",
        embedded__hot_chunks_max=123,
        residency__hot_chunks_max="auto",
    )
    assert await find_hot_tier(config) == HotTierFound(123)
