"""The client's guarantees: order, nothing lost in the queue, safe retries, never in the way."""

from __future__ import annotations

import itertools
import logging
import random
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import pytest
from hypothesis import given, settings, strategies as st

from ramakv.client import (
    AnswerTimeoutError,
    Client,
    ClientError,
    DaemonUnavailableError,
    EventDroppedError,
    EventInvalidError,
    EventRefusedError,
    EventSkippedError,
    OutcomeUnknownError,
)
from ramakv.client.lanes import Lanes
from ramakv.errors import RamakvError
from tests.daemons import free_port
from tests.event_server import HANG_UP, Answer, Event, event_server, ok, refusal

Run = Callable[[Callable[[], Awaitable[None]]], None]


@pytest.fixture(params=["asyncio", "trio"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a test's async part on one of the event loops that the client is for."""
    return partial(anyio.run, backend=request.param)


def turn_end(session: Any, *hashes: str) -> Any:
    return session.turn_end(list(hashes))


# Sessions and turns


def test_sessions_turns_and_forks_send_the_events_of_the_contract(run: Run) -> None:
    async def main() -> None:
        async with Client(served.url, close_seconds=30) as client, client.session("s") as session:
            async with session.turn(lookup_id="l") as turn:
                turn.end(["a", "b"], finish_reason="stop", debug_context={"messages": []})
            session.suspend()
            session.restore("other")
            async with session.fork("child") as fork:
                pass
            assert (await session.map()).data["number"] == 7
            assert fork.ended is not None
            assert fork.started.reply is not None

    with event_server(lambda event: ok(fork_id=3, number=7)) as served:
        run(main)
    seq = served.events[1].pop("seq")
    assert isinstance(seq, int)
    assert served.events == [
        {"type": "turn_start", "session_id": "s", "lookup_id": "l"},
        {
            "type": "turn_end",
            "session_id": "s",
            "kv_transfer_params": {"chunk_hashes": ["a", "b"]},
            "finish_reason": "stop",
            "debug_context": {"messages": []},
        },
        {"type": "session_suspend", "session_id": "s"},
        {"type": "snapshot_restore", "session_id": "s", "source_session_id": "other"},
        {"type": "session_fork", "session_id": "s", "child_session_id": "child"},
        {"type": "session_fork_end", "session_id": "s", "fork_id": 3},
        {"type": "session_map", "session_id": "s"},
        {"type": "session_close", "session_id": "s"},
    ]


@pytest.mark.parametrize(
    ("on_exit", "expected"),
    [("close", ["session_close"]), ("suspend", ["session_suspend"]), ("keep", [])],
)
def test_leaving_a_session_ends_it_as_it_was_told(run: Run, on_exit: Any, expected: Any) -> None:
    async def main() -> None:
        async with Client(served.url, close_seconds=30) as client:
            with client.session("s", on_exit=on_exit):
                pass

    with event_server() as served:
        run(main)
    assert served.types() == expected


def test_a_turn_that_failed_reports_no_end_and_raises_what_it_raised(run: Run) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="the model is away"):  # as it is, not in a group
            async with (
                Client(served.url, close_seconds=30) as client,
                client.session("s") as session,
                session.turn(),
            ):
                raise ValueError("the model is away")

    with event_server() as served:
        run(main)
    assert served.types() == ["turn_start", "session_close"]


def test_what_is_sent_is_what_the_list_was_when_it_was_given(run: Run) -> None:
    async def main() -> None:
        async with Client(served.url, close_seconds=30) as client:
            hashes = ["a"]
            client.session("s").turn_end(hashes)
            hashes.append("b")

    with event_server() as served:
        run(main)
    assert served.maps() == [["a"]]


def test_turn_ends_are_numbered_upwards_across_clients(run: Run) -> None:
    async def main() -> None:
        for _ in range(2):
            async with Client(served.url, close_seconds=30) as client:
                for _ in range(20):
                    client.session("s").turn_end([])

    with event_server() as served:
        run(main)
    numbers = [event["seq"] for event in served.events]
    assert len(numbers) == 40
    assert all(a < b for a, b in itertools.pairwise(numbers))
    assert numbers[-1] < 2**53


def test_a_fork_that_was_not_made_is_not_ended(run: Run) -> None:
    async def main() -> None:
        async with Client(served.url, close_seconds=30) as client:
            fork = client.session("s").fork()
            ended = await fork.end()
            assert isinstance(ended.cause, EventSkippedError)
            assert fork.end() is fork.ended
            assert client.counters.skipped == 1

    with event_server(lambda event: refusal(404)) as served:
        run(main)
    assert served.types() == ["session_fork"]


# Order


def test_a_sessions_events_arrive_in_order_and_sessions_side_by_side(run: Run) -> None:
    async def main() -> None:
        async with Client(served.url, close_seconds=30, connections_max=4) as client:
            sessions = [client.session(f"s{n}") for n in range(8)]
            for number in range(10):
                for session in sessions:
                    turn_end(session, str(number))

    with event_server(lambda event: Answer(200, {"ok": True}, seconds=0.005)) as served:
        run(main)
    for number in range(8):
        maps = [event["kv_transfer_params"]["chunk_hashes"] for event in served.of(f"s{number}")]
        assert maps == [[str(n)] for n in range(10)]
    assert 1 < served.in_hand_most <= 4


def test_a_slow_session_holds_up_nobody_else(run: Run) -> None:
    may_answer = threading.Event()

    def answer(event: Event) -> Answer:
        is_slow = event["session_id"] == "slow"
        return Answer(200, {"ok": True}, after=may_answer if is_slow else None)

    async def main() -> None:
        async with Client(served.url, close_seconds=30) as client:
            slow = turn_end(client.session("slow"), "a")
            turn_end(client.session("slow"), "b")
            for _ in range(20):
                assert (await turn_end(client.session("fast"), "c")).ok
            assert slow.reply is None
            may_answer.set()

    with event_server(answer) as served:
        run(main)
    assert len(served.of("slow")) == 2


def test_a_childs_events_wait_for_the_fork_that_makes_it(run: Run) -> None:
    def answer(event: Event) -> Answer:
        return Answer(200, {"ok": True}, seconds=0.05 if "child_session_id" in event else 0.0)

    async def main() -> None:
        async with Client(served.url, close_seconds=30) as client:
            child = client.session("child")
            turn_end(child, "before")
            client.session("parent").fork("child")
            turn_end(child, "after")
            turn_end(client.session("parent"), "p")

    with event_server(answer) as served:
        run(main)
    assert served.types()[:2] == ["turn_end", "session_fork"]
    assert served.maps()[0] == ["before"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_interleaving_keeps_the_order_of_every_session(data: st.DataObject) -> None:
    """Items come, go and are dropped in any order: none overtakes another of its sessions."""
    lanes: Lanes[int] = Lanes()
    names = st.lists(st.sampled_from("abcd"), max_size=2)
    sessions: dict[int, list[str]] = {}
    may_go: set[int] = set()
    gone: list[int] = []
    for number in range(data.draw(st.integers(1, 40))):
        sessions[number] = data.draw(names)
        if lanes.add(number, sessions[number]):
            may_go.add(number)
        if data.draw(st.booleans()):
            item = data.draw(st.sampled_from(sorted(lanes)))  # sent, or dropped while it waits
            may_go.discard(item)
            may_go.update(lanes.remove(item))
            gone.append(item)
        for item in lanes:
            earlier = [n for n in lanes if n < item and set(sessions[n]) & set(sessions[item])]
            assert (item in may_go) == (not earlier)
    while lanes:
        item = min(may_go)  # never empty: nobody waits in a ring
        may_go.remove(item)
        may_go.update(lanes.remove(item))
    assert not may_go


@settings(max_examples=12, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["end", "fork", "wait"])), max_size=40
    ),
    st.sampled_from(["asyncio", "trio"]),
    st.integers(0, 10_000),
)
def test_random_sessions_against_a_moody_daemon_lose_and_swap_nothing(
    steps: list[tuple[str, str]], backend: str, seed: int
) -> None:
    """It refuses for now, or does the work and hangs up without a word."""
    rng = random.Random(seed)
    applied: dict[str, list[str]] = {name: [] for name in "abc"}

    def answer(event: Event) -> Answer:
        mood = rng.random()
        if mood < 0.1:
            return refusal(503, retry_after="0")
        if event["type"] == "turn_end":
            (mark,) = event["kv_transfer_params"]["chunk_hashes"]
            if mark not in applied[event["session_id"]]:
                applied[event["session_id"]].append(mark)
                if mood < 0.15:
                    return HANG_UP
        return ok()

    async def main() -> None:
        async with Client(served.url, close_seconds=60) as client:
            for number, (name, what) in enumerate(steps):
                if what == "end":
                    turn_end(client.session(name), str(number))
                elif what == "fork":
                    client.session(name).fork("abc".replace(name, "")[0])
                else:
                    await anyio.sleep(0.001)
        assert client.counters.dropped == client.counters.unanswered == 0

    with event_server(answer) as served:
        anyio.run(main, backend=backend)
    for name in "abc":
        sent = [str(n) for n, step in enumerate(steps) if step == (name, "end")]
        assert applied[name] == sent


