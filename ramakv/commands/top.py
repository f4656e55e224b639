"""`ramakv top`: what a running daemon does, again and again, in a terminal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Event

import click
import httpx
import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from ramakv.commands.daemon_client import no_answer, open_client
from ramakv.commands.top_view import printable, render
from ramakv.web.snapshot import Snapshot

_PATH = "/api/overview"
_decode = msgspec.json.Decoder(Snapshot).decode


class _Failed(Exception):  # noqa: N818 - said in one line, and may pass
    """There is no snapshot; `is_final`: nor will there be one."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


def run(url: str, token: str | None, ca_file: str | None, interval: float, *, once: bool) -> int:
    """Show what the daemon does, until interrupted or, with `once`, one time.

    Returns 1 where it cannot be asked at first, or refuses.
    """
    with open_client(url, token, ca_file) as client:

        def read() -> Snapshot:
            return _read(client, url)

        console = Console(highlight=False)
        try:
            first = read()
            if once or not console.is_terminal:
                _print(console, read, first, interval, once=once)
            else:
                _watch(console, read, first, interval)
        except _Failed as failed:
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
                except _Failed as failed:
                    if failed.is_final:
                        raise
                    live.update(Text(f"{failed}\n(trying again; Ctrl-C ends)"), refresh=True)
                    Event().wait(interval)


def _read(client: httpx.Client, url: str) -> Snapshot:
    try:
        reply = client.get(_PATH)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _Failed(no_answer(url, error)) from error
    if reply.status_code == 401:
        raise _Failed(
            "the daemon wants a token: give it with --token, or in RAM_A_KV_AUTH_TOKEN",
            is_final=True,
        )
    if reply.status_code == 503:
        raise _Failed(_reason(reply))
    if reply.status_code != 200:
        raise _Failed(
            f"{url} answered {reply.status_code}: {_reason(reply)}; is it the address for "
            "operators (admin.listen_addr), and not that for events?",
            is_final=True,
        )
    try:
        return _decode(reply.content)
    except msgspec.DecodeError as error:
        raise _Failed(
            f"{url} answered something else than this version of ramakv expects: {error}",
            is_final=True,
        ) from error


def _reason(reply: httpx.Response) -> str:
    with suppress(ValueError, KeyError, TypeError):
        return printable(str(reply.json()["error"]))
    return reply.reason_phrase or "nothing said"
