"""What clients choose, and the log repeats, stays one line and steers no terminal."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from typing import Literal

import pytest
import structlog

from ramakv.logs import configure_logs


@pytest.fixture
def _logs_as_they_were() -> Iterator[None]:
    before = logging.root.handlers[:], logging.root.level
    yield
    structlog.reset_defaults()
    logging.root.handlers[:], logging.root.level = before


@pytest.mark.usefixtures("_logs_as_they_were")
@pytest.mark.parametrize("format_", ["console", "json"])
def test_an_id_cannot_forge_a_line_or_steer_a_terminal(
    format_: Literal["console", "json"],
) -> None:
    stream = io.StringIO()
    logs = configure_logs("info", format_, stream)
    name = "s\n2030-01-01 [info] stopped\r\x1b[2J\0\u202e"
    structlog.get_logger().info("idle session suspended", session_id=name, path="/é")
    logs.close()
    written = stream.getvalue()
    assert written.count("\n") == 1
    assert not set(written) & set("\r\x1b\0\u202e")
    assert "2030-01-01 [info] stopped" in written
