"""The embedded engine's pure parts: hashes, slots, values, statistics, lookups, faults, pins."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, strategies as st

from ramakv.config import Embedded
from ramakv.lmcache.embedded import statistics as statistics_module
from ramakv.lmcache.embedded.conf import FAILED, IMMUTABLE, UNKNOWN, Conf
from ramakv.lmcache.embedded.faults import NO_FAULT, Faults
from ramakv.lmcache.embedded.fs_chunks import parse_config
from ramakv.lmcache.embedded.hashing import parse_tokens_mock, split_tokens
from ramakv.lmcache.embedded.kv_cache import KvCache
from ramakv.lmcache.embedded.lookup import Lookup, client_name
from ramakv.lmcache.embedded.pinning import PinningHotTier, PoolExhaustedError, put_while_room
from ramakv.lmcache.embedded.slots import SlotBoundsError, parse_slot_mapping, slot_ranges
from ramakv.lmcache.embedded.statistics import ChunkStatistics, ExitConditions
from ramakv.lmcache.embedded.switches import Switches

# Hashes


def test_hashes_are_chained_signed_and_written_as_python_does() -> None:
    """Equal prefixes have equal hashes; what comes later changes nothing before it."""
    chunks = split_tokens(range(100), 10)
    hashes = [chunk.chunk_hash for chunk in chunks]
    assert [(chunk.first, chunk.tokens) for chunk in chunks] == [(i, 10) for i in range(0, 100, 10)]
    assert hashes == [chunk.chunk_hash for chunk in split_tokens([*range(105)], 10)]
    assert len(set(hashes)) == 10
    for chunk_hash in hashes:
        assert chunk_hash == format(int(chunk_hash, 16), "x")
        assert -(2**63) <= int(chunk_hash, 16) < 2**63
    assert any(chunk_hash.startswith("-") for chunk_hash in hashes)
    other = [chunk.chunk_hash for chunk in split_tokens([99, *range(1, 100)], 10)]
    assert not set(hashes) & set(other)  # the first token differs, so every prefix does
    again = split_tokens([*range(10), *range(10)], 10)
    assert again[0].chunk_hash == hashes[0] != again[1].chunk_hash


def test_hashes_are_the_same_in_every_process() -> None:
    """They name files, so they must outlive the process."""
    assert split_tokens(range(-5, 5), 10)[0].chunk_hash == "508f610f37177e9a"


def test_only_full_chunks_unless_the_rest_is_kept() -> None:
    """As `save_unfull_chunk` says."""
    assert split_tokens(range(9), 10) == []
    assert [chunk.tokens for chunk in split_tokens(range(25), 10)] == [10, 10]
    assert [chunk.tokens for chunk in split_tokens(range(25), 10, keep_last=True)] == [10, 10, 5]


@pytest.mark.parametrize("text", ["5", "0,1,2", "a,b", "5,5", "9,1", "0,1048577", "0," + "9" * 30])
def test_tokens_that_are_none(text: str) -> None:
    with pytest.raises(ValueError):
        parse_tokens_mock(text)


def test_tokens_mock_is_a_half_open_range() -> None:
    assert parse_tokens_mock("0,100") == range(100)
    assert parse_tokens_mock(" -5, 3") == range(-5, 3)


# Slots


def test_slots_as_in_the_document() -> None:
    assert parse_slot_mapping("0,1,2,3", 20) == [0, 1, 2, 3]
    slots = parse_slot_mapping("1,2,3,[9,12],17,19", 20)
    assert slots == [1, 2, 3, 9, 10, 11, 12, 17, 19]
    assert slot_ranges(slots) == [[1, 3], [9, 12], 17, 19]
    assert parse_slot_mapping(" [ 3 , 4 ] , 1 ", 20) == [3, 4, 1]


@given(st.lists(st.integers(0, 50), min_size=1))
def test_slots_written_and_read_again_are_the_same(slots: list[int]) -> None:
    text = str(slot_ranges(slots))[1:-1]
    assert parse_slot_mapping(text, 51) == slots


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abc", "Invalid slot format: 'abc'"),
        ("", "Invalid slot format: ''"),
        ("1,", "Invalid slot format: ''"),
        ("1,,2", "Invalid slot format: ''"),
        ("[1,2", "Invalid slot format: '[1'"),
        ("1 2", "Invalid slot format: '1 2'"),
        ("[5,2]", "Range start 5 must be <= end 2"),
    ],
)
def test_slots_that_are_none(text: str, expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_slot_mapping(text, 20)
    assert str(caught.value) == expected


@pytest.mark.parametrize("text", ["-1", "20", "[0,999999999999]", "3,[-4,2]"])
def test_slots_that_the_cache_has_not(text: str) -> None:
    with pytest.raises(SlotBoundsError, match="Valid range: 0 to 19"):
        parse_slot_mapping(text, 20)


def test_too_many_slots() -> None:
    with pytest.raises(ValueError, match="more than"):
        parse_slot_mapping(",".join(["[0,99999]"] * 11), 100_000)


# The KV cache


def kv_cache(worker_id: int = 0, slots: int = 25) -> KvCache:
    return KvCache(layers=2, slots=slots, slot_bytes=3, worker_id=worker_id, layer_name="layer_{}")


def test_kv_is_read_and_written_back() -> None:
    """Also where the slots wrap around; other chunks and workers have other bytes."""
    cache = kv_cache()
    chunks = split_tokens(range(30), 10)
    payloads = []
    for chunk in chunks:
        cache.compute(chunk)
        payloads.append(cache.read(chunk))
    assert len(set(payloads)) == 3
    assert [len(payload) for payload in payloads] == [60] * 3
    slots = range(25)
    before = cache.checksums(slots, 10)
    for chunk in split_tokens(range(500, 530), 10):
        cache.compute(chunk)
    assert not set(before) & set(cache.checksums(slots, 10))
    for chunk, payload in zip(chunks, payloads, strict=True):
        assert cache.write(chunk, payload)
    assert cache.checksums(slots, 10) == before
    assert len(before) == 3
    layers = cache.layer_checksums(slots, 10)
    assert list(layers) == ["layer_0", "layer_1"]
    assert layers["layer_0"] != layers["layer_1"]
    other = kv_cache(worker_id=1)
    other.compute(chunks[0])
    assert other.read(chunks[0]) != payloads[0]


def test_kv_of_another_size_is_refused() -> None:
    cache = kv_cache()
    chunk = split_tokens(range(10), 10)[0]
    before = cache.checksums(range(25), 25)
    assert not cache.write(chunk, bytes(61))
    assert cache.checksums(range(25), 25) == before


# Configuration


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("min_retrieve_tokens", "7", 7),
        ("min_retrieve_tokens", 7.0, 7),
        ("save_decode_cache", "True", True),
        ("save_decode_cache", 0, False),
        ("hit_miss_ratio", "0.5", 0.5),
        ("hit_miss_ratio", None, None),
        ("retrieve_locations", ["A"], ["A"]),
        ("retrieve_locations", "A,B", ["A", "B"]),
        ("remote_serde", "cachegen", "cachegen"),
        ("chunk_statistics_auto_exit_timeout_hours", 24, 24.0),
    ],
)
def test_values_are_brought_to_their_type(name: str, value: Any, expected: Any) -> None:
    conf = Conf(Embedded())
    assert conf.update({name: value}) == ({name: expected}, {})
    assert conf[name] == expected
    assert type(conf[name]) is type(expected)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("unknown_key", 1, UNKNOWN),
        ("chunk_size", 1, IMMUTABLE),
        ("lmcache_instance_id", "x", IMMUTABLE),
        ("min_retrieve_tokens", "abc", FAILED),
        ("min_retrieve_tokens", True, FAILED),
        ("min_retrieve_tokens", 1.5, FAILED),
        ("min_retrieve_tokens", None, FAILED),
        ("min_retrieve_tokens", 2**63, FAILED),
        ("min_retrieve_tokens", float("inf"), FAILED),
        ("min_retrieve_tokens", "9" * 5000, FAILED),
        ("hit_miss_ratio", "nan", FAILED),
        ("save_decode_cache", "maybe", FAILED),
        ("retrieve_locations", [1, None], FAILED),
        ("remote_serde", {}, FAILED),
        ("remote_serde", "x" * 5000, FAILED),
    ],
)
def test_values_that_cannot_be_set(name: str, value: Any, error: str) -> None:
    conf = Conf(Embedded())
    before = conf.values()
    assert conf.update({name: value}) == ({}, {name: error})
    assert conf.values() == before


def test_in_lmcache_0_4_4_nothing_is_immutable() -> None:
    conf = Conf(Embedded(behaviour="lmcache-0.4.4"))
    assert conf.update({"chunk_size": "128"}) == ({"chunk_size": 128}, {})


def test_names_are_not_trimmed_and_unknown_ones_left_out() -> None:
    conf = Conf(Embedded())
    assert list(conf.values("save_decode_cache, min_retrieve_tokens,nope")) == ["save_decode_cache"]
    assert conf.values("") == conf.values(None) == conf.values()


def test_configuration_files_of_lmcache() -> None:
    """The top level only; JSON will do as well."""
    text = (
        "# comment\n---\nchunk_size: 256  # tokens\nlocal_disk: \"a # b\" # c\nremote_url: 'x'\n"
        "extra_config:\n  nested: 1\nlist:\n- a\nnothing: null\nempty:\n"
    )
    assert parse_config(text) == {
        "chunk_size": "256",
        "local_disk": "a # b",
        "remote_url": "x",
        "extra_config": None,
        "list": None,
        "nothing": None,
        "empty": None,
    }
    assert parse_config(' {"remote_url": "x"}') == {"remote_url": "x"}
    for wrong in ("just words", '{"a": }', "a b: c"):
        with pytest.raises(ValueError):
            parse_config(wrong)


# Statistics

NEVER = ExitConditions()


def test_statistics_count_while_they_collect() -> None:
    statistics = ChunkStatistics()
    statistics.record("ab", NEVER, 0.0)
    assert (statistics.total_chunks, statistics.unique_chunks) == (0, 0)
    statistics.start(0.0)
    statistics.record("ab", NEVER, 1e9)
    statistics.record("bc", NEVER, 1e9)
    assert (statistics.total_requests, statistics.total_chunks) == (2, 4)
    assert (statistics.unique_chunks, statistics.duplicate_chunks) == (3, 1)
    statistics.stop()
    statistics.record("d", NEVER, 1e9)
    assert statistics.total_chunks == 4
    assert not statistics.is_collecting(NEVER, 1e9)
    statistics.start(0.0)
    statistics.reset(0.0)
    assert (statistics.total_chunks, statistics.unique_chunks) == (0, 0)
    assert statistics.is_collecting(NEVER, 1e9)


def test_statistics_end_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a time, at a number of different chunks, and when there are too many to remember."""
    statistics = ChunkStatistics()
    hours = ExitConditions(timeout_hours=2.0)
    statistics.start(100.0)
    assert statistics.is_collecting(hours, 100.0 + 7199)
    assert not statistics.is_collecting(hours, 100.0 + 7200)
    assert not statistics.is_collecting(hours, 100.0)
    target = ExitConditions(target_unique_chunks=2)
    statistics.start(0.0)
    statistics.record("aabcd", target, 0.0)
    assert (statistics.total_chunks, statistics.unique_chunks) == (3, 2)
    assert not statistics.is_collecting(target, 0.0)
    assert (hours.enabled, target.enabled, NEVER.enabled) == (True, True, False)
    monkeypatch.setattr(statistics_module, "UNIQUE_CHUNKS_MAX", 3)
    statistics.start(0.0)
    statistics.record("wxyz", NEVER, 0.0)
    assert statistics.unique_chunks == 3


