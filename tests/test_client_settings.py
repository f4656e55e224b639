"""Where the client finds its daemon: arguments, environment, the file of the Rust SDK."""

from __future__ import annotations

from pathlib import Path

import pytest

from ramakv.client import Client, ConfigError, SyncClient
from ramakv.client.settings import Settings, load_settings
from tests.event_server import event_server


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "config.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_the_file_of_the_rust_sdk_is_read_where_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".config" / "ram-a-kv"
    folder.mkdir(parents=True)
    written(folder, 'daemon_url = "http://h:1/"\nauth_token = "t"\nfuture = 1\n')
    assert load_settings(environ={}) == Settings("http://h:1", "t")


def test_arguments_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, 'daemon_url = "http://file:1"\nauth_token = "file"\n')
    environ = {"RAM_A_KV_CLIENT_CONFIG": str(path)}
    assert load_settings(environ=environ) == Settings("http://file:1", "file")
    environ |= {"RAM_A_KV_DAEMON_URL": "http://env:1", "RAM_A_KV_AUTH_TOKEN": "env"}
    environ |= {"RAM_A_KV_CA_FILE": "ca.pem"}
    assert load_settings(environ=environ) == Settings("http://env:1", "env", "ca.pem")
    given = load_settings("https://arg:1", "arg", "mine.pem", environ=environ)
    assert given == Settings("https://arg:1", "arg", "mine.pem")


def test_the_files_token_goes_to_the_files_daemon_only(tmp_path: Path) -> None:
    path = written(tmp_path, 'daemon_url = "http://file:1"\nauth_token = "secret"\n')
    assert load_settings("http://file:1/", path=path, environ={}).token == "secret"
    assert load_settings("http://elsewhere:1", path=path, environ={}).token == ""
    assert "secret" not in repr(load_settings(path=path, environ={}))


def test_without_an_address_it_is_off_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAM_A_KV_DAEMON_URL", raising=False)
    with SyncClient() as client, client.session("s") as session:
        assert not client.is_enabled
        assert not session.turn().end(["a"]).wait().ok
        assert not client.health().wait().ok
    assert client.counters.dropped == 4
    assert [record.message for record in caplog.records] == [
        "ramakv is off: no daemon is configured, so events go nowhere; give its address to the "
        "client, in RAM_A_KV_DAEMON_URL or as daemon_url in ~/.config/ram-a-kv/config.toml"
    ]
    with pytest.raises(ConfigError, match="no daemon is configured"):
        Client(raise_errors=True)


MISTAKES = [
    ("daemon_url = ", "is not valid TOML"),
    (b'daemon_url = "\xff"', "is not valid TOML"),
    ("daemon_url = 5", "daemon_url: expected text, got 5"),
    ('daemon_url = "http://h:1"\nauth_token = []', "auth_token: expected text, got []"),
    ('daemon_url = "h:1"', "daemon_url: expected http://host:port"),
    ('daemon_url = "http://h:x"', "daemon_url: expected http://host:port"),
    ('daemon_url = "ftp://h:1"', "daemon_url: expected http://host:port"),
    ('daemon_url = "http://h:1"\nauth_token = "ü"', "auth_token: expected visible ASCII"),
    ('daemon_url = "http://h:1"\nauth_token = "a\\nb"', "auth_token: expected visible ASCII"),
]


@pytest.mark.parametrize(("text", "expected"), MISTAKES)
def test_a_mistake_in_the_file_switches_it_off_and_is_one_clear_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str | bytes, expected: str
) -> None:
    path = written(tmp_path, text)
    with SyncClient(config_file=path) as client:
        assert not client.session("s").close().wait().ok
    (line,) = [record.message for record in caplog.records]
    assert expected in line
    assert "\n" not in line
    with pytest.raises(ConfigError) as caught:
        SyncClient(config_file=path, raise_errors=True)
    assert expected in str(caught.value)


def test_a_file_or_a_ca_that_is_not_there_is_a_mistake_only_where_it_was_named(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="cannot read /nowhere/x"):
        load_settings(path="/nowhere/x", environ={})
    with pytest.raises(ConfigError, match="cannot read"):
        load_settings(path=tmp_path, environ={})
    assert load_settings("http://h:1", "t", path="/nowhere/x", environ={}).url == "http://h:1"
    with pytest.raises(ConfigError, match="ca_file /nowhere/ca"):
        Client("https://h:1", ca_file="/nowhere/ca", raise_errors=True)
    with pytest.raises(ConfigError, match="no certificate in PEM"):
        Client("https://h:1", ca_file=str(written(tmp_path, "x")), raise_errors=True)


def test_the_token_is_sent(tmp_path: Path) -> None:
    with event_server() as served:
        path = written(tmp_path, f'daemon_url = "{served.url}"\nauth_token = "t"\n')
        with SyncClient(config_file=path) as client:
            assert client.health().wait().ok
        assert served.tokens == {"Bearer t"}
