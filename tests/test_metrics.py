"""What Prometheus reads: valid, bounded, true, and all of it in the documentation."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
import trio
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_open_metrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse
from trio.testing import MockClock

from ramakv.core.residency import Residency
from ramakv.core.tallies import HANDLED_STATUSES, UNREAD_STATUSES, HotTallies
from ramakv.service import Service
from ramakv.web.metrics import OPEN_METRICS, OUTCOMES, UNREAD, render
from tests.daemons import serving
from tests.fakes import Agent, FakeLMCache, open_agent, outage
from tests.operators import BEARER, TOKEN, operators

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "metrics.md"

Figures = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def families(service: Service) -> list[Metric]:
    body, _ = await render(service)
    return list(parse(body.decode()))


async def figures(service: Service) -> Figures:
    """Every sample, by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in await families(service)
        for sample in family.samples
    }


def value(found: Figures, name: str, **labels: str) -> float:
    return found[name, tuple(sorted(labels.items()))]


async def play(agent: Agent) -> None:
    """A little of everything."""
    await agent.turn_end("s", *"abc")
    await agent.turn_end("t", *"ab")
    await agent.send("turn_start", "s")
    await agent.turn_end("s", "a")
    await agent.send("session_suspend", "t")
    await agent.send("session_fork", "s")
    await trio.sleep(10)


