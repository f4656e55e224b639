"""What Hypercorn's classes are told, and what becomes of its own log lines."""

from __future__ import annotations

import time
from typing import Any

import structlog
from hypercorn.config import Config as HypercornConfig
from hypercorn.logging import Logger as HypercornLogger

_log = structlog.get_logger("ramakv.web")


class ServerConfig(HypercornConfig):
    """Hypercorn's settings. The date header is made once a second, not for each response."""

    include_server_header = False
    keep_alive_max_requests = 2**62  # no need to part from a client
    _made = (0, list[tuple[bytes, bytes]]())

    def __init__(self) -> None:
        self.logger_class = _Log

    def response_headers(self, protocol: str) -> list[tuple[bytes, bytes]]:
        """Return the headers that every response has."""
        second = int(time.time())
        if second != self._made[0]:
            self._made = second, super().response_headers(protocol)
        return self._made[1]


class _Log(HypercornLogger):
    """What is left of Hypercorn's own lines, those about the lifespan, in our log."""

    def __init__(self, config: HypercornConfig) -> None:
        self.access_logger = self.error_logger = None

    async def access(self, *args: object) -> None:
        """Log no accesses."""

    async def warning(self, message: str, *args: Any, **kwargs: Any) -> None:
        """Log that an app has no lifespan, which is its right."""
        _log.debug(message)

    async def exception(self, message: str, *args: Any, **kwargs: Any) -> None:
        """Log that an app failed in its lifespan."""
        _log.error(message, exc_info=True)
