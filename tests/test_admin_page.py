"""The page's data and actions, without a browser: who gets them, and what is in them."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
import structlog.testing
import trio

from ramakv import logs
from ramakv.config import DISK_LOCATION, HOT_LOCATION
from ramakv.problems import Problems
from ramakv.web import admin, feed
from ramakv.web.overview import Overview
from tests.fakes import Call, FakeLMCache, outage
from tests.http_server import until
from tests.operators import BEARER, TOKEN, admin_listener, operators

ACTION = {"X-Ramakv-Action": "1"}
ACTIONS: dict[str, Any] = {
    "/api/session/close": {"session_id": "s"},
    "/api/session/suspend": {"session_id": "s"},
    "/api/dead-letters/retry": {},
    "/api/prefetching": {"paused": True},
}
DATA = ("/api/overview", "/api/stream", "/api/session?id=s", "/api/search?q=s")
STATIC = Path(admin.__file__).parent / "static"


class Located(FakeLMCache):
    """Says where chunks lie, by their first letter."""

    async def query(self, chunk_hashes: Sequence[str]) -> dict[str, list[str]] | None:
        await self._call(Call("query", tuple(chunk_hashes), None, trio.current_time()))
        where = {"h": [DISK_LOCATION, HOT_LOCATION], "d": [DISK_LOCATION], "r": ["RemoteBackend"]}
        return {chunk: where.get(chunk[0], []) for chunk in chunk_hashes}


# The shell


async def test_anybody_may_load_the_shell_and_nobody_its_data_without_the_token(
    tmp_path: Path,
) -> None:
    async with operators(tmp_path, auth_token=TOKEN) as ops:
        await ops.agent.turn_end("s", "a")
        shell = await ops.http.get("/")
        assert shell.status_code == 200
        assert shell.headers["content-type"] == "text/html; charset=utf-8"
        for name in re.findall(r'(?:src|href)="(/static/[^"]+)"', shell.text):
            assert (await ops.http.get(name)).status_code == 200, name
        for path in DATA:
            reply = await ops.http.get(path)
            assert reply.status_code == 401, path
            assert reply.headers["www-authenticate"] == "Bearer"
        for path, body in ACTIONS.items():
            reply = await ops.http.post(path, json=body, headers=ACTION)
            assert reply.status_code == 401, path
            assert reply.headers["connection"] == "close"  # its body was not read
        assert ops.agent.counts() == {"a": 1}


def test_the_page_is_made_of_nothing_from_outside() -> None:
    for path in STATIC.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|@import|\burl\((?!#)", text), path.name
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(", text), (
            path.name
        )
    assert not re.search(r"<script(?! type=\"module\" src)|<style|\son\w+=|style=", index_text())


def index_text() -> str:
    return (STATIC / "index.html").read_text()


async def test_the_shell_takes_the_browsers_language(tmp_path: Path) -> None:
    async with operators(tmp_path) as ops:
        for accepted, language in (
            ("zh-CN,zh;q=0.9,en;q=0.8", "zh"),
            ("en-GB,en;q=0.9,zh;q=0.8", "en"),
            ("fr", "en"),
            ("", "en"),
        ):
            shell = await ops.http.get("/", headers={"Accept-Language": accepted})
            assert f'<html lang="{language}">' in shell.text, accepted


async def test_a_file_that_did_not_change_is_not_sent_again(tmp_path: Path) -> None:
    async with operators(tmp_path) as ops:
        first = await ops.http.get("/static/page.js")
        again = await ops.http.get(
            "/static/page.js", headers={"If-None-Match": first.headers["etag"]}
        )
        assert (again.status_code, again.content) == (304, b"")
        for name in ("/static/nothing.js", "/static/..%2fgate.py", "/static/../gate.py"):
            assert (await ops.http.get(name)).status_code == 404


# The overview


async def test_the_overview_says_what_there_is(tmp_path: Path) -> None:
    async with operators(tmp_path) as ops:
        await ops.agent.turn_end("alice", "sys", "tools", "a")
        await ops.agent.turn_end("bob", "sys", "tools", "b", "c")
        await ops.agent.turn_end("carol", "sys")
        await ops.agent.send("session_suspend", "carol")
        await ops.agent.send("turn_start", "bob")
        now = await ops.get("/api/overview")
        sessions = now["sessions"]
        assert (sessions["in_turn"], sessions["paused"], sessions["suspended"]) == (1, 1, 1)
        assert [row["id"] for row in now["recent"]] == ["bob", "carol", "alice"]
        assert [row["state"] for row in now["recent"]] == ["in_turn", "suspended", "paused"]
        assert [(row["id"], row["chunks"]) for row in now["largest"]] == [("bob", 4), ("alice", 3)]
        assert now["chunks"] == {"referenced": 5, "references": 7, "evicting": 0, "hot_share": None}
        assert now["shared"] == [
            {"first": "sys", "chunks": 2, "references": 2, "sessions": ["bob", "alice"], "more": 0}
        ]
        assert now["lmcache"]["trouble"] == ""
        assert now["phase"] == "running"


async def test_sharing_counts_forks_and_sleepers_that_it_does_not_name(tmp_path: Path) -> None:
    async with operators(tmp_path) as ops:
        await ops.agent.turn_end("s", "a", "b")
        await ops.agent.send("session_fork", "s")
        await ops.agent.turn_end("t", "a")
        place = ops.service.router.place("t")
        assert place.actor is not None
        ops.service.router.retire(place.actor)
        shared = (await ops.get("/api/overview"))["shared"]
        assert [
            (row["first"], row["references"], row["sessions"], row["more"]) for row in shared
        ] == [
            ("a", 3, ["s"], 2),
            ("b", 2, ["s"], 1),
        ]


async def test_lists_are_short_however_many_sessions_there_are(tmp_path: Path) -> None:
    async with operators(tmp_path) as ops:
        for number in range(300):
            await ops.agent.turn_end(f"s{number:03}", *(f"{number}-{n}" for n in range(number)))
        now = await ops.get("/api/overview")
        assert len(now["recent"]) == len(now["largest"]) == 12
        assert now["largest"][0]["id"] == "s299"
        assert len(json.dumps(now)) < 20_000


async def test_what_is_wrong_with_lmcache_and_the_log_is_told(tmp_path: Path) -> None:
    problems = Problems()
    queued = logs.configure_logs("info", "json", problems=problems)
    try:
        structlog.get_logger("x").info("fine")
        structlog.get_logger("x").error("a thing broke", chunk="c" * 5000, cause="why")
    finally:
        queued.close()
        structlog.reset_defaults()
    (problem,) = problems.last
    assert (problem.level, problem.what, problem.facts["cause"]) == (
        "error",
        "a thing broke",
        "why",
    )
    assert len(problem.facts["chunk"]) == 300
    async with operators(
        tmp_path, FakeLMCache(fault=outage), backend__breaker_failures_max=1
    ) as ops:
        await ops.agent.turn_end("s", "a")
        await ops.agent.send("turn_start", "s")
        lmcache = (await ops.get("/api/overview"))["lmcache"]
        assert lmcache["breaker"] == "open"
        assert lmcache["trouble"].startswith("LMCache does not answer")
        assert lmcache["prefetches"]["failed"] == 1


def test_problems_are_few_however_many_there_were() -> None:
    problems = Problems()
    for number in range(1000):
        problems.note(None, "", {"level": "warning", "event": f"problem {number}"})
    assert len(problems.last) == 50
    assert problems.last[0].what == "problem 999"


# One session


async def test_a_session_is_told_with_where_its_chunks_lie(tmp_path: Path) -> None:
    lmcache = Located()
    async with operators(tmp_path, lmcache) as ops:
        await ops.agent.turn_end("s", "h1", "d1", "r1", "m1", seq=4)
        await ops.agent.turn_end("t", "h1")
        await ops.agent.send("session_fork", "s")
        view = await ops.get("/api/session?id=s")
        assert (view["hashes"], view["places"]) == (["h1", "d1", "r1", "m1"], "hdom")
        assert view["references"] == [3, 2, 2, 2]
        assert (view["seq"], view["session"]["turns"], len(view["turns"])) == (4, 1, 1)
        assert [(fork["id"], fork["chunks"]) for fork in view["forks"]] == [(1, 4)]
        for _ in range(5):  # however many look
            await ops.get("/api/session?id=s")
        assert [call.kind for call in lmcache.calls].count("query") == 1


async def test_where_nobody_can_tell_places_the_page_says_why(tmp_path: Path) -> None:
    async with operators(tmp_path) as ops:  # this LMCache has no /memory/query
        await ops.agent.turn_end("s", "a", "b")
        view = await ops.get("/api/session?id=s")
        assert (view["places"], view["places_trouble"]) == (
            "??",
            "this LMCache cannot tell where chunks lie",
        )
    async with operators(tmp_path, Located(fault=outage)) as ops:
        view = await ops.get("/api/session?id=s")
        assert (view["places"], view["places_trouble"]) == ("??", "connection refused")


async def test_a_long_map_is_told_in_part(tmp_path: Path) -> None:
    async with operators(tmp_path, Located(), backend__chunks_per_call_max=1000) as ops:
        await ops.agent.turn_end("s", *(f"h{n}" for n in range(5000)))
        view = await ops.get("/api/session?id=s")
        assert (view["session"]["chunks"], len(view["hashes"])) == (5000, 4096)
        assert view["places"] == "h" * 1000 + "?" * 3096


async def test_a_session_that_is_not_there_is_404_and_a_suspended_one_is_told(
    tmp_path: Path,
) -> None:
    async with operators(tmp_path) as ops:
        await ops.agent.turn_end("s", "a")
        await ops.agent.send("session_suspend", "s")
        assert (await ops.get("/api/session?id=s"))["session"]["state"] == "suspended"
        assert (await ops.http.get("/api/session?id=nobody")).status_code == 404
        for query in ("", "?id=", f"?id={'x' * 600}", "?q=s"):
            assert (await ops.http.get(f"/api/session{query}")).status_code == 400, query


async def test_a_search_takes_any_case_of_an_id_and_a_whole_hash(tmp_path: Path) -> None:
    async with operators(tmp_path) as ops:
        for number in range(60):
            await ops.agent.turn_end(f"Agent-{number}", "common", f"own{number}")
        found = await ops.get("/api/search?q=agent-5")
        assert {row["id"] for row in found["sessions"]} == {
            "Agent-5",
            *(f"Agent-5{n}" for n in range(10)),
        }
        everything = await ops.get("/api/search?q=agent")
        assert (len(everything["sessions"]), everything["more"]) == (50, True)
        chunk = await ops.get("/api/search?q=common")
        assert (chunk["references"], len(chunk["holders"]), chunk["sessions"]) == (60, 50, [])
        nothing = await ops.get("/api/search?q=own")
        assert (nothing["references"], nothing["sessions"]) == (0, [])


# The stream


class Stream:
    """A viewer's connection, read by hand: each message comes in one piece."""

    def __init__(self, tcp: trio.SocketStream) -> None:
        self.tcp = tcp
        self._text = ""

    async def head(self) -> str:
        return await self._up_to("\r\n\r\n")

    async def next(self) -> tuple[str, Any]:
        message = await self._up_to("\n\n")
        found = re.search(r"event: (\w+)\ndata: (.*)", message)
        assert found, message
        return found[1], json.loads(found[2])

    async def _up_to(self, mark: str) -> str:
        with trio.fail_after(20):
            while mark not in self._text:
                data = await self.tcp.receive_some()
                if not data:
                    raise trio.EndOfChannel
                self._text += data.decode()
        found, _, self._text = self._text.partition(mark)
        return found


