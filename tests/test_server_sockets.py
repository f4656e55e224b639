"""Where the server listens: addresses, ports, unix sockets, and what is wrong with them."""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from ramakv.config import Limits
from ramakv.errors import ConfigError
from ramakv.web.server import close_sockets, open_sockets, serve_http, socket_urls
from tests.http_server import (
    GET,
    Wire,
    echo,
    open_fds,
)


def test_a_name_is_listened_on_at_all_its_addresses_with_one_port() -> None:
    sockets = open_sockets("localhost:0")
    with closing_all(sockets):
        wanted = {
            where[0]
            for *_, where in socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)
            if can_bind(where)
        }
        assert {sock.getsockname()[0] for sock in sockets} == wanted
        assert len({sock.getsockname()[1] for sock in sockets}) == 1
        for sock in sockets:
            assert not sock.getblocking()
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


@contextmanager
def closing_all(sockets: list[socket.socket]) -> Iterator[list[socket.socket]]:
    try:
        yield sockets
    finally:
        close_sockets(sockets)


def can_bind(where: Any) -> bool:
    family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
    with socket.socket(family) as sock:
        try:
            sock.bind((where[0], 0, *where[2:]))
        except OSError:
            return False
    return True


def test_urls_are_written_as_people_write_them(tmp_path: Path) -> None:
    sockets = open_sockets("127.0.0.1:0") + open_sockets(f"unix:{tmp_path}/s")
    if can_bind(("::1", 0)):
        sockets += open_sockets("[::1]:0")
    with closing_all(sockets):
        port = sockets[0].getsockname()[1]
        urls = socket_urls(sockets)
        assert urls[:2] == [f"http://127.0.0.1:{port}", f"unix:{tmp_path}/s"]
        assert all(re.fullmatch(r"http://\[::1\]:\d+", url) for url in urls[2:])


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("", "expected host:port"),
        ("127.0.0.1", "expected host:port"),
        (":6998", "expected host:port"),
        ("::1:6998", "expected host:port"),
        ("http://127.0.0.1:6998", "expected host:port"),
        ("127.0.0.1:", "expected a port from 0 to 65535"),
        ("127.0.0.1:http", "expected a port from 0 to 65535"),
        ("127.0.0.1:65536", "expected a port from 0 to 65535"),
        ("127.0.0.1:-1", "expected a port from 0 to 65535"),
        ("127.0.0.1:²", "expected a port from 0 to 65535"),
        ("no-such-host.invalid:80", "is unknown"),
        ("x" * 70 + ":80", "is unknown"),
        ("203.0.113.7:80", "this machine has no such address"),
        ("unix:", "expected host:port, [ipv6]:port or unix:/path"),
        ("unix:relative", "expected host:port, [ipv6]:port or unix:/path"),
        ("unix:/no/such/folder/s", "the folder does not exist"),
        ("unix:/" + "x" * 200, "path too long"),
        ("unix:/dev/null", "is no socket"),
        ("127.0.0.1\n:80\n", "expected a port from 0 to 65535"),
    ],
)
def test_an_unusable_address_is_one_line_that_names_the_key(address: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_sockets(address, key="admin.listen_addr")
    message = str(caught.value)
    assert message.startswith(f"admin.listen_addr: cannot listen on {address!r}: ")
    assert problem in message
    assert "\n" not in message


def found(*hosts: str) -> Callable[..., list[Any]]:
    """Return a getaddrinfo for a name that has these addresses."""
    families = [socket.AF_INET6 if ":" in host else socket.AF_INET for host in hosts]
    answer = [(family, 0, 0, "", (host, 0)) for family, host in zip(families, hosts, strict=True)]
    return lambda *_, **__: answer


@pytest.mark.parametrize("hosts", [("127.0.0.1", "127.0.0.2"), ("::", "0.0.0.0")])
def test_all_addresses_get_the_port_that_was_free(
    hosts: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_bind(("::1", 0)):
        pytest.skip("no IPv6 here")
    monkeypatch.setattr(socket, "getaddrinfo", found(*hosts))
    with closing_all(open_sockets("name:0")) as sockets:
        assert [sock.getsockname()[0] for sock in sockets] == list(hosts)
        assert len({sock.getsockname()[1] for sock in sockets}) == 1


def test_an_address_of_a_name_that_the_machine_has_not_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elsewhere = "203.0.113.7"
    for hosts in ([elsewhere, "127.0.0.1"], ["127.0.0.1", elsewhere]):
        monkeypatch.setattr(socket, "getaddrinfo", found(*hosts))
        with closing_all(open_sockets("name:0")) as sockets:
            assert [sock.getsockname()[0] for sock in sockets] == ["127.0.0.1"]
    monkeypatch.setattr(socket, "getaddrinfo", found(elsewhere, elsewhere))
    with pytest.raises(ConfigError, match="this machine has no such address"):
        open_sockets("name:0")


def test_what_was_opened_is_closed_when_the_rest_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = open_fds()
    with socket.create_server(("127.0.0.2", 0)) as other:
        port = other.getsockname()[1]
        hosts = [(socket.AF_INET, 0, 0, "", (f"127.0.0.{last}", port)) for last in (1, 2)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: hosts)
        with pytest.raises(ConfigError, match="another process listens there"):
            open_sockets(f"name:{port}")
    assert open_fds() == before


def test_a_port_in_use_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match="another process listens there; stop it"):
            open_sockets(address)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may use any port")
def test_a_port_that_is_not_permitted_says_so() -> None:  # pragma: no cover
    with pytest.raises(ConfigError, match="permission"):
        open_sockets("127.0.0.1:1")


async def test_a_unix_socket_is_for_user_and_group_and_is_gone_in_the_end(tmp_path: Path) -> None:
    path = tmp_path / "s"
    sockets = open_sockets(f"unix:{path}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve_http, echo, sockets, limits=Limits(), stop=stop))
        async with await trio.open_unix_socket(str(path)) as stream:
            assert (await Wire(stream).ask(GET)).body == b"GET / "
        stop.set()
    assert not path.exists()


def test_a_socket_file_that_nobody_listens_on_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with closing_all(open_sockets(f"unix:{path}")), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    assert not path.exists()


def test_a_socket_that_another_process_listens_on_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(path))
        live.listen()
        with pytest.raises(ConfigError, match="another process listens there"):
            open_sockets(f"unix:{path}")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="is no socket"):
        open_sockets(f"unix:{path}")
    assert path.read_text() == "precious"


def test_closing_leaves_the_socket_of_a_successor(tmp_path: Path) -> None:
    path = tmp_path / "s"
    sockets = open_sockets(f"unix:{path}")
    path.unlink()
    with closing_all(open_sockets(f"unix:{path}")), socket.socket(socket.AF_UNIX) as client:
        close_sockets(sockets)
        client.connect(str(path))
