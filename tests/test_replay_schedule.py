"""When a replay sends what, on a virtual clock, without HTTP."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import trio

from ramakv.commands.replay import Answer, Replay, percentile
from ramakv.commands.trace import Request, chunk_hash
from tests.traces import make_trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio.testing import MockClock

OK = Answer()


def request(session: str, t: float = 0, **fields: Any) -> Request:
    known: dict[str, Any] = {"turn": 1, "tokens_in": 0, "tokens_out": 0, "hashes": [1], "dur": 0.0}
    return Request(t=t, session=session, **(known | fields))


class Line:
    """Takes the place of the wire: notes every call, and answers after a while."""

    def __init__(
        self,
        takes: Callable[[str], float] = lambda kind: 0.0,
        answer: Callable[[str], Answer] = lambda kind: OK,
    ) -> None:
        self.began = trio.current_time()
        self.calls: list[tuple[float, str, str]] = []
        self.bodies: list[dict[str, Any]] = []
        self.under_way = self.under_way_peak = 0
        self._takes, self._answer = takes, answer

    async def send(self, kind: str, body: bytes) -> Answer:
        message = json.loads(body)
        assert message.get("type", kind) == kind
        self.bodies.append(message)
        at = round(trio.current_time() - self.began, 6)
        self.calls.append((at, kind, message.get("session_id", "")))
        self.under_way += 1
        self.under_way_peak = max(self.under_way_peak, self.under_way)
        await trio.sleep(self._takes(kind))
        self.under_way -= 1
        return self._answer(kind)


async def test_speed_divides_trace_time(autojump_clock: MockClock) -> None:
    """Arrivals and service times shrink alike; the trace's first request is sent at once."""
    line = Line()
    trace = [request("a", 900, dur=4), request("b", 910, dur=4), request("a", 930, dur=1)]
    report = await Replay(line.send, speed=2).run(trace)
    assert line.calls == [
        (0, "turn_start", "a"),
        (2, "turn_end", "a"),
        (5, "turn_start", "b"),
        (7, "turn_end", "b"),
        (15, "turn_start", "a"),
        (15.5, "turn_end", "a"),
    ]
    assert report.requests == 3
    assert report.seconds == pytest.approx(15.5)
    assert report.behind_seconds == pytest.approx(0)


async def test_request_that_comes_too_early_waits_for_its_session_only(
    autojump_clock: MockClock,
) -> None:
    line = Line(takes=lambda kind: 0.5 if kind == "turn_end" else 0)
    trace = [request("a", 0, dur=10), request("a", 3, dur=2), request("b", 3, dur=1)]
    await Replay(line.send, speed=1).run(trace)
    assert line.calls == [
        (0, "turn_start", "a"),
        (3, "turn_start", "b"),
        (4, "turn_end", "b"),
        (10, "turn_end", "a"),
        (10.5, "turn_start", "a"),
        (12.5, "turn_end", "a"),
    ]


async def test_slow_turn_start_does_not_move_turn_end(autojump_clock: MockClock) -> None:
    line = Line(takes=lambda kind: 3 if kind == "turn_start" else 0)
    await Replay(line.send, speed=1).run([request("a", dur=4), request("b", dur=1)])
    ends = [(at, session) for at, kind, session in line.calls if kind == "turn_end"]
    assert ends == [(3, "b"), (4, "a")]


async def test_service_model_stands_in_for_unknown_durations(autojump_clock: MockClock) -> None:
    line = Line()
    trace = [request("a", dur=None, tokens_in=50_000, tokens_out=120)]
    await Replay(line.send, speed=1).run(trace)
    assert line.calls[-1] == (3, "turn_end", "a")


async def test_full_speed_waits_for_nothing(autojump_clock: MockClock) -> None:
    report = await Replay(Line().send).run(make_trace(4))
    assert (report.seconds, report.behind_seconds) == (0, 0)
    assert report.requests == len(make_trace(4))


async def test_full_speed_admits_in_order_and_bounded(autojump_clock: MockClock) -> None:
    """Turns start in the trace's order, and no more than sixteen are under way."""
    line = Line(takes=lambda kind: 1.0)
    trace = [request(f"s{n}") for n in range(100)]
    report = await Replay(line.send).run(trace)
    starts = [session for _, kind, session in line.calls if kind == "turn_start"]
    assert starts == [r.session for r in trace]
    assert line.under_way_peak == 16
    assert report.seconds == pytest.approx(14)


async def test_full_speed_does_not_overtake_a_busy_session(autojump_clock: MockClock) -> None:
    """A turn that waits for its session's earlier one keeps its slot: nothing slips in before."""
    line = Line(takes=lambda kind: 1.0)
    await Replay(line.send, turns_max=2).run([request("a"), request("a"), request("b")])
    starts = [(at, session) for at, kind, session in line.calls if kind == "turn_start"]
    assert sorted(starts) == [(0, "a"), (2, "a"), (2, "b")]


async def test_paced_replay_that_cannot_keep_up_says_so(autojump_clock: MockClock) -> None:
    trace = [request("a", 0, dur=5), request("b", 1, dur=1)]
    report = await Replay(Line().send, speed=1, turns_max=1).run(trace)
    assert report.behind_seconds == pytest.approx(4)


