"""Logs: lines for people on a terminal, JSON for programs, and never a stall of the daemon.

A pipe that nobody reads blocks its writer once it is full; written from the event loop that
would stop the daemon. So a thread writes, out of a bounded queue; what does not fit is
dropped and counted.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
from typing import Any, Literal, TextIO

import structlog

from ramakv.problems import Problems

_LINES_MAX = 10_000
_FLUSH_SECONDS = 1.0
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class QueuedStream:
    """A text stream whose writes never block: a daemon thread makes them."""

    def __init__(self, stream: TextIO, lines_max: int = _LINES_MAX) -> None:
        self._stream = stream
        self._queue: queue.Queue[str | None] = queue.Queue(lines_max)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write_all, name="log", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        """Queue a text, or drop it where the reader is too far behind."""
        try:
            self._queue.put_nowait(text)
        except queue.Full:
            self._dropped += 1
        return len(text)

    def flush(self) -> None:
        """Do nothing: the thread flushes."""

    def close(self) -> None:
        """Write what is queued, for a moment at most."""
        try:
            self._queue.put(None, timeout=_FLUSH_SECONDS)
        except queue.Full:
            return
        self._thread.join(_FLUSH_SECONDS)

    def _write_all(self) -> None:
        while (text := self._queue.get()) is not None:
            dropped, self._dropped = self._dropped, 0
            try:
                if dropped:
                    self._stream.write(f"({dropped} log lines were dropped: nobody read them)\n")
                self._stream.write(text)
                if self._queue.empty():
                    self._stream.flush()
            except (OSError, ValueError):
                return  # nobody is there any more


class _Bridge(logging.Handler):
    """Brings lines of the standard library's logging (Quart's, the engine's) to the same place."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record as one of ours."""
        structlog.get_logger().log(
            record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info
        )


def _make_printable(_logger: object, _method: str, line: Any) -> Any:
    """Escape what would steer a terminal, or begin a line of its own: clients choose their ids."""
    for key, value in line.items():
        if isinstance(value, str) and not value.isprintable():
            line[key] = value.encode("unicode_escape").decode()
    return line


def configure_logs(
    level: str = "info",
    format_: Literal["auto", "console", "json"] = "auto",
    stream: TextIO | None = None,
    problems: Problems | None = None,
) -> QueuedStream:
    """Send all logs to `stream` (standard error); close the result at the end.

    `problems` keeps the last warnings and errors.
    """
    target = sys.stderr if stream is None else stream
    queued = QueuedStream(target)
    as_text = format_ == "console" or (format_ == "auto" and target.isatty())
    renderer: Any = (
        structlog.dev.ConsoleRenderer(
            colors=target.isatty(),
            pad_event_to=0,
            # Not the fancy one: it prints local variables, and with them what clients sent.
            exception_formatter=structlog.dev.plain_traceback,
        )
        if as_text
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            *([problems.note] if problems is not None else []),
            structlog.processors.TimeStamper(fmt="iso", utc=not as_text),
            _make_printable if as_text else structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(queued),  # type: ignore[arg-type]
        cache_logger_on_first_use=True,
    )
    # Of libraries only what is wrong: httpx, for one, has a line for each request.
    quiet = logging.INFO if level == "debug" else logging.WARNING
    logging.basicConfig(level=max(_LEVELS[level], quiet), handlers=[_Bridge()], force=True)
    return queued
