"""`ramakv lmcache serve`: the embedded engine as a process of its own."""

from __future__ import annotations

import signal

import structlog
import trio

from ramakv.config import Config
from ramakv.config_file import load_config
from ramakv.errors import ConfigError, RamakvError, first_error
from ramakv.logs import configure_logs
from ramakv.web.engine_server import serve_alone

log = structlog.get_logger("ramakv.engine")


def run(host: str, port: int, workers: int, config_path: str | None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises ConfigError."""
    config = load_config(config_path)
    logs = configure_logs(config.log.level, config.log.format)
    code = 0
    try:
        trio.run(_serve, config, host, port, workers)
    except* RamakvError as group:
        error = first_error(group)
        log.error("cannot run", cause=str(error))
        code = 2 if isinstance(error, ConfigError) else 1
    finally:
        logs.close()
    return code


async def _serve(config: Config, host: str, port: int, workers: int) -> None:
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            nursery.start_soon(serve_alone, config, host, port, workers, stop)
            await signals.__anext__()
            stop.set()
    log.info("stopped")
