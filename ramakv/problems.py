"""The last warnings and errors of the log, kept for operators who look at the page."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_KEPT = 50
_FACTS_MAX = 8
_CHARS_MAX = 300
_NOT_FACTS = {"event", "level", "timestamp", "exc_info", "stack_info", "exception"}
_LEVELS = {"warning", "error", "critical"}


class Problem(NamedTuple):
    """One line of the log, shortened."""

    at_ms: int
    level: str
    what: str
    facts: dict[str, str]


class Problems:
    """Keeps the last lines that say that something is wrong. Several threads may log."""

    def __init__(self) -> None:
        self._kept: deque[Problem] = deque(maxlen=_KEPT)

    @property
    def last(self) -> Sequence[Problem]:
        """The last ones, the newest first."""
        return tuple(reversed(self._kept))

    def note(self, _logger: object, _method: str, line: Any) -> Any:
        """Take a line in, as a processor of structlog does, if it says that something is wrong."""
        if line.get("level") in _LEVELS:
            self._kept.append(
                Problem(
                    int(time.time() * 1000),
                    line["level"],
                    str(line.get("event", ""))[:_CHARS_MAX],
                    _facts(line),
                )
            )
        return line


def _facts(line: Mapping[str, Any]) -> dict[str, str]:
    facts = [(key, value) for key, value in line.items() if key not in _NOT_FACTS]
    return {key: str(value)[:_CHARS_MAX] for key, value in facts[:_FACTS_MAX]}