@asynccontextmanager
async def listening(http: httpx.AsyncClient, **headers: str) -> AsyncIterator[Stream]:
    port = http.base_url.port
    assert port is not None
    async with await trio.open_tcp_stream("127.0.0.1", port) as tcp:
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        await tcp.send_all(f"GET /api/stream HTTP/1.1\r\nhost: localhost\r\n{lines}\r\n".encode())
        yield Stream(tcp)


async def test_a_stream_says_hello_and_then_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "_TICK_SECONDS", 0.05)
    async with (
        operators(tmp_path, auth_token=TOKEN) as ops,
        listening(ops.http, **BEARER) as stream,
    ):
        head = await stream.head()
        assert head.startswith("HTTP/1.1 200")
        assert "text/event-stream" in head
        kind, hello = await stream.next()
        assert (kind, len(hello["points"][0])) == ("hello", 5)
        kind, snapshot = await stream.next()
        assert (kind, snapshot["sessions"]["paused"]) == ("snapshot", 0)
        await ops.agent.turn_end("s", "a")
        with trio.fail_after(10):
            while snapshot["sessions"]["paused"] != 1:
                kind, snapshot = await stream.next()


async def test_a_stream_tells_start_and_stop_and_ends_with_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "_TICK_SECONDS", 0.05)
    phases: list[str] = []

    async def watch(stream: Stream, *, task_status: trio.TaskStatus[None]) -> None:
        await stream.head()
        await stream.next()
        with suppress(trio.EndOfChannel):
            while True:
                phases.append((await stream.next())[1]["phase"])
                if len(phases) == 1:
                    task_status.started()

    with trio.fail_after(20):
        async with (
            trio.open_nursery() as nursery,
            AsyncExitStack() as stack,
            admin_listener(tmp_path) as (http, _, stop),
        ):
            stream = await stack.enter_async_context(listening(http))
            await nursery.start(watch, stream)
            stop.set()
            await until(lambda: "stopping" in phases)
    assert phases[0] == "starting"


