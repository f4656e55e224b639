"""`ramakv top`: what is there is shown, on any terminal, and whoever cannot be asked is named."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from ramakv.cli import main
from ramakv.commands import top
from ramakv.commands.operator_client import NoAnswer
from ramakv.commands.top_view import duration, render
from ramakv.problems import Problem
from ramakv.web.snapshot import (
    Chunks,
    Evictions,
    LMCache,
    Rate,
    SessionCounts,
    SessionRow,
    SharedChunks,
    Snapshot,
    Store,
)
from tests.daemons import Daemon, free_port

EVIL = "evil\x1b[31m[bold]\r\nroot"


def snapshot(**changes: Any) -> Snapshot:
    """A daemon with much to tell."""
    sessions = [
        SessionRow(EVIL, "in_turn", 1700, 12, 1, 0.0, 3.5, 2, awake=True),
        SessionRow("s" * 256, "suspended", 40, 3, 0, 7200.0, None, 0, awake=False),
    ]
    found = Snapshot(
        at_ms=1_800_000_000_000,
        version="9.9",
        phase="running",
        up_seconds=100_000.0,
        sessions=SessionCounts(in_turn=1, paused=2, suspended=3, awake=4, waiting=5),
        recent=sessions,
        largest=sessions,
        chunks=Chunks(referenced=1000, references=1500, evicting=7, hot_share=0.934),
        shared=[SharedChunks("-af2f5548dde4cdb", 30, 24, [EVIL, "b"], 22)],
        events=Rate("", 12.5, 0.0004, 0.25, 1000, 7),
        by_type=[Rate("turn_end", 12.5, 0.012, 0.25, 1000, 0), Rate("", 0.0, None, None, 0, 7)],
        evictions=Evictions(1, 2, 95.0, 3, 100, 90, 5, 4, 0, 3),
        lmcache=LMCache(
            kind="lmcache",
            url="http://localhost:6999",
            trouble="",
            breaker="closed",
            paused=False,
            tokens=49.7,
            burst=50,
            held=12,
            held_max=8192,
            calls=[Rate("prefetch", 3.0, 0.002, 0.003, 50, 1), Rate("evict", 0, None, None, 0, 0)],
            prefetches={"accepted": 50, "failed": 1, "late": 2, "skipped": 3, "waiting": 4},
        ),
        store=Store(40.0, 400.0, waiting=6, failed=8),
        problems=[Problem(1_800_000_000_000, "error", "it broke", {"cause": "\x1b[2J"})],
        point=[],
    )
    return msgspec.structs.replace(found, **changes)


def shown(found: Snapshot, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(render(found, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_figures_stand_beside_their_names() -> None:
    text = " ".join(shown(snapshot()).split())
    for words in (
        "ramakv 9.9 running for 1.2 d LMCache is fine",
        "1 in a turn 2 paused 3 suspended 4 awake 5 requests wait",
        "1000 referenced 1.50 sessions each 7 to be evicted 93% hot when a turn began",
        "1 wait 2 in flight 2 min the oldest 90 done 5 withdrawn 4 retried 3 dead letters",
        "50 accepted 1 failed 2 late 3 skipped 4 waiting",
        "closed breaker 50 of 50 calls at once 12 of 8192 prefetched chunks unused",
        "400 commits/s in 40 transactions/s 6 wait 8 failed",
        "all events 12.5 250 ms 0.4 ms 1000 7",
        "turn_end 12.5 250 ms 12 ms 1000 0",
        "not an event 0.0 – – 0 7",
        "call prefetch 3.0 3.0 ms 2.0 ms 50 1",
        "in a turn, 3.5 s 1700 0 s 12 1",
        "suspended 40 2.0 h 3 0",
        r"-af2f5548dde4cdb evil\x1b[31m[bold]\r\nroot, b 30 24",
        "it broke",
    ):
        assert words in text
    assert "call evict" not in text


@pytest.mark.parametrize("width", [36, 40, 49, 50, 69, 70, 80, 120, 300])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = shown(snapshot(), width).splitlines()
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "1000 referenced" in text
    assert "turn_end" in text
    assert "1700" in text


def test_what_clients_chose_cannot_steer_the_terminal() -> None:
    for width in (60, 100):
        text = shown(snapshot(), width)
        assert all(character.isprintable() for character in text.replace("\n", ""))
        assert r"evil\x1b[31m[bold]\r\nroot" in text


def test_trouble_is_told_in_the_first_line() -> None:
    lmcache = msgspec.structs.replace(
        snapshot().lmcache, trouble="LMCache does not answer", paused=True, breaker="open"
    )
    text = shown(snapshot(lmcache=lmcache))
    assert "LMCache does not answer" in text.splitlines()[0]
    assert "open breaker" in text
    assert "paused by an operator" in text


def test_an_empty_daemon_and_one_without_lmcache_have_nothing_to_hide() -> None:
    text = shown(
        snapshot(
            recent=[],
            shared=[],
            problems=[],
            by_type=[],
            chunks=Chunks(0, 0, 0, None),
            lmcache=msgspec.structs.replace(snapshot().lmcache, kind="noop", calls=[]),
        )
    )
    assert "no LMCache" in text
    assert "–" in text
    assert "session " not in text
    assert "breaker" not in text
    assert "hot when" not in text


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (None, "–"),
        (0.0, "0 s"),
        (0.00042, "0.4 ms"),
        (0.0123, "12 ms"),
        (3.46, "3.5 s"),
        (720.0, "12 min"),
        (11_520.0, "3.2 h"),
        (432_000.0, "5.0 d"),
    ],
)
def test_a_duration_is_in_the_unit_that_fits(seconds: float | None, expected: str) -> None:
    assert duration(seconds) == expected


def test_a_terminal_is_redrawn_and_a_daemon_that_is_away_is_waited_for() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=30)
    answers: Iterator[Snapshot | Exception] = iter(
        [NoAnswer("no answer"), NoAnswer("no answer"), snapshot(version="8.8")]
    )

    def read() -> Snapshot:
        found = next(answers, KeyboardInterrupt())
        if isinstance(found, BaseException):
            raise found
        return found

    with pytest.raises(KeyboardInterrupt):
        top._watch(console, read, snapshot(), 0.001)
    assert isinstance(console.file, io.StringIO)
    drawn = console.file.getvalue()
    assert drawn.index("9.9") < drawn.index("trying again") < drawn.index("8.8")


def test_a_refusal_ends_it() -> None:
    def read() -> Snapshot:
        raise NoAnswer("the daemon wants a token", is_final=True)

    console = Console(file=io.StringIO(), force_terminal=True)
    with pytest.raises(NoAnswer, match="token"):
        top._watch(console, read, snapshot(), 0.001)


# Beside a real daemon -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One that wants a token, and has a session."""
    running = Daemon(
        tmp_path_factory.mktemp("daemon"),
        RAMAKV_ADMIN__LISTEN_ADDR=f"127.0.0.1:{free_port()}",
        RAMAKV_AUTH_TOKEN="sesame",
    )
    try:
        running.start(wait=False)
        running.wait_until_answering()
        body = {
            "type": "turn_end",
            "session_id": "agent-1",
            "kv_transfer_params": {"chunk_hashes": ["a", "b"]},
        }
        bearer = {"Authorization": "Bearer sesame"}
        reply = httpx.post(f"{running.url}/event", json=body, headers=bearer, trust_env=False)
        assert reply.json()["ok"]
        yield running
    finally:
        running.kill()


