"""HTTPS in the real daemon: its files, SIGHUP, a stop, and the commands that talk to it."""

from __future__ import annotations

import datetime
import json
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives import serialization

from ramakv.cli import main
from ramakv.config import Tls
from ramakv.config_file import load_config
from ramakv.errors import ConfigError
from ramakv.web.tls import load_certificate
from tests.certificates import Certificates
from tests.daemons import Daemon, running_daemon

HEALTH = {"type": "health"}


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, list(arguments), env=environment)
    return result.exit_code, result.stdout, result.stderr


def logged(daemon: Daemon, event: str) -> list[dict[str, str]]:
    found = map(json.loads, daemon.log.read_text().split("\n")[:-1])
    return [line for line in found if line["event"] == event]


def hang_up(daemon: Daemon, *events: str) -> None:
    """Send SIGHUP and wait until the log says what came of it."""
    assert daemon.process is not None
    before = {event: len(logged(daemon, event)) for event in events}
    daemon.process.send_signal(signal.SIGHUP)
    until(lambda: all(len(logged(daemon, event)) > before[event] for event in events))


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


def day(year: int) -> datetime.datetime:
    return datetime.datetime(year, 1, 1, tzinfo=datetime.UTC)


def shown_by(daemon: Daemon) -> str:
    return ssl.get_server_certificate(("127.0.0.1", daemon.port)).strip()


def test_the_daemon_serves_https_and_says_so(certificates: Certificates, tmp_path: Path) -> None:
    with running_daemon(tmp_path, **certificates.environment) as daemon:
        client = httpx.Client(verify=certificates.client(), trust_env=False, base_url=daemon.url)
        with client:
            assert client.post("/event", json=HEALTH).json()["ok"]
        assert logged(daemon, "ramakv starts")[0]["listens"] == [daemon.url]
        assert daemon.url.startswith("https://")
        assert daemon.stop() == 0


def test_sighup_brings_a_new_certificate_to_new_connections(
    certificates: Certificates, tmp_path: Path
) -> None:
    with (
        running_daemon(tmp_path, **certificates.environment) as daemon,
        httpx.Client(verify=certificates.client(), trust_env=False, base_url=daemon.url) as client,
    ):
        first = shown_by(daemon)
        assert first == certificates.certificate_file.read_text().strip()
        assert client.post("/event", json=HEALTH).status_code == 200
        second = certificates.issue().strip()
        assert shown_by(daemon) == first
        hang_up(daemon, "reloaded the certificate")
        assert shown_by(daemon) == second
        answer = client.post("/event", json=HEALTH)  # over the connection that it has
        assert answer.status_code == 200
        stream = answer.extensions["network_stream"].get_extra_info("ssl_object")
        assert ssl.DER_cert_to_PEM_cert(stream.getpeercert(True)).strip() == first

        certificates.certificate_file.write_text("no certificate")
        hang_up(daemon, "the certificate stays as it was")
        (line,) = logged(daemon, "the certificate stays as it was")
        assert line["level"] == "error"
        assert "holds no certificate in PEM" in line["cause"]
        assert shown_by(daemon) == second
        assert daemon.stop() == 0


def test_sighup_brings_a_new_token(tmp_path: Path) -> None:
    token = tmp_path / "token"

    def write(text: str) -> None:
        token.write_text(text)
        token.chmod(0o600)

    write("sesame-1\n")
    daemon = Daemon(tmp_path, RAMAKV_AUTH_TOKEN_FILE=str(token))
    try:
        daemon.start(wait=False)
        daemon.wait_until_answering()
        with httpx.Client(base_url=daemon.url, trust_env=False) as client:

            def status(sent: str) -> int:
                headers = {"Authorization": f"Bearer {sent}"}
                return client.post("/event", json=HEALTH, headers=headers).status_code

            assert (status("sesame-1"), status("sesame-2")) == (200, 401)
            write("sesame-2")
            hang_up(daemon, "reloaded the token")
            assert (status("sesame-1"), status("sesame-2")) == (401, 200)
            token.chmod(0o644)
            hang_up(daemon, "the token stays as it was")
            write(" \n")
            hang_up(daemon, "the token stays as it was")
            assert (status("sesame-1"), status("sesame-2")) == (401, 200)
        assert daemon.stop() == 0
        assert "sesame" not in daemon.log.read_text()
    finally:
        daemon.kill()


