"""`ramakv top`: what a running daemon does, again and again, in a terminal."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from ramakv.commands.daemon_client import open_client
from ramakv.commands.operator_client import NoAnswer, ask
from ramakv.commands.top_view import render
from ramakv.web.snapshot import Snapshot

_PATH = "/api/overview"


def run(url: str, token: str | None, ca_file: str | None, interval: float, *, once: bool) -> int:
    """Show what the daemon does, until interrupted or, with `once`, one time.

    Returns 1 where it cannot be asked at first, or refuses.
    """
    with open_client(url, token, ca_file) as client:

        def read() -> Snapshot:
            return ask(client, url, _PATH, Snapshot)

        console = Console(highlight=False)
        try:
            first = read()
            if once or not console.is_terminal:
                _print(console, read, first, interval, once=once)
            else:
                _watch(console, read, first, interval)
        except NoAnswer as failed:
            click.echo(f"ramakv: {failed}", err=True)
            return 1
        except KeyboardInterrupt:
            return 0
    return 0


def _print(
    console: Console, read: Callable[[], Snapshot], found: Snapshot, interval: float, *, once: bool
) -> None:
    """Write plain text, for a file or another program; the lists are whole."""
    while True:
        console.print(render(found, console.width))
        if once:
            return
        Event().wait(interval)
        console.print()
        found = read()


def _watch(
    console: Console, read: Callable[[], Snapshot], found: Snapshot, interval: float
) -> None:
    """Fill the screen, and go on while the daemon is away: it may be restarting."""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(render(found, console.width), refresh=True)
            Event().wait(interval)
            while True:
                try:
                    found = read()
                    break
                except NoAnswer as failed:
                    if failed.is_final:
                        raise
                    live.update(Text(f"{failed}\n(trying again; Ctrl-C ends)"), refresh=True)
                    Event().wait(interval)
