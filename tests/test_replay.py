"""`ramakv replay` over real HTTP, against a fake daemon and engine on loopback."""

from __future__ import annotations

import json
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from ramakv.commands.replay import replay, run
from ramakv.commands.trace import chunk_hash
from tests.replay_server import serving, serving_in_thread
from tests.traces import make_trace, write_trace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.replay_server import Reply


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "trace.jsonl.gz", make_trace(7))


@pytest.fixture
def nobody() -> Iterator[str]:
    """A URL where nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


async def test_replay_drives_daemon_and_engine(trace: Path) -> None:
    """Every call arrives, sessions keep their order, the report adds up, connections are kept."""
    requests = make_trace(7)
    async with serving() as server:
        report = await replay(trace, server.url, server.url, close=True)
    sessions = {r.session for r in requests}
    for session in sessions:
        kinds = [kind for kind, of in server.events if of == session]
        turns = sum(r.session == session for r in requests)
        assert kinds == ["turn_start", "turn_end"] * turns + ["session_close"]
    n = len(requests)
    found = report.to_json()
    assert found["requests"] == n
    assert found["events"] == {"turn_start": n, "turn_end": n, "session_close": len(sessions)}
    assert found["engine_calls"] == {"retrieve": n, "store": n}
    assert set(found["latency_ms"]) == {*found["events"], "engine_retrieve", "engine_store"}
    assert all(0 < ms["p50"] <= ms["p99"] for ms in found["latency_ms"].values())
    chunks = found["chunks"]
    assert sum(chunks.values()) == sum(len(r.hashes) for r in requests)
    assert chunks["missing"] >= len({h for r in requests for h in r.hashes})
    assert chunks["hot"] > chunks["disk"] > 0
    assert server.stored == {chunk_hash(h) for r in requests for h in r.hashes}
    assert (found["errors"], found["error_texts"], report.exit_code) == (0, [], 0)
    assert server.connections <= 2 * 16


async def test_limit_closes_each_session_after_its_last_turn_within_it(trace: Path) -> None:
    within = make_trace(7)[:9]
    async with serving() as server:
        report = await replay(trace, server.url, limit=9, close=True)
    assert report.requests == 9
    for session in {r.session for r in within}:
        kinds = [kind for kind, of in server.events if of == session]
        assert kinds.count("turn_end") == sum(r.session == session for r in within)
        assert kinds[-1] == "session_close"
    assert not any("engine" in kind for kind, _ in server.events)


async def test_sessions_run_side_by_side(tmp_path: Path) -> None:
    """A session whose turn_end is not answered holds up its own next turn and nobody else's."""
    trace = make_trace(7)
    slow = trace[0].session
    path = write_trace(tmp_path / "trace", [r for r in trace if r.session != slow or r.turn < 3])
    others = sum(r.session != slow for r in trace)
    all_others_over = trio.Event()
    async with serving() as server:

        async def answer(kind: str, message: dict[str, Any]) -> Reply | None:
            ends = [of for of_kind, of in server.events if of_kind == "turn_end" and of != slow]
            if len(ends) == others:
                all_others_over.set()
            if kind == "turn_end" and message["session_id"] == slow:
                await all_others_over.wait()
            return None

        server.answer = answer
        with trio.fail_after(30):
            report = await replay(path, server.url)
    assert report.errors == 0
    assert [kind for kind, of in server.events if of == slow][:2] == ["turn_start", "turn_end"]


async def test_refusals_are_counted_and_told(trace: Path) -> None:
    """An error envelope, a foreign page, a hang-up and an engine's refusal are all errors."""
    faults: dict[str, Reply] = {
        "turn_start": (503, {"ok": False, "type": "turn_start", "error": "overloaded"}),
        "turn_end": (0, None),
        "session_close": (404, b"<html>\n no such page </html>" + b"x" * 999),
        "/engine/retrieve": (200, {"status": "success"}),
        "/engine/store": (500, {"error": "full"}),
    }
    async with serving() as server:

        async def answer(kind: str, message: dict[str, Any]) -> Reply | None:
            return faults.get(kind)

        server.answer = answer
        report = await replay(trace, server.url, server.url, limit=5, close=True)
    found = report.to_json()
    assert found["events"]["turn_end"] == found["errors_by_type"]["turn_end"] == 5
    assert report.errors == sum(found["events"].values()) + sum(found["engine_calls"].values())
    texts = {error["text"].split(": ", 1)[0]: error["text"] for error in found["error_texts"]}
    assert texts["turn_start"] == "turn_start: HTTP 503: overloaded"
    assert "disconnected" in texts["turn_end"]
    assert texts["session_close"].startswith(
        "session_close: HTTP 404: <html> no such page </html>x"
    )
    assert texts["session_close"].endswith("x (not a reply to an event)")
    assert "num_chunks" in texts["engine_retrieve"] or "`found`" in texts["engine_retrieve"]
    assert texts["engine_store"] == 'engine_store: HTTP 500: {"error": "full"}'
    assert (found["latency_ms"], report.exit_code) == ({}, 1)


