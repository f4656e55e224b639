"""The configuration: every key is in config.toml, and each mistake is one clear line."""

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramakv.commands.config import as_toml
from ramakv.config import Config, resolve_path
from ramakv.config_file import load_config
from ramakv.errors import ConfigError

ROOT = Path(__file__).parent.parent


def written(folder: Path, text: str) -> str:
    path = folder / "config.toml"
    path.write_text(text)
    return str(path)


def test_config_toml_has_every_key_with_its_default_and_a_comment() -> None:
    text = (ROOT / "config.toml").read_text()
    expected = msgspec.json.decode(msgspec.json.encode(Config()))
    expected["session_store_path"] = "{state}/sessions.db"
    expected["backend"]["kind"] = "embedded"
    assert tomllib.loads(text) == expected
    lines = text.splitlines()
    for above, line in itertools.pairwise(lines):
        if " = " in line and not line.startswith("#"):
            assert above.startswith("# "), line


def test_the_repository_file_starts_the_embedded_engine_in_the_state_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    config = load_config(str(ROOT / "config.toml"), {})
    assert config.backend_kind == "embedded"
    assert config.store_path == tmp_path / "ram-a-kv" / "sessions.db"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert resolve_path("{state}/x") == Path.home() / ".local/state/ram-a-kv/x"


def test_without_any_file_the_defaults_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ramakv.config_file.DEFAULT_CONFIG_PATH", "/nowhere/config.toml")
    assert load_config(None, {}) == Config()


def test_file_then_environment_then_command_line(tmp_path: Path) -> None:
    path = written(
        tmp_path, 'listen_addr = "127.0.0.1:1"\n[backend]\nkind = "noop"\nburst_calls_max = 3\n'
    )
    environment = {
        "RAM_A_KV_CONFIG": path,
        "RAMAKV_BACKEND__BURST_CALLS_MAX": "4",
        "RAMAKV_BACKEND__CALLS_PER_SECOND": "50",
        "RAMAKV_EVICTION__LOCATIONS": '["A", "B"]',
        "RAMAKV_NOOP_BACKEND": "true",
    }
    config = load_config(None, environment, {"backend.kind": "embedded"})
    assert config.listen_addr == "127.0.0.1:1"
    assert config.backend.burst_calls_max == 4
    assert config.backend.calls_per_second == 50.0
    assert config.eviction.locations == ("A", "B")
    assert config.backend.kind == "embedded"
    assert config.backend_kind == "noop"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = ", "not valid TOML"),
        ('listen_adr = "a"', "unknown key 'listen_adr'; did you mean 'listen_addr'?"),
        ("[backend]\ncalls_per_secnd = 3", "unknown key 'calls_per_secnd' in [backend]; did you"),
        ("backend = 3", "backend is a section; write it as [backend]"),
        ('[limits]\nsessions_max = "many"', "limits.sessions_max: expected int, got str"),
        ("[limits]\nsessions_max = 0", "limits.sessions_max: expected int >= 1"),
        ("[backend]\ncalls_per_second = -1", "backend.calls_per_second: expected float > 0"),
        ("[eviction]\nlocations = []", "eviction.locations: expected array of length >= 1"),
        ('[backend]\nkind = "redis"', "expected embedded | lmcache | noop, got 'redis'"),
        ('listen_addr = "6998"', "listen_addr: expected host:port"),
        ('listen_addr = "127.0.0.1:70000"', "listen_addr: expected host:port"),
        ('listen_addr = "unix:relative"', "expected unix:/absolute/path"),
        ('listen_addr = "0.0.0.0:6998"', "auth_token or auth_token_file must be set"),
        ('[admin]\nlisten_addr = "6997"', "admin.listen_addr: expected host:port"),
        ('[admin]\nlisten_addr = "0.0.0.0:1"', "admin.listen_addr: 0.0.0.0:1 can be reached"),
        ('[admin]\nlisten_addr = "127.0.0.1:6998"', "is where events are listened for"),
        ('lmcache_url = "localhost:6999"', "lmcache_url: expected http://host:port"),
        ('lmcache_url = "http://h:x"', "lmcache_url: expected http://host:port"),
        ('[tracing]\notlp_endpoint = "localhost:4318"', "tracing.otlp_endpoint: expected http://"),
        ('[tracing]\notlp_endpoint = "http://h:x"', "tracing.otlp_endpoint: expected http://"),
        ('session_store_path = ""', "session_store_path: must not be empty"),
        ('auth_token = "a"\nauth_token_file = "b"', "set one of them, not both"),
        ('auth_token_file = "/nowhere"', "auth_token_file: cannot read /nowhere"),
        ("[backend]\nretry_base_seconds = 60.0", "must not be above backend.retry_max_seconds"),
        (
            'lmcache_url = "http://10.1.2.3:1"\n[backend]\nkind = "embedded"',
            "must be a loopback address",
        ),
    ],
)
def test_a_mistake_in_the_file_is_one_clear_line(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, text), {})
    message = str(caught.value).replace("lmcache | embedded", "embedded | lmcache")
    assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"RAM_A_KV_CONFIG": "/nowhere"}, "cannot read configuration file /nowhere"),
        ({"RAMAKV_BACKEND__KINDS": "noop"}, "did you mean RAMAKV_BACKEND__KIND?"),
        ({"RAMAKV_BACKEND": "noop"}, "RAMAKV_BACKEND: no such key"),
        ({"RAMAKV_LIMITS__SESSIONS_MAX": "x"}, "limits.sessions_max: expected int, got str"),
    ],
)
def test_a_mistake_in_the_environment_is_one_clear_line(
    environment: dict[str, str], expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, environment)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_config_show_prints_is_a_configuration(tmp_path: Path) -> None:
    table: dict[str, Any] = {"auth_token": "secret", "debug_dir": 'a "b" \\c', "trace_events": True}
    config = msgspec.convert(table, Config)
    text = "\n".join(as_toml(config))
    assert "secret" not in text
    shown = load_config(written(tmp_path, text), {})
    assert msgspec.structs.replace(shown, auth_token="secret") == config


def test_the_keys_that_the_security_notes_name_exist() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    defaults = msgspec.to_builtins(Config())
    named = re.findall(r"`(\w+)\.(\w+)`", text)
    assert len(named) > 3
    for section, key in named:
        assert key in defaults[section], f"{section}.{key}"
    for key in ("auth_token_file", "listen_addr", "debug_dir", "trace_events"):
        assert key in defaults
        assert key in text
