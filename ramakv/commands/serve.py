"""`ramakv serve`: the daemon, from its first log line to its exit code."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog
import trio

from ramakv import __version__
from ramakv.config import Config
from ramakv.config_file import load_config
from ramakv.errors import ConfigError, RamakvError, first_error
from ramakv.logs import configure_logs
from ramakv.problems import Problems
from ramakv.service import Service, open_service
from ramakv.web.access import Access
from ramakv.web.admin_server import open_admin_sockets, serving_admin
from ramakv.web.event_app import create_event_app
from ramakv.web.server import close_sockets, open_sockets, serve_http, socket_urls

if TYPE_CHECKING:
    from hypercorn.typing import ASGIFramework

    from ramakv.otel import Traces

log = structlog.get_logger("ramakv")

_WATCHDOG_SPARE_SECONDS = 5.0
_OPEN_FILES = 65_536


def run(config_path: str | None, overrides: dict[str, Any]) -> int:
    """Load the configuration and serve until a signal; returns the exit code.

    0: stopped by a signal. 1: could not start, or an actor that all depend on crashed.
    Raises ConfigError.
    """
    config = load_config(config_path, overrides=overrides)
    problems = Problems()
    logs = configure_logs(config.log.level, config.log.format, problems=problems)
    code = 0
    try:
        trio.run(serve, config, problems)
    except* RamakvError as group:
        error = first_error(group)
        log.error("cannot run", cause=str(error))
        code = 2 if isinstance(error, ConfigError) else 1
    except* Exception as group:
        log.critical("a part that all depend on crashed; ending", exc_info=group)
        code = 1
    finally:
        logs.close()
    return code


async def serve(config: Config, problems: Problems) -> None:
    """Serve until SIGTERM or SIGINT, then drain. SIGHUP has certificate and token read anew."""
    began = time.monotonic()
    _raise_open_files_limit()
    access = Access(config)
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        await nursery.start(_stop_on_signal, stop, config)
        await nursery.start(_reload_on_signal, access)
        await _serve_until(stop, config, access, problems, began)
        nursery.cancel_scope.cancel()
    log.info("stopped")


async def _serve_until(
    stop: trio.Event, config: Config, access: Access, problems: Problems, began: float
) -> None:
    with ExitStack() as opened:
        sockets = open_sockets(config.listen_addr)
        opened.callback(close_sockets, sockets)
        admin_sockets = open_admin_sockets(config)
        opened.callback(close_sockets, admin_sockets)
        traces = opened.enter_context(_exporting_traces(config))
        pages = socket_urls(admin_sockets, https=config.admin_is_https)
        log.info(
            "ramakv starts",
            version=__version__,
            listens=socket_urls(sockets, https=config.is_https),
            admin=pages,
            backend=config.backend_kind,
            lmcache_url=None if config.backend_kind == "noop" else config.lmcache_url,
            database=str(config.store_path),
            sqlite=sqlite3.sqlite_version,
        )
        async with serving_admin(config, access, admin_sockets, stop, problems) as admin:
            with trio.CancelScope() as drain:
                async with open_service(config) as service:
                    admin.attach(service)
                    app = _create_app(service, config, access, traces)
                    tls = access.tls if config.is_https else None
                    serve_events = partial(
                        serve_http, app, sockets, limits=config.limits, stop=stop, tls=tls
                    )
                    async with trio.open_nursery() as web:
                        await web.start(serve_events)
                        seconds = round(time.monotonic() - began, 3)
                        log.info("ready", seconds=seconds, page=pages[0] if pages else None)
                        gc.freeze()  # what is there now, stays: full collections skip it
                        gc.enable()
                    drain.deadline = trio.current_time() + config.limits.drain_timeout_seconds
            admin.attach(None)
            if drain.cancelled_caught:
                log.warning(
                    "draining took too long and was cut; everything acknowledged is on disk",
                    drain_timeout_seconds=config.limits.drain_timeout_seconds,
                )


def _create_app(
    service: Service, config: Config, access: Access, traces: Traces | None
) -> ASGIFramework:
    if traces is None:
        return create_event_app(service, config, access.bearer, service.answered)
    from ramakv.web.traced import TracedApp, TracedHandler

    handler = TracedHandler(service)
    return TracedApp(create_event_app(handler, config, access.bearer, service.answered), traces)


@contextmanager
def _exporting_traces(config: Config) -> Iterator[Traces | None]:
    """Export traces until the block ends, where that is wanted. Raises ConfigError."""
    if not config.tracing.enabled:
        yield None
        return
    try:
        from ramakv.otel import open_traces
    except ImportError as error:
        raise ConfigError(
            f"tracing.enabled: {error.name} is not installed; pip install 'ramakv[otel]'"
        ) from error
    traces = open_traces(config.tracing)
    try:
        yield traces
    finally:
        traces.close()


async def _stop_on_signal(
    stop: trio.Event, config: Config, *, task_status: trio.TaskStatus[None]
) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for number in signals:
            if stop.is_set():
                os._exit(1)  # asked twice: at once. The database is as good as after a crash.
            log.info("stopping", signal=signal.Signals(number).name)
            stop.set()
            _start_watchdog(2 * config.limits.drain_timeout_seconds + _WATCHDOG_SPARE_SECONDS)


async def _reload_on_signal(access: Access, *, task_status: trio.TaskStatus[None]) -> None:
    with trio.open_signal_receiver(signal.SIGHUP) as signals:
        task_status.started()
        async for _ in signals:
            await access.reload()


def _start_watchdog(seconds: float) -> None:
    """End the process if stopping hangs, as it can where a disk does."""
    watchdog = threading.Timer(seconds, os._exit, (1,))
    watchdog.daemon = True
    watchdog.start()


def _raise_open_files_limit() -> None:
    """Each connection is an open file, and many systems allow only 1024 at first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