# Retries


def once(first: Answer) -> Callable[[Event], Answer]:
    """Answer the first request so, and all others ok."""
    answers = [first]
    return lambda event: answers.pop() if answers else ok(fork_id=1)


@pytest.mark.parametrize("type_", ["turn_start", "turn_end", "session_fork", "session_close"])
def test_what_was_refused_for_now_is_sent_again_in_its_place(run: Run, type_: str) -> None:
    async def main() -> None:
        async with Client(served.url, close_seconds=30) as client:
            fields = {"kv_transfer_params": {"chunk_hashes": []}} if type_ == "turn_end" else {}
            first = client.send(type_, session_id="s", **fields)
            client.session("s").suspend()
            assert (await first).ok
            assert client.counters.retried == 1

    with event_server(once(refusal(503, retry_after="0"))) as served:
        run(main)
    assert served.types() == [type_, type_, "session_suspend"]
    assert served.events[0] == served.events[1]


@pytest.mark.parametrize(
    ("call", "is_repeated"),
    [
        (lambda session: session.turn_end(["a"]), True),
        (lambda session: session.restore(), True),
        (lambda session: session.suspend(), True),
        (lambda session: session.close(), True),
        (lambda session: session.turn_start(), False),
        (lambda session: session.fork().started, False),
        (lambda session: session.map(), False),
    ],
    ids=["turn_end", "restore", "suspend", "close", "turn_start", "fork", "map"],
)
def test_what_may_have_been_applied_is_sent_again_only_where_that_is_safe(
    run: Run, call: Any, is_repeated: bool
) -> None:
    async def main() -> None:
        async with Client(served.url, close_seconds=30) as client:
            reply = await call(client.session("s"))
            assert reply.ok is is_repeated
            assert isinstance(reply.cause, OutcomeUnknownError) is not is_repeated
            assert client.counters.unanswered == (not is_repeated)

    with event_server(once(HANG_UP)) as served:
        run(main)
    assert len(served.events) == 1 + is_repeated
    assert served.events[0] == served.events[-1]