def test_sighup_without_anything_to_reload_is_ignored(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon:
        for _ in range(3):
            hang_up(
                daemon, "nothing to reload: neither tls.certificate_file nor auth_token_file is set"
            )
        assert daemon.send("health")["ok"]
        assert daemon.stop() == 0


def test_a_stop_with_tls_connections_open_ends_in_time(
    certificates: Certificates, tmp_path: Path
) -> None:
    environment = {
        **certificates.environment,
        "RAMAKV_LIMITS__DRAIN_TIMEOUT_SECONDS": "0.5",
        "RAMAKV_TLS__HANDSHAKE_TIMEOUT_SECONDS": "600",
        "RAMAKV_LIMITS__KEEP_ALIVE_SECONDS": "600",
    }
    with running_daemon(tmp_path, **environment) as daemon:
        where = ("127.0.0.1", daemon.port)
        context = certificates.client()
        open_ones = [socket.create_connection(where) for _ in range(5)]
        open_ones[0].sendall(b"\x16\x03\x01\x02\x00")
        for _ in range(5):
            plain = socket.create_connection(where)
            open_ones.append(context.wrap_socket(plain, server_hostname="localhost"))
        half = open_ones[-1]
        half.sendall(b"POST /event HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
        daemon.send("health")
        began = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - began < 5.0
        for each in open_ones:
            each.close()


def test_a_unix_socket_stays_as_it_is(certificates: Certificates, tmp_path: Path) -> None:
    path = tmp_path / "events.sock"
    environment = {**certificates.environment, "RAMAKV_LISTEN_ADDR": f"unix:{path}"}
    daemon = Daemon(tmp_path, **environment)
    try:
        daemon.start(wait=False)
        until(lambda: bool(logged(daemon, "ready")))
        assert run("event", "health", "--url", f"unix:{path}")[0] == 0
        assert logged(daemon, "ramakv starts")[0]["listens"] == [f"unix:{path}"]
        assert daemon.stop() == 0
    finally:
        daemon.kill()


# What the commands do with an https daemon


def test_commands_reach_an_https_daemon_with_its_ca(
    certificates: Certificates, tmp_path: Path
) -> None:
    ca = str(certificates.ca_file)
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"t": 0, "session": "r", "turn": 1, "in": 1, "out": 1, "hashes": [1]}\n')
    with running_daemon(tmp_path, **certificates.environment) as daemon:
        to = ("--url", daemon.url)
        code, out, err = run("event", "health", *to, "--ca-file", ca)
        assert (code, json.loads(out)["ok"]) == (0, True), err
        assert run("event", "health", *to, RAM_A_KV_CA_FILE=ca)[0] == 0
        daemon.turn_end("s", "h-a")
        engine = ("--engine-url", f"http://127.0.0.1:{daemon.engine_port}")
        code, out, err = run("chunks", "s", *to, *engine, "--ca-file", ca, "--json")
        assert (code, json.loads(out)["chunks"][0]["chunk_hash"]) == (0, "h-a"), err
        code, out, err = run("replay", str(trace), *to, "--ca-file", ca)
        assert code == 0, out + err

        code, out, err = run("event", "health", *to)
        assert (code, out) == (1, "")
        assert "--ca-file" in err
        assert run("chunks", "s", *to)[0] == 1
        assert run("replay", str(trace), *to)[0] == 1
        plain = ("--url", daemon.url.replace("https", "http"))
        code, out, _ = run("event", "health", *plain)
        assert code == 1
        assert "https" in json.loads(out)["error"]


@pytest.mark.parametrize("command", [["event", "health"], ["chunks", "s"]])
def test_a_ca_file_that_cannot_be_used_is_one_line(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no certificate")
    for name, expected in (("text", "no certificate in PEM"), ("nowhere", "No such file")):
        to = ("--url", "https://127.0.0.1:9", "--ca-file", str(tmp_path / name))
        code, out, err = run(*command, *to)
        assert (code, out) == (2, "")
        assert expected in err
        assert err.count("\n") == 1


def test_an_http_address_with_https_in_front_says_what_to_look_at(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon:
        code, _, err = run("event", "health", "--url", daemon.url.replace("http", "https"))
        assert code == 1
        assert "does it speak https?" in err


def test_doctor_looks_at_certificate_and_daemon(certificates: Certificates, tmp_path: Path) -> None:
    with running_daemon(
        tmp_path, **certificates.environment, RAMAKV_BACKEND__KIND="noop"
    ) as daemon:
        names = [name for name in daemon.environment if name.startswith("RAMAKV_")]
        environment = {name: daemon.environment[name] for name in names}
        code, out, _ = run("doctor", **environment)
        assert code == 0, out
        assert "certificate and key fit, until 3000-01-01" in out
        assert "the daemon answers" in out
        certificates.issue(not_after=day(2020))
        code, out, _ = run("doctor", **environment)
        assert code == 1
        assert "the certificate expired on 2020-01-01" in out
        assert "does not show the certificate" in out
        assert "kill -HUP" in out
        soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=3)
        certificates.issue(not_after=soon)
        hang_up(daemon, "reloaded the certificate")
        code, out, _ = run("doctor", **environment)
        assert code == 0, out
        assert "note     the certificate expires on" in out
        certificates.key_file.unlink()
        code, out, _ = run("doctor", **environment)
        assert code == 1
        assert "tls.key_file: cannot read" in out
        assert run("config", "check", **environment)[0] == 2


# Files that cannot be used


def spoil_missing_certificate(made: Certificates) -> str:
    made.certificate_file.unlink()
    return "tls.certificate_file: cannot read .*tls.pem: No such file"


def spoil_certificate(made: Certificates) -> str:
    made.certificate_file.write_text("x")
    return "tls.certificate_file: .*tls.pem holds no certificate in PEM"


def spoil_damaged_certificate(made: Certificates) -> str:
    text = made.certificate_file.read_text().splitlines()
    made.certificate_file.write_text("\n".join([*text[:3], *text[4:]]))
    return "tls: the certificate in .*tls.pem with the key in .*tls.key cannot be used"


def spoil_missing_key(made: Certificates) -> str:
    made.key_file.unlink()
    return "tls.key_file: cannot read .*tls.key: No such file"


def spoil_folder_as_key(made: Certificates) -> str:
    made.key_file.unlink()
    made.key_file.mkdir()
    return "tls.key_file: cannot read .*tls.key: Is a directory"


def spoil_key(made: Certificates) -> str:
    made.key_file.write_text("x")
    return "tls.key_file: .*tls.key holds no private key in PEM"


def spoil_key_mode(made: Certificates) -> str:
    made.key_file.chmod(0o640)
    return r"tls.key_file: .*tls.key is open to others \(mode 0640\); run: chmod 600"


def spoil_pair(made: Certificates) -> str:
    certificate = made.certificate_file.read_bytes()
    made.issue()
    made.certificate_file.write_bytes(certificate)
    return "tls: the key in .*tls.key does not belong to the certificate in .*tls.pem"


def spoil_encrypted_key(made: Certificates) -> str:
    key = serialization.load_pem_private_key(made.key_file.read_bytes(), None)
    made.key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"pass"),
        )
    )
    return "tls.key_file: the key in .*tls.key is encrypted"


