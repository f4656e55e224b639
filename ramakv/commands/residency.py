"""`ramakv residency`: who stays in the hot tier, who does not, and why."""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ramakv.commands.daemon_client import open_client
from ramakv.commands.operator_client import NoAnswer, ask
from ramakv.commands.top_view import printable
from ramakv.web.residency_view import ResidencyRow, ResidencyView


def run(url: str, token: str | None, ca_file: str | None, count: int, *, as_json: bool) -> int:
    """Print how residency stands. Returns 1 where the daemon cannot be asked, or refuses."""
    import msgspec

    with open_client(url, token, ca_file) as client:
        try:
            found = ask(client, url, "/api/residency", ResidencyView)
        except NoAnswer as failed:
            click.echo(f"ramakv: {failed}", err=True)
            return 1
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
        return 0
    console = Console(highlight=False)
    for line in describe(found):
        console.print(Text(line))
    if found.sessions:
        console.print(_table(found.sessions[:count]))
        if len(found.sessions) > count:
            console.print(Text(f"and {found.sessions_known - count} more (--sessions N)"))
    return 0


def describe(found: ResidencyView) -> list[str]:
    """What there is to say before the sessions, line by line."""
    if found.why_off:
        return [f"policy {found.policy}: off, because {found.why_off}"]
    state = "in force" if found.in_force else "not in force: LRU does as well on the load of late"
    lines = [f"policy {found.policy}: {state}; the hot tier holds {found.hot_chunks_max:,} chunks"]
    if (duel := found.duel) is not None:
        lines.append(
            f"hot of what turns wanted, in shadow: sticky {duel.sticky_share:.1%}, "
            f"LRU {duel.lru_share:.1%}, over the last of {duel.turns:,} turns"
        )
    lines.append(f"{found.residents:,} of {found.sessions_known:,} sessions are in")
    done = ", ".join(f"{action} {count:,}" for action, count in found.done.items())
    lines.append(f"sessions so far: {done}")
    for reason, shares in found.pauses.items():
        over = ", ".join(f"{share:.0%} after {seconds}" for seconds, share in shares.items())
        lines.append(f"pauses after turns that stopped for {reason!r} are over: {over}")
    return lines


def _table(rows: list[ResidencyRow]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("session", "", "chunks", "paused", "hot", "why"):
        table.add_column(name, justify="right" if name in ("chunks", "paused", "hot") else "left")
    for row in rows:
        table.add_row(
            Text(printable(row.id)),
            row.seat,
            f"{row.chunks:,}",
            "" if row.paused_seconds is None else f"{row.paused_seconds:.0f} s",
            "" if row.hot_share is None else f"{row.hot_share:.0%}",
            Text(row.why),
        )
    return table