# Lookups


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "LMCacheLookupClient"),
        ({"enable_async_loading": True}, "LMCacheAsyncLookupClient"),
        (
            {"enable_async_loading": True, "enable_scheduler_bypass_lookup": True},
            "LMCacheBypassLookupClient",
        ),
        ({"hit_miss_ratio": 0}, "HitLimitLookupClient(LMCacheLookupClient)"),
        ({"hit_miss_ratio": 2}, "LMCacheLookupClient"),
        (
            {"hit_miss_ratio": 1, "enable_chunk_statistics": True},
            "ChunkStatisticsLookupClient(HitLimitLookupClient(LMCacheLookupClient))",
        ),
    ],
)
def test_the_client_is_what_the_configuration_asks_for(
    changes: dict[str, Any], expected: str
) -> None:
    conf = Conf(Embedded())
    conf.update({"enable_chunk_statistics": False, **changes})
    assert client_name(conf) == expected


def test_a_change_takes_effect_when_it_is_created_again() -> None:
    conf = Conf(Embedded())
    lookup = Lookup(conf, "worker", has_engine=True)
    conf.update({"enable_async_loading": True})
    assert (lookup.current, lookup.planned) == ("LMCacheLookupServer", "LMCacheAsyncLookupServer")
    assert lookup.close() == "LMCacheLookupServer"
    assert (lookup.client, lookup.server) == (None, None)
    assert lookup.create() == lookup.current == "LMCacheAsyncLookupServer"
    assert lookup.client is None


