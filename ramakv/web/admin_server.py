"""Serves the admin app on its own listener, beside the events', from before the actors run."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from ramakv.config import Config, Limits
from ramakv.problems import Problems
from ramakv.web.access import Access
from ramakv.web.admin import Admin
from ramakv.web.gate import Gate
from ramakv.web.lazy_app import LazyApp
from ramakv.web.server import open_sockets, serve_http

if TYPE_CHECKING:
    from hypercorn.typing import ASGIFramework

CONNECTIONS_MAX: Final = 256  # operators are few
DRAIN_SECONDS_MAX: Final = 1.0  # whoever looks need not see the end


def open_admin_sockets(config: Config) -> list[socket.socket]:
    """Listen at `admin.listen_addr`; an empty one is no listener. Raises ConfigError."""
    address = config.admin.listen_addr
    return open_sockets(address, key="admin.listen_addr") if address else []


@asynccontextmanager
async def serving_admin(
    config: Config,
    access: Access,
    sockets: Sequence[socket.socket],
    stop: trio.Event,
    problems: Problems,
) -> AsyncIterator[Admin]:
    """Serve operators until the block ends; `stop` says that the daemon begins to stop.

    Without sockets nobody is served, and all else is the same.
    """
    admin = Admin(stop, problems)
    if not sockets:
        yield admin
        return
    gate = Gate(access.bearer, is_unix=config.admin.listen_addr.startswith("unix:"))
    app = LazyApp(partial(_load_app, admin, gate))
    ended = trio.Event()
    serve = partial(
        serve_http,
        app,
        sockets,
        limits=_limits(config.limits),
        stop=ended,
        tls=access.tls if config.admin_is_https else None,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(serve)
        try:
            async with trio.open_nursery() as watching:
                await watching.start(admin.run)
                yield admin
                watching.cancel_scope.cancel()
        finally:
            ended.set()


def _limits(limits: Limits) -> Limits:
    return msgspec.structs.replace(
        limits,
        connections_max=min(limits.connections_max, CONNECTIONS_MAX),
        drain_timeout_seconds=min(limits.drain_timeout_seconds, DRAIN_SECONDS_MAX),
    )


def _load_app(admin: Admin, gate: Gate) -> ASGIFramework:
    from ramakv.web.admin_app import create_admin_app

    app: ASGIFramework = create_admin_app(admin, gate)
    return app