def test_a_turn_end_that_an_earlier_try_brought_counts_as_done(run: Run) -> None:
    answers = [refusal(409, "seq 1 is not above 1, the last one applied"), HANG_UP]

    async def main() -> None:
        async with Client(served.url, close_seconds=30) as client:
            assert (await turn_end(client.session("s"), "a")).ok

    with event_server(lambda event: answers.pop()) as served:
        run(main)


def test_a_turn_end_that_is_stale_at_its_first_try_is_an_error(run: Run) -> None:
    async def main() -> None:
        async with Client(served.url, close_seconds=30) as client:
            reply = await turn_end(client.session("s"), "a")
            assert isinstance(reply.cause, EventRefusedError)
            assert reply.cause.status == 409

    with event_server(lambda event: refusal(409, "seq")) as served:
        run(main)
    assert len(served.events) == 1


def test_an_event_that_is_never_answered_is_given_up_and_the_next_one_goes(run: Run) -> None:
    def answer(event: Event) -> Answer:
        return HANG_UP if event["type"] == "turn_end" else ok()

    async def main() -> None:
        async with Client(served.url, close_seconds=30) as client:
            lost = turn_end(client.session("s"), "a")
            assert (await client.session("s").suspend()).ok
            assert isinstance(lost.reply.cause, OutcomeUnknownError)

    with event_server(answer) as served:
        run(main)
    assert served.types() == ["turn_end"] * 6 + ["session_suspend"]