async def test_what_happened_is_what_the_figures_say(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_agent(tmp_path) as agent:
        await play(agent)
        agent.service.answered.answered("turn_end", 200, 0.003)
        found = await figures(agent.service)
    assert value(found, "ramakv_events_total", type="turn_end", outcome="ok") == 1
    bucket = "ramakv_event_duration_seconds_bucket"
    assert value(found, bucket, type="turn_end", le="0.0025") == 0
    assert value(found, bucket, type="turn_end", le="0.005") == 1
    assert value(found, bucket, type="turn_end", le="+Inf") == 1
    assert value(found, "ramakv_sessions", state="in_turn") == 0
    assert value(found, "ramakv_sessions", state="paused") == 1
    assert value(found, "ramakv_sessions", state="suspended") == 1
    assert value(found, "ramakv_chunks_referenced") == 1
    assert value(found, "ramakv_chunks_shared") == 1
    assert value(found, "ramakv_chunk_references") == 2
    assert value(found, "ramakv_chunks", references="2") == 1
    assert value(found, "ramakv_evictions_queued_total") == 2
    assert value(found, "ramakv_evictions_total", outcome="done") == 2
    assert value(found, "ramakv_outbox_oldest_seconds") == 0
    assert value(found, "ramakv_prefetches_total", outcome="accepted") == 1
    assert value(found, "ramakv_prefetch_chunks_total") == 3
    assert value(found, "ramakv_backend_calls_total", call="prefetch", outcome="ok") == 1
    assert value(found, "ramakv_backend_call_duration_seconds_count", call="evict") >= 1
    assert value(found, "ramakv_backend_degraded") == 0
    assert value(found, "ramakv_backend_breaker_state", state="closed") == 1
    assert value(found, "ramakv_prefetching_paused") == 0
    assert value(found, "ramakv_commits_total") == 5
    assert value(found, "ramakv_transaction_commits_sum") == 5
    assert value(found, "process_start_time_seconds") > 1e9


async def test_a_session_is_in_a_turn_from_its_start_to_its_end(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_agent(tmp_path) as agent:
        await agent.turn_end("s", "a")
        await agent.turn_end("t", "a")
        await agent.send("turn_start", "s")
        found = await figures(agent.service)
    assert value(found, "ramakv_sessions", state="in_turn") == 1
    assert value(found, "ramakv_sessions", state="paused") == 1


async def test_an_outage_shows(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with open_agent(tmp_path, FakeLMCache(fault=outage)) as agent:
        await play(agent)
        for _ in range(8):
            await agent.send("turn_start", "s")
        await agent.turn_end("s", "z")
        agent.service.backend.pause(True)
        await trio.sleep(3)
        found = await figures(agent.service)
    assert value(found, "ramakv_backend_breaker_state", state="closed") == 0
    assert value(found, "ramakv_backend_breaker_openings_total") == 1
    assert value(found, "ramakv_backend_degraded") == 1
    assert value(found, "ramakv_prefetching_paused") == 1
    assert value(found, "ramakv_prefetches_total", outcome="skipped") > 0
    assert value(found, "ramakv_backend_calls_total", call="evict", outcome="unavailable") > 0
    assert value(found, "ramakv_evictions_waiting") > 0
    assert value(found, "ramakv_evictions_retried_total") > 0
    assert value(found, "ramakv_outbox_oldest_seconds") >= 3


async def test_no_traffic_adds_a_sample(tmp_path: Path) -> None:
    """Labels have known values only: what clients choose is in none of them."""
    secret = "ses5ion-with-a-n4me"
    async with serving(tmp_path) as (http, service):
        before = (await figures(service)).keys()
        for body in (
            {"type": secret},
            {"type": "session_map", "session_id": secret},
            {
                "type": "turn_end",
                "session_id": secret,
                "kv_transfer_params": {"chunk_hashes": [secret]},
            },
            [{"type": "turn_start", "session_id": secret}, {"type": "session_fork"}],
        ):
            await http.post("/event", json=body)
        await http.post(f"/{secret}")
        found = await figures(service)
    assert found.keys() == before
    assert value(found, "ramakv_events_total", type=UNREAD, outcome="bad_request") == 1


def test_every_status_has_a_name_of_its_own() -> None:
    assert OUTCOMES.keys() == {*HANDLED_STATUSES, *UNREAD_STATUSES}
    assert len(set(OUTCOMES.values())) == len(OUTCOMES)


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", "text/plain; version=0.0.4; charset=utf-8"),
        ("*/*", "text/plain; version=0.0.4; charset=utf-8"),
        ("text/plain;version=x.y", "text/plain; version=0.0.4; charset=utf-8"),
        (f"{OPEN_METRICS};version=x.y;escaping=\x00", "application/openmetrics-text; "),
        (f"{OPEN_METRICS};version=1.0.0;q=0.6,text/plain;q=0.3", "application/openmetrics-text; "),
    ],
)
async def test_openmetrics_for_those_who_ask(
    accept: str, expected: str, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_agent(tmp_path) as agent:
        await play(agent)
        body, content_type = await render(agent.service, accept)
    assert content_type.startswith(expected)
    read = parse_open_metrics if OPEN_METRICS in content_type else parse
    assert {family.name for family in read(body.decode())} >= {"ramakv_sessions", "ramakv_chunks"}


async def test_the_linter_of_prometheus_has_nothing_to_say(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_agent(tmp_path) as agent:
        await play(agent)
        agent.service.backend.prefetches.late += 1
        body, _ = await render(with_hot(agent.service))
    assert lint(body) == b""


def lint(body: bytes) -> bytes:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed; Debian has it in its package prometheus")
    done = subprocess.run(
        [promtool, "check", "metrics"], input=body, capture_output=True, timeout=60, check=False
    )
    return done.stdout + done.stderr


def with_hot(service: Service) -> Service:
    """A service that can tell how often chunks are hot."""
    service.residency.hot = HotTallies(wanted=10, hot=9)
    service.residency._rules = Residency(1, "sticky")
    return service


async def test_the_hot_share_is_there_where_the_daemon_knows_it(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_agent(tmp_path) as agent:
        assert "ramakv_turn_chunks_total" not in {name for name, _ in await figures(agent.service)}
        found = await figures(with_hot(agent.service))
    assert value(found, "ramakv_turn_chunks_total", tier="hot") == 9
    assert value(found, "ramakv_turn_chunks_total", tier="other") == 1


async def test_they_are_read_with_the_token_while_the_daemon_runs(tmp_path: Path) -> None:
    async with operators(tmp_path, auth_token=TOKEN) as ops:
        assert (await ops.http.get("/metrics")).status_code == 401
        await ops.agent.turn_end("s", "a")
        reply = await ops.http.get("/metrics", headers=BEARER)
        assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert "ramakv_chunks_referenced 1.0" in reply.text
        reply = await ops.http.get("/metrics", headers={**BEARER, "Accept": OPEN_METRICS})
        assert reply.text.endswith("# EOF\n")
        ops.admin.attach(None)
        assert (await ops.http.get("/metrics", headers=BEARER)).status_code == 503


def row(family: Metric) -> str:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    labels = {label for sample in family.samples for label in sample.labels} - {"le"}
    shown = ", ".join(f"`{label}`" for label in sorted(labels))
    return f"| `{name}` | {family.type} | {shown} | {family.documentation} |"


def rows(found: Iterable[Metric]) -> list[str]:
    return [row(family) for family in found]


async def test_every_metric_is_documented_as_it_is_and_no_other(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_agent(tmp_path) as agent:
        expected = rows(await families(with_hot(agent.service)))
    documented = re.findall(r"^\| `\w+` \|.*$", DOCUMENT.read_text(), re.MULTILINE)
    assert documented == expected, "docs/metrics.md should have:\n" + "\n".join(expected)


async def test_figures_are_read_without_disturbing_what_waits(tmp_path: Path) -> None:
    """A look at the figures under load: nothing is refused, and nothing counted twice."""
    async with serving(tmp_path) as (http, service):

        async def send(number: int) -> None:
            for turn in range(10):
                body = {
                    "type": "turn_end",
                    "session_id": f"s{number}",
                    "kv_transfer_params": {"chunk_hashes": [f"{number}-{turn}"]},
                }
                assert (await http.post("/event", json=body)).status_code == 200

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(send, number)
            for _ in range(20):
                await render(service)
                await trio.lowlevel.checkpoint()
        found = await figures(service)
    assert value(found, "ramakv_events_total", type="turn_end", outcome="ok") == 200
    assert value(found, "ramakv_event_duration_seconds_count", type="turn_end") == 200
    assert value(found, "ramakv_transaction_commits_sum") == 200
