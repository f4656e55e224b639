"""The replay of a trace through the real service: what it counts is right, and always the same."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from bench import virtual_time
from bench.residency import future, report
from bench.residency.__main__ import main
from bench.residency.costs import MODELS
from bench.residency.engine import Found
from bench.residency.meter import Meter
from bench.residency.player import Setting, replay
from bench.residency.tally import first_token_seconds
from bench.residency.trace import Trace, load
from ramakv.commands.trace import Request
from tests.traces import make_trace, write_trace

TIMES = ("seconds", "cpu_seconds", "cpu_seconds_of", "daemon_cpu_us_per_event")
"""What is another in each run."""


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return load(write_trace(tmp_path / "made.jsonl.gz", make_trace(3, sessions=14)))


def a_request(t: float, session: str, turn: int, *hashes: int, **more: Any) -> Request:
    return Request(
        t=t,
        session=session,
        turn=turn,
        tokens_in=len(hashes) * 512,
        tokens_out=10,
        hashes=list(hashes),
        dur=more.pop("dur", 1.0),
        **more,
    )


def traced(folder: Path, *requests: Request) -> Trace:
    return load(write_trace(folder / "trace.jsonl", requests))


def without_times(result: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key not in TIMES}


# The same, once more, as plainly as it goes ---------------------------------------------


def leading(blocks: Sequence[str], held: Any) -> int:
    count = 0
    while count < len(blocks) and blocks[count] in held:
        count += 1
    return count


def plain_lru(requests: Sequence[Sequence[str]], capacity: int) -> Iterator[int]:
    """Hits of a list with the most recent block in front, each request stored tail first."""
    recent: list[str] = []
    for blocks in requests:
        yield leading(blocks, recent)
        for block in reversed(blocks):
            if block in recent:
                recent.remove(block)
            recent.insert(0, block)
            del recent[capacity:]


def plain_future(requests: Sequence[Sequence[str]], capacity: int) -> Iterator[int]:
    """Hits where, after each request, the blocks stay that are used again soonest."""
    held: set[str] = set()
    for number, blocks in enumerate(requests):
        yield leading(blocks, held)
        held.update(blocks)

        def used_again(block: str, now: int = number) -> tuple[int, int]:
            for later in range(now + 1, len(requests)):
                if block in requests[later]:
                    last = max(n for n in range(later) if block in requests[n])
                    return later, requests[last].index(block)
            last = max(n for n in range(now + 1) if block in requests[n])
            return len(requests), requests[last].index(block)

        held = set(sorted(sorted(held, reverse=True), key=used_again)[:capacity])


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3, 1.0])
def test_an_engine_that_nobody_coordinates_finds_what_a_plain_lru_finds(
    trace: Trace, share: float
) -> None:
    requests = [turn.hashes for turn in trace.turns]
    result = replay(trace, Setting(share, "lru"))
    hits = sum(plain_lru(requests, trace.capacity(share)))
    assert result["hot"] == hits / trace.blocks
    assert result["hot"] + result["disk"] + result["recomputed"] == pytest.approx(1)


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3])
def test_the_bound_lets_go_what_is_used_again_last(trace: Trace, share: float) -> None:
    requests = [turn.hashes for turn in trace.turns]
    capacity = trace.capacity(share)
    found = [where.hot for where in future.replay(requests, capacity)]
    assert found == list(plain_future(requests, capacity))
    assert sum(found) >= sum(plain_lru(requests, capacity))


def test_with_room_for_all_only_new_blocks_are_not_hot(trace: Trace) -> None:
    seen: set[str] = set()
    new = 0
    for turn in trace.turns:
        new += len(turn.hashes) - leading(turn.hashes, seen)
        seen.update(turn.hashes)
    for policy in ("lru", "future"):
        result = replay(trace, Setting(1.0, policy))
        assert result["hot"] == pytest.approx(1 - new / trace.blocks)
        assert result["disk"] == 0
        assert result["recomputed"] == pytest.approx(new / trace.blocks)


@pytest.mark.parametrize("policy", ["off", "rust"])
def test_the_same_replay_twice_is_the_same(trace: Trace, policy: str) -> None:
    setting = Setting(0.1, policy)
    first, second = replay(trace, setting), replay(trace, setting)
    assert without_times(first) == without_times(second)


# What the daemon does ---------------------------------------------------------------------


def test_the_daemons_calls_are_counted(tmp_path: Path) -> None:
    trace = traced(
        tmp_path,
        a_request(0, "s", 1, 1, 2, 3),
        a_request(10, "s", 2, 1, 2, 4),
        a_request(20, "s", 3, 1, 2, 4),
    )
    result = replay(trace, Setting(1.0, "off"))
    assert result["events"] == 6
    assert result["prefetch_calls_per_turn"] == pytest.approx(2 / 3)  # the first knows nothing
    assert result["prefetch_chunks_per_turn"] == pytest.approx(6 / 3)
    assert result["evict_calls_per_turn"] == pytest.approx(1 / 3)  # of 3, that nobody has now
    assert result["evict_chunks_per_turn"] == pytest.approx(1 / 3)
    assert result["calls_failed"] == result["events_refused"] == 0
    assert result["daemon_cpu_us_per_event"] > 0


def test_a_prefetch_at_a_turns_start_comes_too_late_for_its_own_request(tmp_path: Path) -> None:
    trace = traced(
        tmp_path,
        a_request(0, "s", 1, 1, 2),
        a_request(2, "other", 1, 3, 4),
        a_request(20, "s", 2, 1, 2),
    )
    result = replay(trace, Setting(0.5, "off"))
    assert result["hot"] == 0
    assert result["disk"] == pytest.approx(2 / 6)


def test_what_the_rust_daemon_suspends_is_gone_from_every_tier(tmp_path: Path) -> None:
    requests = (a_request(0, "s", 1, 1, 2), a_request(1000, "s", 2, 1, 2))
    trace = traced(tmp_path, *requests)
    away = replay(trace, Setting(1.0, "rust", suspend_after_seconds=300))
    assert (away["hot"], away["disk"]) == (0, 0)
    assert away["evict_chunks_per_turn"] == pytest.approx(2 / 2)
    stays = replay(trace, Setting(1.0, "rust", suspend_after_seconds=2000))
    assert stays["hot"] == pytest.approx(2 / 4)
    assert stays["evict_calls_per_turn"] == 0


def test_a_session_that_starts_from_its_parents_context_is_forked(tmp_path: Path) -> None:
    parent = a_request(0, "p", 1, 1, 2, 3)
    child = a_request(10, "c", 1, 1, 2, 9, parent="p:1")
    stranger = a_request(20, "d", 1, 7, 8, parent="p:1")
    result = replay(traced(tmp_path, parent, child, stranger), Setting(1.0, "off"))
    # Three turns, a fork and its end; the child's turn_start brings its parent's chunks up.
    assert result["events"] == 8
    assert result["prefetch_chunks_per_turn"] == pytest.approx(3 / 3)


def test_turns_of_a_session_that_end_in_another_order_leave_the_later_ones_map(
    tmp_path: Path,
) -> None:
    trace = traced(
        tmp_path,
        a_request(0, "s", 1, 1, 2, dur=50.0),
        a_request(10, "s", 2, 1, 2, 3),
    )
    result = replay(trace, Setting(1.0, "off"))
    assert result["events_refused"] == 1


def test_cpu_time_is_charged_to_whoever_is_at_work() -> None:
    meter = Meter()

    def work(seconds: float) -> None:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass

    async def main() -> None:
        with meter.counting("daemon"):
            work(0.06)
            with meter.counting("engine"):
                work(0.04)
        await trio.sleep(3600)
        with meter.counting("engine"):
            work(0.01)
        await trio.sleep(3600)

    virtual_time.run(main, seed=0, instruments=[meter])
    assert meter.seconds["daemon"] == pytest.approx(0.06, abs=0.015)
    assert meter.seconds["engine"] == pytest.approx(0.05, abs=0.015)


# Costs ------------------------------------------------------------------------------------


def test_a_token_of_llama_3_1_has_128_and_320_kib_of_keys_and_values() -> None:
    assert MODELS["8b"].kv_bytes_per_token == 128 * 1024
    assert MODELS["70b"].kv_bytes_per_token == 320 * 1024


@pytest.mark.parametrize("model", list(MODELS.values()), ids=list(MODELS))
def test_the_first_token_comes_sooner_from_memory_than_from_disk_than_computed(
    model: Any,
) -> None:
    request = a_request(0, "s", 1, *range(100))
    hot, disk, new = (
        first_token_seconds(model, request, found, 512)
        for found in (Found(100, 0, 0), Found(0, 100, 0), Found(0, 0, 100))
    )
    assert 0 < hot < disk < new
    assert new == pytest.approx(100 * 512 / model.prefill_tokens_per_second)


# The command ------------------------------------------------------------------------------


def test_the_command_writes_results_a_report_and_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_trace(tmp_path / "made.jsonl.gz", make_trace(5, sessions=5))
    out, file = tmp_path / "out", tmp_path / "found.json"
    words = [str(path), "--shares", "0.1,0.5", "--policies", "lru,off,future", "--jobs", "1"]
    assert main([*words, "--json", str(file), "--out", str(out)]) == 0
    found = json.loads(file.read_text())
    assert [(result["share"], result["policy"]) for result in found["results"]] == [
        (share, policy) for share in (0.1, 0.5) for policy in ("lru", "off", "future")
    ]
    for result in found["results"]:
        assert result["hot"] + result["disk"] + result["recomputed"] == pytest.approx(1)
        assert set(result["ttft_ms"]) == {"mean", "p50", "p90", "p99"}
        assert set(result["ttft_ms_by_model"]) == set(MODELS)
        assert result["evict_calls_per_turn"] >= 0
        assert result["prefetch_calls_per_turn"] >= 0
    assert json.loads((out / "results.json").read_text()) == found
    assert "<table>" in (out / "report.html").read_text()
    assert "Blocks found hot" in capsys.readouterr().out
    bound = [line for line in report.markdown(found).splitlines() if line.startswith("| future")]
    assert len(bound) == 5  # in each table once, and in that of all figures for each share


def test_a_trace_that_is_not_there_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err


def test_the_daemons_configuration_can_be_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = traced(tmp_path, a_request(0, "s", 1, 1, 2), a_request(10, "s", 2, 1, 2))
    silent = replay(trace, Setting(1.0, "off", overrides={"turn_start_prefetch": False}))
    assert silent["prefetch_calls_per_turn"] == 0
    chatty = replay(trace, Setting(1.0, "off", overrides={"backend.chunks_per_call_max": 1}))
    assert chatty["prefetch_calls_per_turn"] == pytest.approx(2 / 2)
    words = [str(tmp_path / "trace.jsonl"), "--policies", "off", "--set", "backend.kind=magic"]
    assert main(words) == 2
    assert "magic" in capsys.readouterr().err


def test_a_policy_that_does_not_exist_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main([str(tmp_path / "trace.jsonl"), "--policies", "lru,magic"])
    assert refused.value.code == 2
    assert "magic" in capsys.readouterr().err