async def test_a_fault_in_the_overview_is_logged_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "_TICK_SECONDS", 0.02)
    failures = 0

    async def fail(*_: object) -> None:
        nonlocal failures
        failures += 1
        raise ZeroDivisionError

    async with operators(tmp_path) as ops, listening(ops.http) as stream:
        await stream.head()
        await stream.next()
        with structlog.testing.capture_logs() as said, monkeypatch.context() as broken:
            broken.setattr(Overview, "take", fail)
            await until(lambda: failures > 3)
        assert [line["event"] for line in said] == ["the page cannot be brought up to date"]
        await ops.agent.turn_end("s", "a")
        snapshot = (await stream.next())[1]
        with trio.fail_after(10):
            while snapshot["sessions"]["paused"] != 1:
                snapshot = (await stream.next())[1]


async def test_viewers_are_bounded_and_one_that_goes_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "VIEWERS_MAX", 2)
    async with operators(tmp_path) as ops:
        async with listening(ops.http) as first, listening(ops.http) as second:
            await first.head()
            await second.head()
            await first.next()
            await second.next()
            reply = await ops.http.get("/api/stream")
            assert reply.status_code == 503
            assert reply.headers["retry-after"] == "1"
        await until(lambda: not ops.admin._feed)
        assert (await ops.http.head("/api/stream")).status_code == 200
        async with listening(ops.http) as third:
            assert (await third.head()).startswith("HTTP/1.1 200")


