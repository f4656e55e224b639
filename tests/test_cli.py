"""The commands, as somebody types them."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from ramakv import __version__
from ramakv.cli import main
from tests.daemons import running_daemon


def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, list(arguments), env=environment)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    "command",
    [
        "",
        "serve",
        "event",
        "top",
        "demo",
        "replay",
        "config",
        "config show",
        "store",
        "store check",
    ],
)
def test_every_command_explains_itself(command: str) -> None:
    code, out, _ = run(*command.split(), "--help")
    assert code == 0
    assert "Usage:" in out
    assert "  -h, --help" in out


def test_it_knows_its_version() -> None:
    assert run("--version") == (0, f"ramakv, version {__version__}\n", "")


def test_an_event_goes_out_and_its_reply_is_printed(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon:
        data = '{"kv_transfer_params": {"chunk_hashes": ["a"]}}'
        to = ("--url", daemon.url)
        code, out, _ = run("event", "turn_end", "--session", "s", "--data", data, *to)
        assert code == 0
        assert json.loads(out)["data"]["chunk_count"] == 1
        code, out, _ = run("event", "session_map", "--session", "nobody", *to)
        assert code == 1
        assert json.loads(out)["error"] == "session 'nobody' not found"


def test_an_event_without_a_daemon_is_one_line(tmp_path: Path) -> None:
    code, out, err = run("event", "health", "--url", "http://127.0.0.1:9")
    assert (code, out) == (1, "")
    assert err.startswith("ramakv: no answer from http://127.0.0.1:9")
    assert err.count("\n") == 1


@pytest.mark.parametrize("data", ["{", "[1]", "@/nowhere"])
def test_data_that_is_no_object_is_bad_usage(data: str) -> None:
    code, _, err = run("event", "health", "--data", data)
    assert code == 2
    assert "--data" in err


@pytest.mark.parametrize("speed", ["0", "-1", "fast", "inf", "nan"])
def test_a_speed_is_max_or_a_positive_number(speed: str, tmp_path: Path) -> None:
    code, _, err = run("replay", str(tmp_path / "x"), "--speed", speed)
    assert code == 2
    assert "expected max or a number above 0" in err


def test_the_demo_comes_out_as_told() -> None:
    # A process of its own: it sets up the log, and that stays.
    done = subprocess.run(
        [sys.executable, "-m", "ramakv", "demo"], capture_output=True, text=True, check=False
    )
    out = done.stdout
    assert done.returncode == 0, out + done.stderr
    for line in ("turn_end bob", "its fork survived, too", "back from the disk tier"):
        assert line in out
    assert len(out.splitlines()) < 50


def test_config_check_says_where_it_would_listen() -> None:
    code, out, _ = run("config", "check", RAMAKV_LISTEN_ADDR="127.0.0.1:1234")
    assert code == 0
    assert "listens on 127.0.0.1:1234" in out
    code, out, err = run("config", "check", RAMAKV_LISTEN_ADDR="x")
    assert (code, out) == (2, "")
    assert err.startswith("ramakv: listen_addr: expected")


def test_config_show_does_not_show_the_token() -> None:
    code, out, _ = run("config", "show", RAMAKV_AUTH_TOKEN="sesame")
    assert code == 0
    assert "sesame" not in out
    assert 'auth_token = "(set)"' in out


def test_store_check_counts_and_finds_what_is_broken(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon:
        daemon.turn_end("a", "1", "2")
        daemon.turn_end("b", "2")
        daemon.send("session_fork", "a")
        daemon.send("session_suspend", "b")
        code, out, _ = run("store", "check", str(tmp_path / "sessions.db"), "--json")
        assert code == 0, "beside a running daemon"
        found = json.loads(out)
        assert (found["sessions_active"], found["sessions_suspended"], found["forks"]) == (1, 1, 1)
        assert daemon.stop() == 0
    with closing(sqlite3.connect(tmp_path / "sessions.db")) as database:
        database.execute("UPDATE sessions SET map_json = 'x' WHERE session_id = 'a'")
        database.commit()
    code, out, _ = run("store", "check", str(tmp_path / "sessions.db"))
    assert code == 1
    assert "problem: sessions row 'a': map_json cannot be read" in out
    assert out.endswith("not ok\n")


def test_store_check_of_something_else_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database " * 50)
    for name, expected in (("text", "not an SQLite database"), ("nowhere", "there is no file")):
        code, _, err = run("store", "check", str(tmp_path / name))
        assert code == 1
        assert expected in err
        assert err.count("\n") == 1


def test_store_check_reads_a_database_of_the_rust_daemon(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "sessions.db")) as database:
        database.execute(
            "CREATE TABLE sessions (session_id TEXT PRIMARY KEY, map_json TEXT NOT NULL, "
            "turn_count INTEGER NOT NULL DEFAULT 0)"
        )
        database.execute("""INSERT INTO sessions VALUES ('s', '["a"]', 1)""")
        database.commit()
    code, out, _ = run("store", "check", str(tmp_path / "sessions.db"), "--json")
    assert code == 0
    assert json.loads(out)["sessions_active"] == 1
