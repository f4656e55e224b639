"""`ramakv event`: one event to a running daemon."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
import httpx

from ramakv.commands.daemon_client import no_answer, open_client


def run(
    type_: str,
    session_id: str | None,
    data: str | None,
    url: str,
    token: str | None,
    ca_file: str | None = None,
) -> int:
    """Send the event and print the reply; 0 if it says ok, 1 if not, 2 for bad usage."""
    event: dict[str, Any] = {"type": type_}
    if session_id is not None:
        event["session_id"] = session_id
    event |= _read_data(data)
    try:
        with open_client(url, token, ca_file) as client:
            reply = client.post("/event", json=event)
            envelope = reply.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        click.echo(f"ramakv: {no_answer(url, error)}", err=True)
        return 1
    except ValueError:
        click.echo(f"ramakv: {url} answered something that is not JSON", err=True)
        return 1
    click.echo(json.dumps(envelope, ensure_ascii=False, indent=2 if sys.stdout.isatty() else None))
    return 0 if isinstance(envelope, dict) and envelope.get("ok") else 1


def _read_data(data: str | None) -> dict[str, Any]:
    if data is None:
        return {}
    try:
        text = Path(data[1:]).read_text(encoding="utf-8") if data.startswith("@") else data
        fields = json.loads(text)
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"--data: {error}") from error
    if not isinstance(fields, dict):
        raise click.BadParameter("--data: expected a JSON object, such as '{\"fork_id\": 3}'")
    return fields