async def test_a_viewer_that_never_reads_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "_TICK_SECONDS", 0.005)
    async with operators(tmp_path, limits__send_timeout_seconds=0.2) as ops:
        for number in range(40):
            await ops.agent.turn_end(f"{number}" * 100, "a")
        async with listening(ops.http):
            await until(lambda: bool(ops.admin._feed))
            # Until its buffers are full, and then a moment longer.
            await until(lambda: not ops.admin._feed, seconds=60.0)
        assert (await ops.http.get("/livez")).status_code == 200


def test_a_slow_viewer_gets_the_newest_and_not_all() -> None:
    async def read() -> bytes:
        viewer = feed.Viewer(b"hello;")
        for number in range(100):
            viewer.show(b"%d;" % number)
        return await anext(viewer)

    assert trio.run(read) == b"hello;99;"


# Actions


async def test_actions_go_the_way_of_events(tmp_path: Path) -> None:
    async with operators(tmp_path, auth_token=TOKEN) as ops:
        await ops.agent.turn_end("s", "a", "b")
        headers = {**BEARER, **ACTION}

        async def act(path: str) -> Any:
            reply = await ops.http.post(path, json=ACTIONS[path], headers=headers)
            assert reply.status_code == 200, reply.text
            return reply.json()["data"]

        assert await act("/api/session/suspend") == {
            "suspended": True,
            "pinned": True,
            "evicted_count": 2,
            "backend_degraded": False,
        }
        assert (await act("/api/session/suspend"))["evicted_count"] == 0  # twice is as once
        assert (await act("/api/session/close"))["closed"]
        assert (await act("/api/session/close"))["evicted_count"] == 0
        assert await act("/api/dead-letters/retry") == {"queued": 0}
        assert await act("/api/prefetching") == {"paused": True}
        assert ops.service.backend.is_paused


