"""The benchmark's load: what is sent, when, and how answers are read."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import msgspec
import pytest

from bench import wrk
from bench.schedule import (
    agent_load,
    due_times,
    lane_of,
    moments,
    one_each,
    open_loop,
    synthetic_agents,
)
from bench.workload import KINDS, Workload
from bench.wrk import LoadError
from ramakv.commands.trace import Request
from ramakv.events import AnyEvent, TurnEnd

SMALL = Workload(sessions=5, chunks=8, changed=2, hash_chars=16)

OUTPUT = """Running 1s test @ http://127.0.0.1:1/event
  1 threads and 64 connections
BENCH requests 1064 seconds 1.064000 not_200 0 refused 0 broken 0
STEADY requests 1000 seconds 0.500000
CURVE {}
REFUSAL
"""
CURVE = " ".join(str(number) for number in range(1, 23))


def decode(body: bytes) -> AnyEvent:
    return msgspec.json.decode(body, type=AnyEvent)


@pytest.mark.parametrize("kind", KINDS)
def test_every_event_of_the_load_is_a_valid_one(kind: str) -> None:
    for session in SMALL.session_ids():
        event = decode(SMALL.event(kind, session, random.Random(1)))
        assert event.__struct_config__.tag == kind


def test_a_turn_changes_so_many_chunks_and_keeps_the_others() -> None:
    rng = random.Random(1)
    turns = [decode(SMALL.event("turn_end", "s000001", rng)) for _ in range(2)]
    first, second = (
        turn.kv_transfer_params.chunk_hashes for turn in turns if isinstance(turn, TurnEnd)
    )
    assert len(first) == len(second) == len({*first}) == 8
    assert first[:6] == second[:6]
    assert not {*first[6:]} & {*second[6:]}
    assert {len(chunk) for chunk in first} == {16}


def test_sessions_share_no_chunk() -> None:
    kept = [chunk for session in SMALL.session_ids() for chunk in SMALL.kept(session)]
    assert len(kept) == len({*kept}) == 30


def test_a_load_file_has_a_line_for_each_session(tmp_path: Path) -> None:
    load = wrk.write_load(tmp_path, SMALL, "turn_end", in_array=3)
    lines = load.events.read_text().splitlines()
    assert len(lines) == 5
    assert (load.fresh, load.events_per_request) == (2, 3)
    assert isinstance(decode((lines[0] + '"a","b"]}}').encode()), TurnEnd)
    assert wrk.write_load(tmp_path, SMALL, "health").fresh == 0


def test_the_rate_leaves_out_the_first_wave_of_answers() -> None:
    loaded = wrk.parse(OUTPUT.format(CURVE))
    assert loaded.requests == 1064
    assert loaded.per_second == 2000
    assert loaded.latencies == {"p50_ms": 7.0, "p99_ms": 15.0, "p999_ms": 19.0}


def test_with_hardly_a_second_wave_the_rate_is_that_of_all_the_time() -> None:
    output = OUTPUT.format(CURVE).replace("STEADY requests 1000", "STEADY requests 3")
    assert wrk.parse(output).per_second == 1000


@pytest.mark.parametrize("fault", ["not_200 0", "refused 0", "broken 0"])
def test_one_answer_that_is_not_good_fails_the_run(fault: str) -> None:
    output = OUTPUT.format(CURVE).replace(fault, fault.replace("0", "7").replace("_27", "_20"))
    output = output.replace("not_270", "not_200").replace("REFUSAL", "REFUSAL 503 overloaded")
    with pytest.raises(LoadError, match=r"7 .*503 overloaded"):
        wrk.parse(output)


def test_output_that_cannot_be_read_fails_the_run() -> None:
    with pytest.raises(LoadError, match="unable to connect"):
        wrk.parse("unable to connect to 127.0.0.1:1 Connection refused")


def test_without_wrk_the_harness_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(LoadError, match="apt-get install wrk"):
        wrk.check_wrk()


def test_an_open_loop_is_evenly_spaced() -> None:
    assert due_times(4, 1.0) == [0.0, 0.25, 0.5, 0.75]
    items = open_loop(SMALL, "turn_end", 100, 0.1, seed=1)
    assert [item.due for item in items] == due_times(100, 0.1)
    assert {item.lane for item in items} == {None}
    assert len({item.body for item in items}) == 10


def test_one_each_names_every_session_once() -> None:
    sessions = [decode(item.body).session_id for item in one_each(SMALL, "turn_end")]  # type: ignore[union-attr]
    assert sorted(sessions) == sorted(SMALL.session_ids())


def request(at: float, session: str, seconds: float, *hashes: int) -> Request:
    return Request(at, session, 1, 10, 10, list(hashes), dur=seconds)


def test_a_trace_becomes_starts_ends_and_closes_in_the_order_of_time() -> None:
    found = moments([request(0, "a", 5, 1), request(1, "b", 1, 2), request(7, "a", 1, 1, 3)])
    assert [(each.at, each.session, each.kind) for each in found] == [
        (0, "a", "turn_start"),
        (1, "b", "turn_start"),
        (2, "b", "turn_end"),
        (2, "b", "session_close"),
        (5, "a", "turn_end"),
        (7, "a", "turn_start"),
        (8, "a", "turn_end"),
        (8, "a", "session_close"),
    ]


def test_a_turn_waits_for_its_sessions_last_one() -> None:
    found = moments([request(0, "a", 5, 1), request(1, "a", 1, 1)])
    assert [(each.at, each.kind) for each in found][:4] == [
        (0, "turn_start"),
        (5, "turn_end"),
        (5, "turn_start"),
        (6, "turn_end"),
    ]


def test_a_sessions_events_stay_on_one_connection_at_the_traces_speed() -> None:
    requests = [request(0, "a", 2, 1), request(4, "a", 2, 1)]
    items = agent_load(requests, 2.0, "x-")
    assert [item.due for item in items] == [0, 1, 2, 3, 3]
    assert {item.lane for item in items} == {"x-a"}
    assert {item.due for item in agent_load(requests, None, "")} == {0}
    assert 0 <= lane_of("x-a", 4) < 4


def test_synthetic_agents_grow_share_a_prompt_and_come_in_order() -> None:
    requests = list(synthetic_agents(sessions=10))
    assert requests == list(synthetic_agents(sessions=10))
    assert [each.t for each in requests] == sorted(each.t for each in requests)
    by_session = defaultdict(list)
    for each in requests:
        by_session[each.session].append(each)
        assert each.hashes[:20] == list(range(20))
        assert len(each.hashes) == len({*each.hashes}) <= 220
    assert len(by_session) == 10
    for turns in by_session.values():
        assert [each.turn for each in turns] == list(range(1, len(turns) + 1))
        assert turns[0].hashes == turns[1].hashes[: len(turns[0].hashes)]


def test_agents_share_nothing_but_the_prompt() -> None:
    seen: dict[int, str] = {}
    for each in synthetic_agents(sessions=10):
        for chunk in each.hashes[20:]:
            assert seen.setdefault(chunk, each.session) == each.session
