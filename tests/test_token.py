"""The bearer token: which requests carry it, where it comes from, and when one is needed."""

from __future__ import annotations

import hmac
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from ramakv.cli import main
from ramakv.config_file import load_config
from ramakv.errors import ConfigError
from ramakv.web.access import Bearer
from tests.daemons import serving

TOKEN = "sesame-0123"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (["Bearer sesame-0123"], 200),
        (["bearer sesame-0123"], 200),
        (["BEARER   sesame-0123"], 200),
        ([], 401),
        ([""], 401),
        (["sesame-0123"], 401),
        (["Bearer"], 401),
        (["Bearersesame-0123"], 401),
        (["Basic sesame-0123"], 401),
        (["Bearer sesame-012"], 401),
        (["Bearer sesame-01234"], 401),
        (["Bearer SESAME-0123"], 401),
        (["Bearer sesame-0123, Bearer sesame-0123"], 401),
        (["Bearer sesame-0123 x"], 401),
        (["Bearer sesame-0123", "Bearer sesame-0123"], 401),
        (["Bearer wrong", "Bearer sesame-0123"], 401),
        (["Bearer " + "x" * 10_000], 401),
    ],
)
async def test_a_request_carries_the_token_once_and_whole(
    tmp_path: Path, headers: list[str], status: int
) -> None:
    async with serving(tmp_path, auth_token=TOKEN) as (http, _):
        given = [("Authorization", value) for value in headers]
        reply = await http.post("/event", json={"type": "health"}, headers=given)
        assert reply.status_code == status
        assert TOKEN not in reply.text
        if status == 401:
            assert reply.json()["error"] == "invalid or missing bearer token"
            assert reply.headers["www-authenticate"] == "Bearer"


async def test_without_a_token_a_header_does_not_matter(tmp_path: Path) -> None:
    async with serving(tmp_path) as (http, _):
        for given in ([], [("Authorization", "Basic x"), ("Authorization", "Bearer y")]):
            reply = await http.post("/event", json={"type": "health"}, headers=given)
            assert reply.status_code == 200


def test_what_is_compared_is_of_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """compare_digest returns sooner where lengths differ: that would tell the token's."""
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def watch(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", watch)
    bearer = Bearer(TOKEN)
    tokens = ["", "s", TOKEN[:-1], TOKEN, TOKEN + "x", "x" * 5000]
    admitted = [
        bearer.admits([(b"host", b"x"), (b"authorization", f"Bearer {token}".encode())])
        for token in tokens
    ]
    assert admitted == [token == TOKEN for token in tokens]
    assert compared == [(32, 32)] * len(tokens)


# Where it comes from


def private(folder: Path, text: str | bytes = TOKEN, mode: int = 0o600) -> Path:
    path = folder / "token"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return path


def load_token(path: Path) -> str:
    return load_config(None, {"RAMAKV_AUTH_TOKEN_FILE": str(path)}).auth_token


def test_a_token_file_is_read_without_the_space_around(tmp_path: Path) -> None:
    assert load_token(private(tmp_path, f"  {TOKEN}\r\n")) == TOKEN
    assert load_token(private(tmp_path, mode=0o400)) == TOKEN
    link = tmp_path / "link"  # as a mounted secret is
    link.symlink_to("token")
    assert load_token(link) == TOKEN


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o620, 0o602, 0o660, 0o644, 0o610])
def test_a_token_file_that_is_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match=f"open to others .mode {mode:04o}.; run: chmod 600"):
        load_token(private(tmp_path, mode=mode))


def test_a_token_file_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = private(tmp_path)
    if os.geteuid() == 0:
        os.chown(path, 4242, -1)
    else:
        another = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: another)
    with pytest.raises(ConfigError, match="belongs to another user"):
        load_token(path)


def test_only_a_regular_file_holds_a_token(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    with pytest.raises(ConfigError, match="is not a regular file"):  # and no wait for a writer
        load_token(pipe)
    with pytest.raises(ConfigError, match="Is a directory"):
        load_token(tmp_path)


def test_a_credential_that_systemd_hands_over_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lets the service read by an ACL, which shows as the group's read bit."""
    path = private(tmp_path, mode=0o440)
    with pytest.raises(ConfigError, match="open to others"):
        load_token(path)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert load_token(path) == TOKEN
    path.chmod(0o444)
    with pytest.raises(ConfigError, match="open to others"):
        load_token(path)


@pytest.mark.parametrize(
    "text", [b"", b" \n", b"se same", "schlüssel".encode(), b"\xff\xfe", b"a\0b", b"a\nb"]
)
def test_a_token_that_no_header_can_carry_is_refused_and_not_quoted(
    tmp_path: Path, text: bytes
) -> None:
    with pytest.raises(ConfigError, match=r"auth_token_file: .* is empty|visible ASCII") as caught:
        load_token(private(tmp_path, text))
    assert len(text.strip()) < 4 or text.decode(errors="replace") not in str(caught.value)


@pytest.mark.parametrize("token", [" ", "se same", " sesame", "schlüssel", "a\tb"])
def test_a_token_in_the_configuration_is_checked_likewise(token: str) -> None:
    with pytest.raises(ConfigError, match=r"^auth_token: expected visible ASCII") as caught:
        load_config(None, {"RAMAKV_AUTH_TOKEN": token})
    assert token == " " or token not in str(caught.value)


def test_a_huge_token_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is it the right file"):
        load_token(private(tmp_path, b"x" * 2_000_000))


@pytest.mark.parametrize("origin", ["file", "environment"])
def test_config_show_never_prints_the_token(tmp_path: Path, origin: str) -> None:
    environment = {
        "file": {"RAMAKV_AUTH_TOKEN_FILE": str(private(tmp_path))},
        "environment": {"RAMAKV_AUTH_TOKEN": TOKEN},
    }[origin]
    for command in ("show", "check"):
        result = CliRunner().invoke(main, ["config", command], env=environment)
        assert result.exit_code == 0
        assert TOKEN not in result.output
    shown = tmp_path / "shown.toml"
    shown.write_text(CliRunner().invoke(main, ["config", "show"], env=environment).output)
    config = load_config(str(shown), {})  # what it prints can be a file
    assert config.auth_token == {"file": TOKEN, "environment": "(set)"}[origin]


# When one is needed


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0:1",
        "[::]:1",
        "10.0.0.1:1",
        "[fe80::1]:1",
        "[::ffff:0.0.0.0]:1",
        "[::ffff:10.0.0.1]:1",
        "example.org:1",
        "localhost.example.org:1",
        "128.0.0.1:1",
        "0:1",
    ],
)
def test_an_address_that_others_can_reach_needs_a_token(tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigError, match="auth_token or auth_token_file must be set"):
        load_config(None, {"RAMAKV_LISTEN_ADDR": address})
    with pytest.raises(ConfigError, match="visible ASCII"):
        load_config(None, {"RAMAKV_LISTEN_ADDR": address, "RAMAKV_AUTH_TOKEN": " "})
    environment = {
        "RAMAKV_LISTEN_ADDR": address,
        "RAMAKV_AUTH_TOKEN_FILE": str(private(tmp_path)),
    }
    assert load_config(None, environment).auth_token == TOKEN


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:1", "127.255.0.9:1", "[::1]:1", "localhost:1", "[::ffff:127.0.0.1]:1", "unix:/x"],
)
def test_an_address_of_this_machine_needs_none(address: str) -> None:
    assert load_config(None, {"RAMAKV_LISTEN_ADDR": address}).auth_token == ""