@pytest.mark.parametrize("speed", [None, 1, 50])
async def test_sessions_keep_their_order(autojump_clock: MockClock, speed: float | None) -> None:
    """Whatever the delays: turns never overlap within a session, and it is closed once, last."""
    rng = random.Random(5)
    line = Line(takes=lambda kind: rng.expovariate(1))
    trace = make_trace(6, sessions=30)
    last = {r.session: position for position, r in enumerate(trace)}
    report = await Replay(line.send, speed=speed, last=last).run(trace)
    for session, turns in Counter(r.session for r in trace).items():
        kinds = [kind for _, kind, of in line.calls if of == session]
        assert kinds == ["turn_start", "turn_end"] * turns + ["session_close"]
        ends = [m for m in line.bodies if m["type"] == "turn_end" and m["session_id"] == session]
        expected = [[chunk_hash(h) for h in r.hashes] for r in trace if r.session == session]
        assert [end["kv_transfer_params"]["chunk_hashes"] for end in ends] == expected
    assert line.under_way_peak > 1
    assert report.exit_code == 0


async def test_engine_is_called_within_the_turn(autojump_clock: MockClock) -> None:
    """Retrieve, then store, before turn_end; never with an empty list."""
    line = Line(answer=lambda kind: Answer(hot=3, disk=2, missing=1) if "retr" in kind else OK)
    trace = [request("a", hashes=[7, 8]), request("a", hashes=[])]
    report = await Replay(line.send, engine=True).run(trace)
    kinds = [kind for _, kind, _ in line.calls]
    assert kinds[:4] == ["turn_start", "engine_retrieve", "engine_store", "turn_end"]
    assert kinds[4:] == ["turn_start", "turn_end"]
    assert line.bodies[1] == line.bodies[2] == {"chunk_hashes": [chunk_hash(7), chunk_hash(8)]}
    assert report.to_json()["chunks"] == {"hot": 3, "disk": 2, "missing": 1}
    assert report.to_json()["engine_calls"] == {"retrieve": 1, "store": 1}


async def test_finish_reason_is_sent_where_known(autojump_clock: MockClock) -> None:
    line = Line()
    stops = ["tool_use", "end_turn", None, "refusal"]
    await Replay(line.send).run([request("a", stop=stop) for stop in stops])
    ends = [body.get("finish_reason") for body in line.bodies if body["type"] == "turn_end"]
    assert ends == ["tool_calls", "stop", None, None]
    assert all("finish_reason" in body or body["type"] == "turn_start" for body in line.bodies[:4])
    assert "finish_reason" not in line.bodies[5]


async def test_latencies_are_those_of_the_calls(autojump_clock: MockClock) -> None:
    """One to a hundred milliseconds have these percentiles; a refused call has no latency."""
    delays = iter(range(1, 102))
    answers = iter([OK] * 100 + [Answer(error="no")])
    line = Line(
        takes=lambda kind: next(delays) / 1000 if kind == "turn_start" else 0,
        answer=lambda kind: next(answers) if kind == "turn_start" else OK,
    )
    report = await Replay(line.send).run([request("a")] * 101)
    latency = report.to_json()["latency_ms"]
    assert latency == {"turn_start": {"p50": 50, "p99": 99}, "turn_end": {"p50": 0, "p99": 0}}


def test_percentile_is_the_nearest_rank() -> None:
    assert [percentile([7.0], share) for share in (0, 0.5, 0.99)] == [7, 7, 7]
    assert percentile([1, 2, 3, 4], 0.5) == 2
    assert percentile([1, 2, 3, 4], 0.51) == 3
    assert percentile(range(1, 1001), 0.99) == 990


async def test_errors_are_counted_and_the_first_texts_kept(autojump_clock: MockClock) -> None:
    numbers = iter(range(1000))
    line = Line(answer=lambda kind: Answer(error=f"fault {next(numbers) // 2}"))
    report = await Replay(line.send).run([request("a")] * 10)
    assert (report.requests, report.errors, report.exit_code) == (10, 20, 1)
    assert report.stopped is None
    assert sum(report.error_texts.values()) < 20
    assert list(report.error_texts)[:2] == ["turn_start: fault 0", "turn_end: fault 0"]
    assert len(report.error_texts) == 5


async def test_replay_gives_up_on_a_daemon_that_is_gone(autojump_clock: MockClock) -> None:
    """Silence in a row ends it; an answer in between, even a refusal, starts the count anew."""
    gone = Answer(error="refused", answered=False)
    line = Line(answer=lambda kind: gone)
    report = await Replay(line.send, silent_calls_max=7).run([request("a")] * 100)
    assert report.stopped == "7 calls in a row got no answer from the daemon"
    assert (report.errors, report.exit_code) == (7, 1)
    half = Line(answer=lambda kind: gone if kind == "turn_start" else Answer(error="no"))
    report = await Replay(half.send, silent_calls_max=2).run([request("a")] * 10)
    assert (report.stopped, report.requests) == (None, 10)


async def test_cancelled_replay_keeps_its_report(autojump_clock: MockClock) -> None:
    player = Replay(Line().send, speed=1)
    with trio.move_on_after(10) as scope:
        await player.run([request("a", t, dur=9) for t in range(100)])
    assert scope.cancelled_caught
    assert player.report.requests == 1
    assert player.report.seconds == pytest.approx(10)
