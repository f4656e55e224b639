"""`ramakv doctor`: would it work here, and if not, what to do."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Iterator
from dataclasses import asdict

import click
import httpx
import trio

from ramakv.commands.daemon_client import open_client
from ramakv.commands.store import examine
from ramakv.config import Config
from ramakv.config_file import load_config
from ramakv.core.topology import Finding, Level, judge
from ramakv.errors import ConfigError, StoreError
from ramakv.lmcache.survey import survey
from ramakv.web.server import close_sockets, open_sockets
from ramakv.web.tls import load_certificate, trust_in_own

_TIMEOUT_SECONDS = 3.0
_EXPIRES_SOON_SECONDS = 14 * 86_400.0
_MARKS = {
    Level.OK: click.style("ok     ", fg="green"),
    Level.NOTE: click.style("note   ", fg="yellow"),
    Level.PROBLEM: click.style("problem", fg="red"),
    Level.FATAL: click.style("fatal  ", fg="red", bold=True),
}


def run(config_path: str | None, *, as_json: bool) -> int:
    """Print the findings; 0 if nothing is wrong, 1 if something is. Raises ConfigError."""
    config = load_config(config_path)
    findings = [
        Finding(Level.OK, f"the configuration is usable; backend {config.backend_kind}"),
        *_look_at_certificate(config),
        *_look_at_daemon(config),
        *_look_at_database(config),
        *_look_at_lmcache(config),
    ]
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], ensure_ascii=False))
    else:
        for finding in findings:
            click.echo(f"{_MARKS[finding.level]}  {finding.what}")
            if finding.advice:
                click.echo(f"         {finding.advice}")
    return int(any(finding.level in (Level.PROBLEM, Level.FATAL) for finding in findings))


def _look_at_daemon(config: Config) -> Iterator[Finding]:
    """See whether the daemon runs, or could listen where it is to."""
    address = config.listen_addr
    scheme = "https" if config.is_https else "http"
    url = address if address.startswith("unix:") else f"{scheme}://{address}"
    try:
        trust = trust_in_own(config.tls) if config.is_https else None
        with open_client(url, config.auth_token or None, trust) as client:
            reply = client.post("/event", json={"type": "health"}, timeout=_TIMEOUT_SECONDS)
        data = reply.json()["data"]
        yield Finding(
            Level.OK, f"the daemon answers at {address}: {data['sessions_count']} active sessions"
        )
        return
    except ConfigError:  # a finding already
        return
    except httpx.HTTPError as error:
        if config.is_https and _is_about_tls(error):
            yield Finding(
                Level.PROBLEM,
                f"what listens at {address} does not show the certificate of "
                f"tls.certificate_file: {error}",
                "if that file is new: kill -HUP the daemon; if [tls] is: restart it",
            )
            return
    except (ValueError, KeyError, TypeError):
        yield Finding(
            Level.PROBLEM,
            f"something that is not ramakv answers at {address}",
            "stop it, or set listen_addr to another address",
        )
        return
    try:
        close_sockets(open_sockets(address))
    except ConfigError as error:
        yield Finding(Level.PROBLEM, str(error))
    else:
        yield Finding(Level.OK, f"no daemon runs, and {address} is free for it")


def _is_about_tls(error: BaseException) -> bool:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


def _look_at_certificate(config: Config) -> Iterator[Finding]:
    if not config.is_https:
        return
    try:
        certificate = load_certificate(config.tls)
    except ConfigError as error:
        yield Finding(Level.PROBLEM, str(error))
        return
    now = time.time()
    if (problem := certificate.problem(now)) is not None:
        yield Finding(
            Level.PROBLEM, problem, "renew it, then kill -HUP the daemon; clients refuse it"
        )
    elif certificate.valid_until - now < _EXPIRES_SOON_SECONDS:
        yield Finding(
            Level.NOTE,
            f"the certificate expires on {certificate.expires}",
            "renew it, then kill -HUP the daemon",
        )
    else:
        yield Finding(Level.OK, f"certificate and key fit, until {certificate.expires}")


def _look_at_database(config: Config) -> Iterator[Finding]:
    path = config.store_path
    if not path.exists():
        yield Finding(Level.NOTE, f"there is no database {path} yet; the first start makes it")
        return
    try:
        found = examine(path)
    except StoreError as error:
        yield Finding(Level.PROBLEM, str(error))
        return
    for problem in found.problems:
        yield Finding(Level.PROBLEM, f"database: {problem}", f"see: ramakv store check {path}")
    if not found.problems:
        yield Finding(
            Level.OK,
            f"the database {path} is sound: {found.sessions_active} active sessions, "
            f"{found.outbox_owed} evictions owed",
        )
    if found.outbox_dead_letters:
        yield Finding(
            Level.NOTE,
            f"{found.outbox_dead_letters} chunks are dead letters: LMCache refused to evict them",
            "the column dead_reason of the table outbox says why",
        )


def _look_at_lmcache(config: Config) -> Iterator[Finding]:
    if config.backend_kind == "noop":
        yield Finding(Level.NOTE, "the backend is noop: nothing is prefetched or evicted")
    elif config.backend_kind == "embedded":
        yield Finding(Level.NOTE, "the backend is the embedded engine: for trying things out")
    else:
        yield from judge(
            trio.run(lambda: survey(config.lmcache_url, timeout_seconds=_TIMEOUT_SECONDS))
        )
