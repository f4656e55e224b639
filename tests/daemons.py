"""Real daemons for tests: inside the process over real HTTP, or as a process of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import trio

from ramakv.lmcache.backend import KVBackend
from ramakv.service import Service, open_service
from ramakv.web.event_app import create_event_app
from ramakv.web.server import open_sockets, serve_http, socket_urls
from tests.fakes import FakeLMCache, make_config

READY_SECONDS_MAX = 30.0


@asynccontextmanager
async def serving(
    folder: Path,
    client: KVBackend | None = None,
    *,
    fake: bool = True,
    **overrides: Any,
) -> AsyncIterator[tuple[httpx.AsyncClient, Service]]:
    """A daemon in this process, on a free port, with real threads and files.

    It talks to `client`, else to a fake LMCache, or, unless `fake`, to what is configured.
    """
    config = make_config(folder, listen_addr="127.0.0.1:0", **overrides)
    sockets = open_sockets(config.listen_addr)
    stop = trio.Event()
    async with open_service(config, client=client or (FakeLMCache() if fake else None)) as service:
        app = create_event_app(service, config, tallies=service.answered)
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(serve_http, app, sockets, limits=config.limits, stop=stop))
            limits = httpx.Limits(max_connections=256)
            async with httpx.AsyncClient(
                base_url=socket_urls(sockets)[0],
                trust_env=False,
                verify=False,  # loading the CA bundle takes longer than most tests
                limits=limits,
                timeout=30.0,
            ) as http:
                yield http, service
            stop.set()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Daemon:
    """`ramakv serve` as a process of its own."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.port = int(environment.pop("port", "0")) or free_port()
        self.engine_port = free_port()
        scheme = "https" if "RAMAKV_TLS__CERTIFICATE_FILE" in environment else "http"
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        self.log = folder / "daemon.log"
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("RAM")},
            "RAMAKV_LISTEN_ADDR": f"127.0.0.1:{self.port}",
            "RAMAKV_ADMIN__LISTEN_ADDR": "127.0.0.1:0",
            "RAMAKV_LMCACHE_URL": f"http://127.0.0.1:{self.engine_port}",
            "RAMAKV_BACKEND__KIND": "embedded",
            "RAMAKV_EMBEDDED__DISK_DIR": str(folder / "chunks"),
            "RAMAKV_SESSION_STORE_PATH": str(folder / "sessions.db"),
            "RAMAKV_DEBUG_DIR": str(folder / "debug"),
            **environment,
        }
        self.command = [sys.executable, "-m", "ramakv", "serve"]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, wait: bool = True) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env=self.environment,
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        if wait:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        self.wait_until_answering()
        assert self.send("health")["ok"], self.log.read_text()

    def wait_until_answering(self) -> None:
        """Wait for an answer of any kind: it may be that a token is asked for."""
        assert self.process is not None
        ends = time.monotonic() + READY_SECONDS_MAX
        while time.monotonic() < ends:
            assert self.process.poll() is None, self.log.read_text()
            try:
                self.send("health")
                return
            except httpx.HTTPError:
                time.sleep(0.01)
        raise AssertionError(f"not ready: {self.log.read_text()}")

    def send(self, type_: str, session_id: str | None = None, **fields: Any) -> Any:
        body = {"type": type_, **fields}
        if session_id is not None:
            body["session_id"] = session_id
        reply = httpx.post(
            f"{self.url}/event", json=body, trust_env=False, verify=False, timeout=30
        )
        return reply.json()

    def turn_end(self, session_id: str, *hashes: str, **fields: Any) -> Any:
        params = {"chunk_hashes": list(hashes)}
        return self.send("turn_end", session_id, kv_transfer_params=params, **fields)

    def stop(self, number: int = signal.SIGTERM, timeout: float = 30.0) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(timeout)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)


@contextmanager
def running_daemon(folder: Path, **environment: str) -> Iterator[Daemon]:
    daemon = Daemon(folder, **environment)
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.kill()
