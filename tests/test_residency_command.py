"""`ramakv residency`, and what it asks."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from click.testing import CliRunner, Result

from ramakv.actors.residency import QUIET_SECONDS
from ramakv.cli import main
from tests.operators import Operators, operators

ON = {
    "backend__kind": "embedded",
    "residency__policy": "sticky",
    "residency__hot_chunks_max": 1000,
}


async def shown(daemon: Operators, *arguments: str) -> Result:
    """Run the command beside the daemon, as in another shell."""
    command = ["residency", "--url", str(daemon.http.base_url), *arguments]
    return await trio.to_thread.run_sync(lambda: CliRunner().invoke(main, command))


async def test_it_says_who_is_in_and_why(tmp_path: Path) -> None:
    async with operators(tmp_path, **ON) as daemon:
        await daemon.agent.turn_end("first", "a", "b", finish_reason="stop")
        await daemon.agent.turn_end("second\x1b[31m", "c", finish_reason="tool_calls")
        await trio.sleep(QUIET_SECONDS * 1.5)
        await daemon.agent.send("turn_start", "first")
        result = await shown(daemon)
    assert result.exit_code == 0, result.output
    assert "policy sticky: in force; the hot tier holds 1,000 chunks" in result.output
    assert "of 2 sessions are in" in result.output
    assert "in a turn" in result.output
    assert "\x1b" not in result.output


async def test_its_json_is_what_the_listener_answers(tmp_path: Path) -> None:
    async with operators(tmp_path, **ON) as daemon:
        await daemon.agent.turn_end("s", "a")
        body = await daemon.get("/api/residency")
        result = await shown(daemon, "--json")
    assert body["policy"] == "sticky"
    assert body["hot_chunks_max"] == 1000
    assert [row["id"] for row in body["sessions"]] == ["s"]
    assert '"hot_chunks_max": 1000' in result.output


async def test_it_says_why_residency_is_off(tmp_path: Path) -> None:
    async with operators(tmp_path) as daemon:
        result = await shown(daemon)
    assert result.exit_code == 0
    assert "off, because residency.hot_chunks_max is 0" in result.output


@pytest.mark.parametrize("count", ["0", "1"])
async def test_a_list_that_is_cut_says_so(tmp_path: Path, count: str) -> None:
    async with operators(tmp_path, **ON) as daemon:
        for number in range(5):
            await daemon.agent.turn_end(f"s{number}", f"c{number}")
        result = await shown(daemon, "--sessions", count)
    assert f"and {5 - int(count)} more" in result.output


async def test_it_takes_the_token(tmp_path: Path) -> None:
    async with operators(tmp_path, auth_token="sesame", **ON) as daemon:
        refused = await shown(daemon)
        admitted = await shown(daemon, "--token", "sesame")
    assert refused.exit_code == 1
    assert "wants a token" in refused.output
    assert admitted.exit_code == 0
