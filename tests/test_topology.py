"""What is found of an LMCache, and what is made of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from ramakv.config import Limits
from ramakv.core.topology import Level, Port, Topology, judge
from ramakv.lmcache.survey import neighbour, survey
from ramakv.web.server import open_sockets, serve_http
from tests.daemons import serving

MAIN, NEXT = "http://h:6999", "http://h:7000"
SCHEDULER = Port(MAIN, answers=True, role="scheduler", version="0.4.4")
WORKER = Port(NEXT, answers=True, role="worker", version="0.4.4")


def levels(topology: Topology) -> list[Level]:
    return [finding.level for finding in judge(topology)]


def words(topology: Topology) -> str:
    return " ".join(f"{finding.what} {finding.advice}" for finding in judge(topology))


def test_a_scheduler_with_a_worker_is_fine() -> None:
    assert levels(Topology(SCHEDULER, WORKER, has_memory_routes=True)) == [Level.OK, Level.OK]


def test_one_process_on_both_ports_is_fatal_and_nothing_else_is_said() -> None:
    both = Topology(SCHEDULER, Port(NEXT, answers=True, role="scheduler"))
    assert levels(both) == [Level.OK, Level.FATAL]
    assert "forward to itself" in words(both)


def test_one_process_is_fatal_by_its_second_port_too() -> None:
    first = Port(MAIN, answers=True, role="scheduler")
    second = Port(NEXT, answers=True, role="scheduler")
    both = Topology(second, Port("http://h:7001", why_not="refused"), previous=first)
    assert levels(both) == [Level.OK, Level.FATAL]
    assert f"{NEXT} and {MAIN} are one process" in words(both)


def test_nobody_there_is_one_problem() -> None:
    assert levels(Topology(Port(MAIN, why_not="refused"), Port(NEXT))) == [Level.PROBLEM]


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        (Topology(SCHEDULER, Port(NEXT, why_not="refused")), "no worker at http://h:7000"),
        (Topology(SCHEDULER, WORKER, has_memory_routes=False), "no /memory/* routes"),
    ],
)
def test_what_is_missing_is_a_problem(topology: Topology, expected: str) -> None:
    assert Level.PROBLEM in levels(topology)
    assert expected in words(topology)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("enable_async_loading", False), ("use_layerwise", True), ("local_cpu", False)],
)
def test_a_setting_that_makes_calls_void_is_a_problem(setting: str, value: bool) -> None:
    worker = Port(NEXT, answers=True, role="worker", settings={setting: value})
    assert Level.PROBLEM in levels(Topology(SCHEDULER, worker))
    assert setting in words(Topology(SCHEDULER, worker))
    good = Port(NEXT, answers=True, role="worker", settings={setting: not value})
    assert Level.PROBLEM not in levels(Topology(SCHEDULER, good))


class Stand:
    """A port of LMCache that answers from a table, and notes what it was asked."""

    def __init__(self, answers: dict[str, tuple[int, Any]]) -> None:
        self.answers = answers
        self.texts: dict[str, str] = {}
        self.asked: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        method, path = scope["method"], scope["path"]
        status, body = self.answers.get(path, (404, {"detail": "Not Found"}))
        if path.startswith("/memory/") and method != "POST":
            status, body = (status, body) if status == 404 else (405, {"detail": "Not Allowed"})
        else:
            self.asked.append(path)
        content = msgspec.json.encode(body)
        if text := self.texts.get(scope["path"]):
            status, content = 200, text.encode()
        headers = [(b"content-length", b"%d" % len(content))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content, "more_body": False})


@asynccontextmanager
async def two_ports(first: Stand, second: Stand | None) -> AsyncIterator[str]:
    """Serve stands on two ports, one after the other."""
    for port in range(21_000, 21_400, 2):
        try:
            sockets = [open_sockets(f"127.0.0.1:{port + n}") for n in range(2)]
            break
        except Exception:
            continue
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        for listening, stand in zip(sockets, (first, second), strict=True):
            if stand is None:
                for sock in listening:
                    sock.close()
                continue
            serve = partial(serve_http, stand, listening, limits=Limits(), stop=stop)
            await nursery.start(serve)
        yield f"http://127.0.0.1:{port}"
        stop.set()


REFUSED = {"error": "Some workers failed", "failures": {"7000": {"error": "HTTP Error 400"}}}


def stand(role: str, evict: tuple[int, Any] = (500, REFUSED)) -> Stand:
    return Stand(
        {
            "/meta": (200, {"role": role, "use_mla": False}),
            "/lmc_version": (200, "0.4.4"),
            "/conf": (200, {"enable_async_loading": True}),
            "/memory/evict": evict,
        }
    )


@pytest.mark.parametrize(
    ("url", "distance", "beside"),
    [
        ("http://lmcache:6999", 1, "http://lmcache:7000"),
        ("http://lmcache", -1, "http://lmcache:79"),
        ("http://user:secret@[::1]:6999/", 1, "http://user:secret@[::1]:7000"),
    ],
)
def test_a_neighbour_differs_by_its_port_alone(url: str, distance: int, beside: str) -> None:
    assert neighbour(url, distance) == beside


async def test_a_survey_finds_scheduler_worker_and_routes_and_calls_none_of_these() -> None:
    first = stand("scheduler")
    async with two_ports(first, stand("worker")) as url:
        found = await survey(url, timeout_seconds=5.0)
    assert "/memory/evict" not in first.asked
    assert (found.main.role, found.next.role) == ("scheduler", "worker")
    assert (found.main.version, found.has_memory_routes) == ("0.4.4", True)
    assert found.next.settings == {"enable_async_loading": True}


async def test_a_survey_never_calls_memory_routes_of_a_process_that_would_call_itself() -> None:
    first = stand("scheduler")
    async with two_ports(first, stand("scheduler")) as url:
        found = await survey(url, timeout_seconds=5.0)
    assert "/memory/evict" not in first.asked
    assert Level.FATAL in levels(found)


async def test_a_survey_of_the_second_port_of_one_process_finds_the_first() -> None:
    second = stand("scheduler")
    async with two_ports(stand("scheduler"), second) as url:
        found = await survey(neighbour(url, 1), timeout_seconds=5.0)
    assert "/memory/evict" not in second.asked
    assert Level.FATAL in levels(found)


async def test_a_survey_notices_missing_routes_and_a_missing_worker() -> None:
    first = stand("scheduler", (404, {"detail": "Not Found"}))
    async with two_ports(first, None) as url:
        found = await survey(url, timeout_seconds=5.0)
    assert found.has_memory_routes is False
    assert not found.next.answers
    assert levels(found) == [Level.OK, Level.PROBLEM, Level.PROBLEM]


def turn_end(session_id: str, *hashes: str) -> dict[str, object]:
    params = {"chunk_hashes": list(hashes)}
    return {"type": "turn_end", "session_id": session_id, "kv_transfer_params": params}


async def test_the_daemon_never_calls_a_process_that_would_call_itself(tmp_path: Path) -> None:
    first = stand("scheduler")
    async with (
        two_ports(first, stand("scheduler")) as url,
        serving(tmp_path, fake=False, lmcache_url=url, eviction__batch_age_seconds=0.01) as (
            http,
            service,
        ),
    ):
        await http.post("/event", json=turn_end("s", "a", "b"))
        with trio.fail_after(10):
            while not service.backend.is_degraded:
                await http.post("/event", json={"type": "health"})
        answer = await http.post("/event", json={"type": "turn_start", "session_id": "s"})
        assert answer.json()["data"]["backend_degraded"]
        assert not answer.json()["data"]["prefetch_sent"]
        await http.post("/event", json=turn_end("s", "a"))
        assert service.statistics()["chunks"]["evictions_waiting"] == 1
    assert [path for path in first.asked if path.startswith("/memory")] == []


async def test_the_daemon_looks_at_a_good_lmcache_and_then_calls_it(tmp_path: Path) -> None:
    first = stand("scheduler", (200, {"status": "success", "num_evicted": 1}))
    async with (
        two_ports(first, stand("worker")) as url,
        serving(tmp_path, fake=False, lmcache_url=url, eviction__batch_age_seconds=0.01) as (
            http,
            service,
        ),
    ):
        await http.post("/event", json=turn_end("s", "a"))
        await http.post("/event", json=turn_end("s"))
        with trio.fail_after(10):
            while "/memory/evict" not in first.asked:
                await http.post("/event", json={"type": "health"})
        assert not service.backend.is_degraded
    assert first.asked.index("/meta") < first.asked.index("/memory/evict")