@pytest.mark.parametrize(
    "headers",
    [
        {},  # a form of another site can send no header of its own
        {"X-Ramakv-Action": "1", "Origin": "https://evil.example"},
        {"X-Ramakv-Action": "1", "Origin": "null"},
        {"X-Ramakv-Action": "1", "Sec-Fetch-Site": "cross-site"},
        {"X-Ramakv-Action": "1", "Host": "evil.example"},
    ],
)
@pytest.mark.parametrize("path", ACTIONS)
async def test_without_a_token_no_other_site_can_act(
    tmp_path: Path, headers: dict[str, str], path: str
) -> None:
    async with operators(tmp_path) as ops:
        await ops.agent.turn_end("s", "a")
        reply = await ops.http.post(path, json=ACTIONS[path], headers=headers)
        assert reply.status_code == 403
        assert not reply.json()["ok"]
        assert ops.agent.counts() == {"a": 1}
        assert not ops.service.backend.is_paused


async def test_without_a_token_no_other_site_can_read(tmp_path: Path) -> None:
    async with operators(tmp_path) as ops:
        for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Host": "rebound.example"}):
            for path in DATA:
                assert (await ops.http.get(path, headers=headers)).status_code == 403, path
        for path in DATA:
            reply = await ops.http.options(
                path,
                headers={"Origin": "https://evil.example", "Access-Control-Request-Method": "GET"},
            )
            assert not [name for name in reply.headers if name.startswith("access-control")]


async def test_a_page_of_this_listener_can_act(tmp_path: Path) -> None:
    async with operators(tmp_path) as ops:
        own = str(ops.http.base_url).rstrip("/")
        headers = {**ACTION, "Origin": own, "Sec-Fetch-Site": "same-origin"}
        reply = await ops.http.post("/api/prefetching", json={"paused": True}, headers=headers)
        assert reply.json() == {"ok": True, "data": {"paused": True}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/session/close", b"{"),
        ("/api/session/close", b"[]"),
        ("/api/session/close", b'{"session_id": 5}'),
        ("/api/session/close", b'{"session_id": ""}'),
        ("/api/session/close", b'{"session_id": "' + b"x" * 300 + b'"}'),
        ("/api/session/suspend", b"\xff"),
        ("/api/prefetching", b'{"paused": "yes"}'),
        ("/api/prefetching", b"[" * 5000),
    ],
)
async def test_a_body_that_is_not_an_action_is_refused(
    tmp_path: Path, path: str, body: bytes
) -> None:
    async with operators(tmp_path) as ops:
        reply = await ops.http.post(path, content=body, headers=ACTION)
        assert reply.status_code in (400, 413)
        assert reply.json()["error"]


async def test_a_body_that_is_too_large_is_refused(tmp_path: Path) -> None:
    async with operators(tmp_path) as ops:
        reply = await ops.http.post("/api/prefetching", content=b" " * 100_000, headers=ACTION)
        assert reply.status_code == 413


async def test_while_the_daemon_starts_there_is_nothing_to_act_on(tmp_path: Path) -> None:
    async with admin_listener(tmp_path) as (http, _, _):
        for path, body in ACTIONS.items():
            reply = await http.post(path, json=body, headers=ACTION)
            assert reply.status_code == 503, path
            assert "the daemon is starting" in reply.json()["error"]
        assert (await http.get("/api/overview")).status_code == 503
        assert (await http.get("/")).status_code == 200