async def test_token_goes_to_the_daemon_only(trace: Path) -> None:
    async with serving() as server:
        await replay(trace, server.url, server.url, limit=2, token="let me in")
    for head in server.headers:
        assert (b"authorization: bearer let me in" in head.lower()) == (b"POST /event " in head)


def test_command_reports(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table goes to stdout and the JSON to its file, or the JSON to stdout alone."""
    with serving_in_thread() as server:
        path = tmp_path / "report.json"
        assert run(trace, server.url, server.url + "/", None, 6, True, str(path)) == 0
        out, err = capsys.readouterr()
        assert "turn_end" in out
        assert "6 requests in" in out
        assert "missing" in out
        assert err == ""
        report = json.loads(path.read_text())
        assert {"requests", "events", "errors", "seconds", "latency_ms", "chunks"} <= set(report)
        assert run(trace, server.url, None, 1e6, 6, False, "-") == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["events"] == {"turn_start": 6, "turn_end": 6}
        assert "6 requests in" in err


def test_command_shows_errors_and_progress(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes it for a terminal
    with serving_in_thread() as server:

        async def answer(kind: str, message: dict[str, Any]) -> Reply | None:
            busy = {"ok": False, "error": f"[red]{'busy ' * 30}[/red]"}
            return (503, busy) if kind == "turn_end" else None

        server.answer = answer
        assert run(trace, server.url, None, None, 3, False, None) == 1
    out, err = capsys.readouterr()
    assert "turn_end: HTTP 503: [red]busy busy" in out
    assert "busy busy [/red]" in out
    assert "trace.jsonl.gz" in err
    assert "3/3" in err


def test_unreachable_is_one_clear_line(
    trace: Path, nobody: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(trace, nobody, None, None, None, False, None) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"ramakv replay: the daemon at {nobody} is unreachable: ")
    with serving_in_thread() as server:
        assert run(trace, server.url, nobody, None, None, False, None) == 1
        assert f"the engine at {nobody} is unreachable: " in capsys.readouterr().err

        async def answer(kind: str, message: dict[str, Any]) -> Reply | None:
            return 401, {"ok": False, "error": "bearer token missing"}

        server.answer = answer
        assert run(trace, server.url, None, None, None, False, None) == 1
        assert "is unusable: HTTP 401: bearer token missing\n" in capsys.readouterr().err
    assert server.events == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trace": "absent"}, "absent: No such file"),
        ({"url": "127.0.0.1:6998"}, "--url 127.0.0.1:6998: expected a URL like http://"),
        ({"url": "http://[::"}, "--url http://[::: expected"),
        ({"engine_url": "ftp://x"}, "--engine-url ftp://x: expected"),
        ({"speed": 0.0}, "--speed 0: expected"),
        ({"speed": float("nan")}, "--speed nan: expected"),
        ({"limit": 0}, "--limit 0: expected"),
        ({"json_path": "no/such/folder"}, "--json no/such/folder: expected"),
    ],
)
def test_usage_errors_exit_2(
    trace: Path, nobody: str, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], said: str
) -> None:
    usual: dict[str, Any] = {"trace": trace, "url": nobody, "engine_url": None, "speed": None}
    usual |= {"limit": None, "close": False, "json_path": None} | changes
    assert run(**usual | {"trace": Path(usual["trace"])}) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"ramakv replay: {said}" in err


async def test_interrupt_stops_with_the_summary_so_far(trace: Path) -> None:
    """Ctrl-C while a turn_end waits for its answer: exit code 130, and what was done is told."""
    stuck = trio.Event()
    code = (
        "import sys; from pathlib import Path; from ramakv.commands.replay import run\n"
        "sys.exit(run(Path(sys.argv[1]), sys.argv[2], None, None, None, False, '-'))"
    )
    async with serving() as server:

        async def answer(kind: str, message: dict[str, Any]) -> Reply | None:
            if len([kind for kind, _ in server.events if kind == "turn_end"]) > 4:
                stuck.set()
                await trio.sleep_forever()
            return None

        server.answer = answer
        process = await trio.lowlevel.open_process(
            [sys.executable, "-c", code, str(trace), server.url], stdout=-1, stderr=-1
        )
        assert process.stdout is not None
        assert process.stderr is not None
        with trio.fail_after(60):
            await stuck.wait()
            process.send_signal(signal.SIGINT)
            out = b"".join([part async for part in process.stdout])
            err = b"".join([part async for part in process.stderr])
            assert await process.wait() == 130, err
        await process.stdout.aclose()
        await process.stderr.aclose()
    report = json.loads(out)
    assert report["interrupted"] is True
    assert report["events"]["turn_end"] >= 4
    assert b"Traceback" not in err
    assert err.rstrip().endswith(b"interrupted")