def test_a_question_is_answered_at_once_when_nobody_is_there(run: Run) -> None:
    async def main() -> None:
        async with Client(f"http://127.0.0.1:{free_port()}", close_seconds=0.1) as client:
            turn_end(client.session("s"), "a")
            assert isinstance((await client.health()).cause, DaemonUnavailableError)
            assert isinstance((await client.session("t").map()).cause, DaemonUnavailableError)
            assert client.waiting == 1
            assert client.counters.unreachable == 2

    run(main)


# The queue


@pytest.mark.parametrize(
    ("when_full", "arrives"),
    [("drop_oldest", ["0", "3", "4", "5"]), ("drop_newest", ["0", "1", "2", "3"])],
)
def test_a_full_queue_drops_what_it_was_told_to_and_counts_it(
    run: Run, when_full: Any, arrives: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with Client(
            served.url, close_seconds=30, queue_events_max=3, when_full=when_full
        ) as client:
            session = client.session("s")
            deliveries = [turn_end(session, "0")]
            while not served.events:  # noqa: ASYNC110 - another thread's
                await anyio.sleep(0.001)
            deliveries += [turn_end(session, str(number)) for number in range(1, 6)]
            gone = [d.reply for d in deliveries if d.reply is not None]
            assert [type(reply.cause) for reply in gone] == [EventDroppedError] * 2
            assert client.counters.dropped == 2
        assert client.counters.delivered == 4

    with event_server(lambda event: Answer(200, {"ok": True}, seconds=0.1)) as served:
        run(main)
    assert served.maps() == [[name] for name in arrives]
    assert "3 events wait already" in caplog.text


def test_closing_waits_for_what_is_queued(run: Run) -> None:
    async def main() -> None:
        async with Client(served.url, close_seconds=30) as client:
            for number in range(30):
                turn_end(client.session("s"), str(number))
            assert client.waiting == 30
        assert client.waiting == 0
        assert client.counters.delivered == 30

    with event_server() as served:
        run(main)
    assert len(served.events) == 30


def test_closing_is_bounded_and_says_how_many_events_were_lost(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    never = threading.Event()

    async def main() -> None:
        with anyio.fail_after(10):
            async with Client(served.url, close_seconds=0.2) as client:
                deliveries = [turn_end(client.session("s"), str(n)) for n in range(5)]
                while not served.events:  # noqa: ASYNC110 - another thread's
                    await anyio.sleep(0.001)
        never.set()
        assert client.counters.dropped == 4
        assert client.counters.unanswered == 1
        assert all(delivery.reply is not None for delivery in deliveries)

    with event_server(lambda event: Answer(200, {"ok": True}, after=never)) as served:
        run(main)
    assert "4 events dropped, 1 without an answer" in caplog.text


def test_a_cancelled_agent_still_delivers_its_last_events(run: Run) -> None:
    async def main() -> None:
        with anyio.move_on_after(0.05) as scope:
            async with Client(served.url, close_seconds=30) as client, client.session("s"):
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        assert client.counters.delivered == 1

    with event_server() as served:
        run(main)
    assert served.types() == ["session_close"]


# Never in the way, unless asked


def test_nothing_that_goes_wrong_is_raised_into_the_agent(run: Run) -> None:
    never = threading.Event()

    async def main() -> None:
        client = Client(served.url, answer_seconds=0.05, close_seconds=0.1)
        assert isinstance((await client.health()).cause, EventDroppedError)  # not in its block
        async with client:
            session = client.session("s")
            for bad in (None, "abc", [""], [1], 5, ["\ud800"]):
                reply = await session.turn_end(bad)
                assert isinstance(reply.cause, EventInvalidError), bad
            for name in ("", None):
                assert isinstance((await client.session(name).close()).cause, EventInvalidError)
            assert isinstance((await client.send("x", odd=object())).cause, EventInvalidError)
            for params in ({}, {"kv_transfer_params": None}, {"kv_transfer_params": {}}):
                reply = await client.send("turn_end", session_id="s", **params)
                assert isinstance(reply.cause, EventInvalidError)
            assert client.counters.refused == 12
            assert isinstance((await session.suspend()).cause, AnswerTimeoutError)
            while not served.events:  # noqa: ASYNC110 - another thread's
                await anyio.sleep(0.001)
        never.set()
        assert isinstance((await client.health()).cause, EventDroppedError)

    with event_server(lambda event: Answer(200, {"ok": True}, after=never)) as served:
        run(main)
    assert served.types() == ["session_suspend"]


@pytest.mark.parametrize(
    "answer",
    [
        Answer(200, b"<html>"),
        Answer(200, [1]),
        Answer(200, {"done": True}),
        Answer(404, b""),
        Answer(500, {"ok": False, "error": "a fault"}),
        Answer(401, {"ok": False, "error": "invalid or missing bearer token"}),
    ],
)
def test_odd_answers_are_errors_that_say_what_came(run: Run, answer: Answer) -> None:
    async def main() -> None:
        async with Client(served.url, close_seconds=30) as client:
            reply = await turn_end(client.session("s"), "a")
            assert isinstance(reply.cause, EventRefusedError)
            assert reply.cause.status == answer.status
            expected = (
                answer.body["error"]
                if isinstance(answer.body, dict | None) and ("error" in answer.body)
                else f"answered {answer.status}"
            )
            assert expected in reply.error

    with event_server(lambda event: answer) as served:
        run(main)
    assert len(served.events) == 1


def test_asked_to_it_raises_errors_of_one_tree(run: Run) -> None:
    async def main() -> None:
        async with Client(served.url, close_seconds=30, raise_errors=True) as client:
            with pytest.raises(EventRefusedError, match="session 's' not found") as caught:
                await client.session("s").map()
            assert caught.value.status == 404
            with pytest.raises(EventInvalidError, match="chunk_hashes"):
                await client.session("s").turn_end(None)
        with pytest.raises(EventDroppedError, match="is closed"):
            await client.health()
        with pytest.raises(EventDroppedError, match="the client closed"):
            async with Client(
                f"http://127.0.0.1:{free_port()}", raise_errors=True, close_seconds=0.05
            ) as client:
                client.session("s").close()

    with event_server(lambda event: refusal(404, "session 's' not found")) as served:
        run(main)
    for kind in (AnswerTimeoutError, DaemonUnavailableError, EventSkippedError, EventInvalidError):
        assert issubclass(kind, ClientError)
    assert issubclass(ClientError, RamakvError)


def test_a_flood_of_the_same_error_is_a_line_of_the_log(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with Client(served.url, close_seconds=30) as client:
            for _ in range(50):
                await client.health()

    with event_server(lambda event: refusal(401)) as served:
        run(main)
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


def test_importing_it_imports_nothing_of_the_daemon() -> None:
    script = "import sys, ramakv.client; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert "ramakv.client.aio" in loaded
    assert not loaded & {"quart", "hypercorn", "structlog", "sqlite3"}
    ours = {name for name in loaded if name.startswith("ramakv") and "client" not in name}
    assert ours == {"ramakv", "ramakv.errors"}
