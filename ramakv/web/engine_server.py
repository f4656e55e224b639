"""Serves the embedded engine: one port inside the daemon, or a scheduler and its workers."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog
import trio

from ramakv.config import Config, resolve_path
from ramakv.web.lazy_app import LazyApp
from ramakv.web.server import open_sockets, serve_http, socket_urls

if TYPE_CHECKING:
    from hypercorn.typing import ASGIFramework

    from ramakv.lmcache.embedded.engine import Engine

log = structlog.get_logger("ramakv.engine")


@asynccontextmanager
async def serving_engine(
    config: Config, host: str, port: int, run_sync: Any
) -> AsyncIterator[None]:
    """Serve the daemon's own engine until the block ends.

    One worker is one port that answers everything; more are a scheduler on `port` and workers
    on the ports after it. Raises ConfigError.
    """
    stop = trio.Event()
    workers = config.embedded.workers
    async with trio.open_nursery() as nursery:
        if workers > 1:
            await nursery.start(partial(serve_alone, config, host, port, workers, stop))
        else:
            await nursery.start(partial(_serve_one_port, config, host, port, run_sync, stop))
        try:
            yield
        finally:
            stop.set()


async def serve_alone(
    config: Config,
    host: str,
    port: int,
    workers: int,
    stop: trio.Event,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve a scheduler on `port`, and workers on the next ports, until `stop` is set."""
    from ramakv.lmcache.embedded.serving import serve_engine

    async def serve(
        app: ASGIFramework, host: str, port: int, *, task_status: trio.TaskStatus[int]
    ) -> None:
        sockets = _open(host, port)
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(serve_http, app, sockets, limits=config.limits, stop=stop))
            task_status.started(sockets[0].getsockname()[1])

    disk_dir = resolve_path(config.embedded.disk_dir)
    async with trio.open_nursery() as nursery:
        ports = await nursery.start(
            partial(
                serve_engine, host, port, workers, config.embedded, disk_dir=disk_dir, serve=serve
            )
        )
        log.info(
            "embedded engine listens",
            scheduler=ports[0],
            workers=ports[1:],
            disk_dir=str(disk_dir),
            behaviour=config.embedded.behaviour,
        )
        task_status.started()


async def _serve_one_port(
    config: Config,
    host: str,
    port: int,
    run_sync: Any,
    stop: trio.Event,
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    from ramakv.lmcache.embedded.engine import open_engine

    disk_dir = resolve_path(config.embedded.disk_dir)
    async with open_engine(config.embedded, disk_dir=disk_dir, run_sync=run_sync) as engine:
        sockets = _open(host, port)
        log.info("embedded engine listens", urls=socket_urls(sockets), disk_dir=str(disk_dir))
        async with trio.open_nursery() as nursery:
            app = LazyApp(partial(_load_app, engine))
            nursery.start_soon(app.load)
            await nursery.start(partial(serve_http, app, sockets, limits=config.limits, stop=stop))
            task_status.started()


def _open(host: str, port: int) -> list[socket.socket]:
    name = f"[{host}]" if ":" in host else host
    return open_sockets(f"{name}:{port}", key="lmcache_url")


def _load_app(engine: Engine) -> ASGIFramework:
    from ramakv.lmcache.embedded.app import create_app

    app: ASGIFramework = create_app(engine)
    return app