def admin_url(daemon: Daemon) -> str:
    return f"http://{daemon.environment['RAMAKV_ADMIN__LISTEN_ADDR']}"


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["top", "--once", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_once_is_plain_text(daemon: Daemon) -> None:
    code, out, err = run("--url", admin_url(daemon), "--token", "sesame")
    assert (code, err) == (0, "")
    assert "2 referenced" in out
    assert "agent-1" in out
    assert "\x1b" not in out


def test_without_the_token_it_says_how_to_give_it(daemon: Daemon) -> None:
    code, out, err = run("--url", admin_url(daemon))
    assert (code, out) == (1, "")
    assert "--token" in err
    assert "RAM_A_KV_AUTH_TOKEN" in err
    assert err.count("\n") == 1


def test_the_address_for_events_is_known_for_what_it_is(daemon: Daemon) -> None:
    code, _, err = run("--url", daemon.url, "--token", "sesame")
    assert code == 1
    assert "admin.listen_addr" in err
    assert err.count("\n") == 1


def test_without_a_daemon_it_is_one_line() -> None:
    code, out, err = run("--url", "http://127.0.0.1:9")
    assert (code, out) == (1, "")
    assert err.startswith("ramakv: no answer from http://127.0.0.1:9")
    assert err.count("\n") == 1


def test_a_terminal_is_left_as_it_was_when_it_is_interrupted(daemon: Daemon) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "ramakv", "top", "--interval", "0.1", "--token", "sesame"]
    process = subprocess.Popen(
        [*command, "--url", admin_url(daemon)],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm-256color"},
    )
    os.close(theirs)
    seen = bytearray()
    try:
        _read_until(ours, seen, lambda: seen.count(b"referenced") >= 2)
        process.send_signal(signal.SIGINT)
        _read_until(ours, seen, lambda: b"\x1b[?1049l" in seen)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait(30)
        os.close(ours)
        assert process.stderr is not None
        assert process.stderr.read() == b""
        process.stderr.close()
    assert seen.index(b"\x1b[?1049h") < seen.index(b"\x1b[?1049l")


def _read_until(descriptor: int, seen: bytearray, is_enough: Callable[[], bool]) -> None:
    ends = time.monotonic() + 30
    while not is_enough():
        assert time.monotonic() < ends, bytes(seen[-2000:])
        with suppress(OSError):
            seen += os.read(descriptor, 65536)


def test_into_a_pipe_it_goes_on_in_plain_text(daemon: Daemon, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ramakv", "top", "--interval", "0.1", "--token", "sesame"]
    with subprocess.Popen(
        [*command, "--url", admin_url(daemon)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        pictures, lines = 0, 0
        try:
            for line in process.stdout:
                lines += 1
                assert b"\x1b" not in line
                pictures += b"referenced" in line
                if pictures == 3:
                    break
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(30) in (0, 1)
    assert lines > 10