# Switches


def test_switches_say_where_chunks_are_read_and_written() -> None:
    hot, disk = "LocalCPUBackend", "LocalDiskBackend"
    switches = Switches([hot, disk])
    every = [switches.readable, switches.writable, switches.admits]
    assert [rule(location) for rule in every for location in (hot, disk)] == [True] * 6
    assert not switches.bypass(disk)
    assert switches.bypass(disk)
    assert [rule(disk) for rule in every] == [False] * 3
    assert switches.restore(disk)
    assert not switches.restore(disk)
    switches.hot_cache = False
    assert [rule(hot) for rule in every] == [True, False, False]
    switches.hot_cache, switches.frozen = True, True
    assert [rule(hot) for rule in every] == [True, False, False]
    assert [rule(disk) for rule in every] == [False, False, True]


# Faults


def drawn(seed: int, port_number: int, **shares: Any) -> list[Any]:
    faults = Faults(Embedded(fault_seed=seed, **shares), port_number)
    return [(faults.draw(), faults.draw_worker_failure()) for _ in range(200)]


def test_faults_are_off_by_default() -> None:
    assert drawn(1, 0) == [(NO_FAULT, False)] * 200


def test_faults_are_those_of_their_seed() -> None:
    """The same seed, the same faults; another seed or port, others."""
    shares = {
        "fault_latency_seconds_max": 2.0,
        "fault_error_share": 0.25,
        "fault_hang_share": 0.1,
        "fault_worker_share": 0.5,
    }
    first = drawn(7, 0, **shares)
    assert first == drawn(7, 0, **shares)
    assert all(a != b for a, b in pairwise([first, drawn(8, 0, **shares), drawn(7, 1, **shares)]))
    assert all(0 <= fault.latency_seconds <= 2.0 for fault, _ in first)
    assert 20 < sum(fault.fails for fault, _ in first) < 80
    assert 5 < sum(fault.hangs for fault, _ in first) < 40
    assert 70 < sum(worker for _, worker in first) < 130
    always = drawn(1, 0, fault_error_share=1.0)
    assert all(fault.fails and not fault.hangs for fault, _ in always)


