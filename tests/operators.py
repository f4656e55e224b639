"""The admin listener in this process, over real HTTP, and what stands behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import trio

from ramakv.actors.caretaker import Care
from ramakv.actors.journal import RunSync
from ramakv.lmcache.backend import KVBackend
from ramakv.problems import Problems
from ramakv.service import Service, open_service
from ramakv.web.access import Access
from ramakv.web.admin import Admin
from ramakv.web.admin_server import open_admin_sockets, serving_admin
from ramakv.web.server import socket_urls
from tests.fakes import Agent, FakeLMCache, make_config

TOKEN = "sesame-4711"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


@dataclass
class Operators:
    """A daemon's admin side: `http` asks its listener, `agent` sends it events."""

    http: httpx.AsyncClient
    admin: Admin
    service: Service
    agent: Agent
    stop: trio.Event

    async def get(self, path: str, **headers: str) -> Any:
        return (await self.http.get(path, headers=headers)).json()


@asynccontextmanager
async def admin_listener(
    folder: Path, **overrides: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Admin, trio.Event]]:
    """The listener alone, as it is while the daemon starts."""
    config = make_config(folder, **{"admin__listen_addr": "127.0.0.1:0", **overrides})
    sockets = open_admin_sockets(config)
    stop = trio.Event()
    async with (
        serving_admin(config, Access(config), sockets, stop, Problems()) as admin,
        httpx.AsyncClient(
            base_url=socket_urls(sockets)[0], trust_env=False, verify=False, timeout=30.0
        ) as http,
    ):
        yield http, admin, stop


@asynccontextmanager
async def operators(
    folder: Path,
    client: KVBackend | None = None,
    care: Care | None = None,
    run_sync: RunSync = trio.to_thread.run_sync,
    **overrides: Any,
) -> AsyncIterator[Operators]:
    """A whole daemon, but for its event listener."""
    config = make_config(folder, **{"admin__listen_addr": "127.0.0.1:0", **overrides})
    async with (
        admin_listener(folder, **overrides) as (http, admin, stop),
        open_service(
            config, client=client or FakeLMCache(), care=care, run_sync=run_sync
        ) as service,
    ):
        admin.attach(service)
        yield Operators(http, admin, service, Agent(service), stop)
        admin.attach(None)
