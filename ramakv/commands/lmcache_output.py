"""What `ramakv lmcache` prints: a table for people, or one JSON object."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click
import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ramakv.errors import BackendError, BackendUnsupportedError

FIELDS_MAX = 6
"""Fields that become columns; with more, each is a row and each target a column."""
CELL_CHARS_MAX = 300
_WIDTH_OF_A_FILE = 1000

_NO_SUCH_API = re.compile(r"\bAPI (is )?unavailable")
_RECORD_SLOT_FAILED = "Failed to set record slot status"


@dataclass(slots=True)
class Outcome:
    """What came of asking one target: an answer, or an error."""

    url: str
    answer: Any = None
    error: BackendError | None = None

    @property
    def has_answered(self) -> bool:
        """Whether it did what was asked."""
        return self.error is None and not self._refused_settings

    @property
    def is_elsewhere(self) -> bool:
        """Whether it failed only because a process of its role has no such thing."""
        error = self.error
        if error is None:
            return False
        if isinstance(error, BackendUnsupportedError):
            return True
        if error.status == 503:
            return _NO_SUCH_API.search(error.error) is not None
        # LMCache 0.4.4's scheduler has no engine to log slots of, and says it so.
        return error.error == _RECORD_SLOT_FAILED and "'NoneType' object" in error.detail

    @property
    def _refused_settings(self) -> bool:
        errors = getattr(self.answer, "errors", None)
        return isinstance(errors, dict) and bool(errors)

    def as_json(self) -> dict[str, Any]:
        """The answer, or the error, as an object."""
        if self.error is None:
            return _fields(self.answer)
        report: dict[str, Any] = {"error": str(self.error), "status": self.error.status}
        if self.error.failures:
            report["failures"] = self.error.failures
        return report


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """0: at least one did what was asked, and to the others it does not apply; else 1."""
    done = any(outcome.has_answered for outcome in outcomes)
    return 0 if done and all(o.has_answered or o.is_elsewhere for o in outcomes) else 1


def show(outcomes: Sequence[Outcome], *, as_json: bool) -> None:
    """Print what came of each target, in this order."""
    if as_json:
        click.echo(
            json.dumps({outcome.url: outcome.as_json() for outcome in outcomes}, ensure_ascii=False)
        )
        return
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH_OF_A_FILE  # nobody's window: nothing is to be wrapped
    console.print(_table(outcomes))


def _table(outcomes: Sequence[Outcome]) -> Table:
    rows = [
        outcome.as_json() if outcome.error is None else {"error": str(outcome.error)}
        for outcome in outcomes
    ]
    names = list(dict.fromkeys(name for row in rows for name in row))
    if "error" in names:
        names.append(names.pop(names.index("error")))
    cells = [[cell(row[name]) if name in row else "" for name in names] for row in rows]
    urls = [outcome.url for outcome in outcomes]
    if len(names) <= FIELDS_MAX:
        return _grid("target", names, urls, cells)
    return _grid("", urls, names, list(zip(*cells, strict=True)))


def _grid(
    corner: str, columns: Sequence[str], rows: Sequence[str], cells: Sequence[Sequence[str]]
) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (corner, *columns):
        table.add_column(Text(printable(name)), overflow="fold")
    for name, row in zip(rows, cells, strict=True):
        table.add_row(*map(Text, (printable(name), *row)))
    return table


def cell(value: Any) -> str:
    """Write a value in one line of at most so many characters."""
    match value:
        case str():
            text = printable(value)
        case []:
            text = "none"
        case list() if all(isinstance(item, str) for item in value):
            text = ", ".join(map(printable, value))
        case _:
            text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= CELL_CHARS_MAX else text[: CELL_CHARS_MAX - 1] + "…"


def printable(text: str) -> str:
    """Return text that cannot move the cursor of a terminal or change its colours."""
    return text if text.isprintable() else json.dumps(text)


def _fields(answer: Any) -> dict[str, Any]:
    """Return an answer as an object, without the fields that LMCache did not send."""
    fields: dict[str, Any] = msgspec.to_builtins(answer)
    if isinstance(answer, msgspec.Struct):
        for field in msgspec.structs.fields(answer):
            if fields[field.name] in (None, "", {}) and not field.required:
                del fields[field.name]
    return fields