# Pins


def test_held_chunks_are_not_displaced_and_keep_their_memory() -> None:
    """Until their prefetch is consumed, whether they are in the index or not."""
    tier = PinningHotTier(3)
    assert put_while_room(tier, "abc", str.encode) == (3, "abc")
    tier.begin("p")
    tier.hold("p", "ax")
    assert (tier.pinned, list(tier.holders())) == (1, ["p"])
    assert tier.put("d", b"d") == "b"
    assert tier.evict("ac") == ["a", "c"]
    assert (tier.pinned, list(tier)) == (1, ["d"])
    assert put_while_room(tier, "efg", str.encode) == (3, "efg")  # each displaced another one
    assert list(tier) == ["f", "g"]
    tier.hold("q", "fg")
    with pytest.raises(PoolExhaustedError):
        tier.put("h", b"h")
    assert put_while_room(tier, "gh", str.encode) == (0, "g")
    assert tier.clear() == 0
    tier.consume("p")
    assert tier.put("h", b"h") is None
    assert (tier.clear(), list(tier)) == (1, ["f", "g"])
    tier.consume("q")
    assert (tier.pinned, list(tier.holders()), tier.clear()) == (0, [], 2)


holds = st.one_of(
    st.tuples(st.just("put"), st.sampled_from("abcdef")),
    st.tuples(st.just("evict"), st.sampled_from("abcdef")),
    st.tuples(st.sampled_from(["hold", "consume", "begin"]), st.sampled_from("pqr")),
    st.tuples(st.just("clear"), st.just("")),
)


@given(st.lists(holds))
def test_memory_is_never_taken_twice_nor_lost(operations: list[tuple[str, str]]) -> None:
    """Whatever is put, held and consumed: what is held stays, and all comes back in the end."""
    tier = PinningHotTier(3)
    lost = 0
    for operation, name in operations:
        match operation:
            case "put":
                put_while_room(tier, name, str.encode)
            case "evict":
                tier.evict(name)
            case "hold":
                tier.hold(name, list(tier)[:1])
            case "consume":
                tier.consume(name)
            case "begin":
                lost += name in tier.holders()
                tier.begin(name)
            case "clear":
                assert tier.clear() + len(tier) <= 3
        assert len(tier) <= 3
        assert tier.pinned <= 3
    for lookup_id in list(tier.holders()):
        tier.consume(lookup_id)
    tier.clear()
    if not lost:
        assert (tier.pinned, len(tier)) == (0, 0)
        assert put_while_room(tier, "xyz", str.encode) == (3, "xyz")


def test_an_id_used_twice_is_held_for_ever() -> None:
    tier = PinningHotTier(3)
    put_while_room(tier, "ab", str.encode)
    for chunk in "ab":
        tier.begin("p")
        tier.hold("p", chunk)
    tier.consume("p")
    assert (tier.pinned, tier.clear(), list(tier)) == (1, 1, ["a"])


def test_a_held_chunk_loaded_again_takes_memory_twice() -> None:
    tier = PinningHotTier(2)
    tier.put("a", b"1")
    tier.hold("p", "a")
    tier.put("a", b"2")
    assert (tier.pinned, len(tier)) == (1, 1)
    tier.hold("q", "a")
    with pytest.raises(PoolExhaustedError):
        tier.put("b", b"")
