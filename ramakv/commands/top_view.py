"""What `ramakv top` shows: a snapshot of the daemon as lines of text, for any width."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ramakv.web.snapshot import LMCache, SessionRow, SharedChunks, Snapshot

_MIDDLE, _WIDE = 50, 70
"""From how many columns of the terminal on there is room for more columns of a table."""
_PROBLEMS_MAX = 3
_SHARED_MAX = 3

_STATES = {"in_turn": "in a turn", "paused": "paused"}
_NAMES = {"", "session", "shared from", "among others by"}
_LEVELS = {"warning": "yellow", "error": "red", "critical": "bold red"}


def render(found: Snapshot, width: int) -> Group:
    """Lay a snapshot out, what matters most first: a low terminal cuts off its end."""
    parts: list[RenderableType] = [_head(found), "", _counts(found), "", _rates(found, width)]
    if found.problems:
        parts += ["", *_problems(found, width)]
    if found.recent:
        parts += ["", _sessions(found.recent, width)]
    if found.shared and width >= _WIDE:
        parts += ["", _shared(found.shared, width)]
    return Group(*parts)


def _head(found: Snapshot) -> Text:
    state, style = ("LMCache is fine", "green")
    if found.lmcache.kind == "noop":
        state, style = ("no LMCache", "dim")
    elif found.lmcache.trouble:
        state, style = (found.lmcache.trouble, "bold red")
    return Text.assemble(
        ("ramakv ", "bold"),
        f"{found.version}  {found.phase} for {duration(found.up_seconds)}  ",
        (state, style),
    )


def _counts(found: Snapshot) -> Table:
    """Lines of figures, each with its name behind it."""
    sessions, chunks, evictions, store = found.sessions, found.chunks, found.evictions, found.store
    each = f"{chunks.references / chunks.referenced:.2f}" if chunks.referenced else "–"
    lines: dict[str, Sequence[tuple[object, str]]] = {
        "sessions": (
            (sessions.in_turn, "in a turn"),
            (sessions.paused, "paused"),
            (sessions.suspended, "suspended"),
            (sessions.awake, "awake"),
            (sessions.waiting, "requests wait"),
        ),
        "chunks": (
            (chunks.referenced, "referenced"),
            (each, "sessions each"),
            (chunks.evicting, "to be evicted"),
            *_hot(chunks.hot_share),
        ),
        "evictions": (
            (evictions.waiting, "wait"),
            (evictions.in_flight, "in flight"),
            (duration(evictions.oldest_seconds), "the oldest"),
            (evictions.done, "done"),
            (evictions.withdrawn, "withdrawn"),
            (evictions.retried, "retried"),
            (evictions.dead_letters, "dead letters"),
        ),
        **_lmcache(found.lmcache),
        "store": (
            (f"{store.commits_per_second:.0f}", "commits/s in"),
            (f"{store.transactions_per_second:.0f}", "transactions/s"),
            (store.waiting, "wait"),
            (store.failed, "failed"),
        ),
    }
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, figures in lines.items():
        table.add_row(Text(name, style="cyan"), _figures(figures))
    return table


def _hot(share: float | None) -> Sequence[tuple[object, str]]:
    return [] if share is None else [(f"{share:.0%}", "hot when a turn began")]


def _lmcache(found: LMCache) -> dict[str, Sequence[tuple[object, str]]]:
    if found.kind == "noop":
        return {}
    figures: list[tuple[object, str]] = [(found.breaker, "breaker")]
    if found.tokens is not None:
        figures.append((f"{found.tokens:.0f} of {found.burst}", "calls at once"))
    if found.held is not None:
        most = f" of {found.held_max}" if found.held_max else ""
        figures.append((f"{found.held}{most}", "prefetched chunks unused"))
    if found.paused:
        figures.append(("yes", "prefetching paused by an operator"))
    prefetches = [(count, name) for name, count in found.prefetches.items()]
    return {"prefetches": prefetches, "LMCache": figures}


def _figures(figures: Iterable[tuple[object, str]]) -> Columns:
    """Put figures side by side, and in rows where there is no room."""
    return Columns(
        [Text.assemble((str(value), "bold"), f" {what}") for value, what in figures],
        padding=(0, 3, 0, 0),
    )


def _rates(found: Snapshot, width: int) -> Table:
    """Events by type, then calls to LMCache."""
    named = {"all events": found.events}
    named |= {rate.name or "not an event": rate for rate in found.by_type}
    named |= {f"call {rate.name}": rate for rate in found.lmcache.calls if rate.ok or rate.failed}
    rows = [
        (
            name,
            f"{rate.per_second:.1f}",
            duration(rate.p99),
            duration(rate.p50),
            f"{rate.ok}",
            f"{rate.failed}",
        )
        for name, rate in named.items()
    ]
    columns = {"": 0, "a second": 0, "p99": 0, "p50": _MIDDLE, "ok": _WIDE, "not ok": _WIDE}
    return _table(columns, rows, width)


def _sessions(sessions: Sequence[SessionRow], width: int) -> Table:
    rows = []
    for row in sessions:
        state = _STATES.get(row.state, row.state)
        if row.turn_seconds is not None and width >= _WIDE:
            state = f"{state}, {duration(row.turn_seconds)}"
        idle = duration(row.idle_seconds)
        rows.append((row.id, state, f"{row.chunks}", idle, f"{row.turns}", f"{row.forks}"))
    columns = {"session": 0, "state": 0, "chunks": 0, "idle": _MIDDLE, "turns": _WIDE}
    return _table({**columns, "forks": _WIDE}, rows, width)


def _shared(groups: Sequence[SharedChunks], width: int) -> Table:
    rows = [
        (group.first, ", ".join(group.sessions), f"{group.chunks}", f"{group.references}")
        for group in groups[:_SHARED_MAX]
    ]
    return _table({"shared from": 0, "among others by": 0, "chunks": 0, "held": 0}, rows, width)


def _problems(found: Snapshot, width: int) -> Iterator[Text]:
    for problem in found.problems[:_PROBLEMS_MAX]:
        at = datetime.fromtimestamp(problem.at_ms / 1000).astimezone()
        facts = "  ".join(f"{key}={value}" for key, value in problem.facts.items())
        text = Text.assemble(
            f"{at:%H:%M:%S} ",
            (printable(problem.what), _LEVELS.get(problem.level, "default")),
            (f"  {printable(facts)}" if facts else "", "dim"),
        )
        text.truncate(width, overflow="ellipsis")
        yield text


def _table(columns: Mapping[str, int], rows: Sequence[Sequence[str]], width: int) -> Table:
    """Make a table of the columns that there is room for; names give way to figures."""
    chosen = [name for name, least in columns.items() if width >= least]
    rows = [[printable(cell) for cell in row[: len(chosen)]] for row in rows]
    widths = [max(map(len, column)) for column in zip(chosen, *rows, strict=True)]
    is_name = [column in _NAMES for column in chosen]
    figures = sum(size for size, name in zip(widths, is_name, strict=True) if not name)
    room = (width - figures - 2 * len(chosen)) // sum(is_name)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="cyan")
    for column, name in zip(chosen, is_name, strict=True):
        table.add_column(
            column,
            justify="left" if name or column == "state" else "right",
            max_width=max(6, room) if name else None,
            no_wrap=True,
            overflow="ellipsis",
        )
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def duration(seconds: float | None) -> str:
    """Write a duration in the unit that fits: 0.4 ms, 12 ms, 3.5 s, 12 min, 3.2 h, 5.0 d."""
    if seconds is None:
        return "–"
    for unit, size, digits in (("d", 86400, 1), ("h", 3600, 1), ("min", 60, 0), ("s", 1, 1)):
        if seconds >= size:
            return f"{seconds / size:.{digits}f} {unit}"
    return "0 s" if seconds == 0 else f"{seconds * 1000:.{0 if seconds >= 0.01 else 1}f} ms"


def printable(text: str) -> str:
    """Escape what would steer the terminal: clients choose their ids."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()