SPOILT = [value for name, value in list(globals().items()) if name.startswith("spoil_")]


@pytest.mark.parametrize("spoil", SPOILT, ids=lambda spoil: spoil.__name__)
def test_files_that_cannot_be_used_are_one_clear_line(
    certificates: Certificates, spoil: Callable[[Certificates], str]
) -> None:
    expected = spoil(certificates)
    with pytest.raises(ConfigError, match=expected) as caught:
        load_certificate(Tls(**certificates.settings))
    assert "\n" not in str(caught.value)


def test_a_key_in_the_certificates_own_file_is_found(certificates: Certificates) -> None:
    both = certificates.certificate_file.read_bytes() + certificates.key_file.read_bytes()
    certificates.key_file.write_bytes(both)
    name = str(certificates.key_file)
    assert load_certificate(Tls(certificate_file=name, key_file=name)).problem(time.time()) is None


@pytest.mark.parametrize(("given", "missing"), [("certificate", "key"), ("key", "certificate")])
def test_one_file_without_the_other_is_refused(given: str, missing: str) -> None:
    with pytest.raises(ConfigError, match=f"tls.{given}_file is set and tls.{missing}_file is not"):
        load_config(None, {f"RAMAKV_TLS__{given.upper()}_FILE": "/x"})


def test_a_start_with_files_that_do_not_fit_is_one_line_and_exit_code_2(
    certificates: Certificates, tmp_path: Path
) -> None:
    spoil_pair(certificates)
    daemon = Daemon(tmp_path, **certificates.environment)
    done = subprocess.run(
        [sys.executable, "-m", "ramakv", "serve"],
        env=daemon.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "does not belong to the certificate" in done.stderr


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"not_after": day(2020)},
            "expired on 2020-01-01",
        ),
        (
            {
                "not_before": day(2900),
                "not_after": day(2901),
            },
            "not valid before 2900-01-01",
        ),
    ],
)
def test_a_certificate_out_of_its_time_is_only_warned_of(
    certificates: Certificates, tmp_path: Path, options: dict[str, object], expected: str
) -> None:
    certificates.issue(**options)
    with running_daemon(tmp_path, **certificates.environment) as daemon:
        (line,) = logged(daemon, "clients will refuse to connect")
        assert line["level"] == "warning"
        assert re.search(expected, line["cause"])
