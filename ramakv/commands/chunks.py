"""`ramakv chunks`: where each chunk of a session lies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import click
import httpx
import msgspec

from ramakv.commands.daemon_client import no_answer, open_client
from ramakv.commands.lmcache_output import printable
from ramakv.commands.lmcache_targets import (
    SCHEDULER_URL,
    open_inspector,
    parse_urls,
    refuse_one_process,
    run_trio,
)
from ramakv.config import DISK_LOCATION, HOT_LOCATION
from ramakv.errors import BackendError, BackendUnsupportedError

TIMEOUT_SECONDS = 15.0

_WORDS = {HOT_LOCATION: "hot", DISK_LOCATION: "on disk"}


class _Map(msgspec.Struct):
    chunk_hashes: list[str]


class _Reply(msgspec.Struct):
    ok: bool
    data: _Map | None = None
    error: str = ""


class _NoMapError(Exception):
    """The daemon gives no map; the message says why."""


def run(
    session_id: str,
    url: str,
    engine_url: str | None,
    token: str | None,
    ca_file: str | None = None,
    *,
    as_json: bool,
) -> int:
    """Print each chunk and where it lies; 0, or 1 where the daemon or LMCache fails."""
    (engine,) = parse_urls([engine_url or SCHEDULER_URL])
    try:
        chunks = _session_map(session_id, url, token, ca_file)
    except _NoMapError as error:
        click.echo(f"ramakv: {error}", err=True)
        return 1
    failed = False
    locations: dict[str, list[str]] | None = {}
    if chunks:
        try:
            locations = run_trio(partial(_query, engine, chunks))
        except BackendError as error:
            click.echo(f"ramakv: {engine}: {error}", err=True)
            locations, failed = None, True
    if as_json:
        click.echo(json.dumps(_report(session_id, chunks, locations), ensure_ascii=False))
    else:
        _show(chunks, locations)
    return 1 if failed else 0


def _session_map(session_id: str, url: str, token: str | None, ca_file: str | None) -> list[str]:
    event = {"type": "session_map", "session_id": session_id}
    try:
        with open_client(url, token, ca_file) as client:
            content = client.post("/event", json=event).content
        reply = msgspec.json.decode(content, type=_Reply)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _NoMapError(no_answer(url, error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _NoMapError(f"{url} does not answer as the daemon does: {error}") from error
    if not reply.ok or reply.data is None:
        raise _NoMapError(reply.error or f"{url} gives no reason")
    return reply.data.chunk_hashes


async def _query(engine: str, chunks: Sequence[str]) -> dict[str, list[str]] | None:
    """Return the locations of each chunk; None where this LMCache cannot tell."""
    await refuse_one_process(engine, TIMEOUT_SECONDS)
    async with open_inspector(engine, TIMEOUT_SECONDS) as target:
        try:
            return await target.memory_query(chunks)
        except BackendUnsupportedError:
            return None


def _report(
    session_id: str, chunks: Sequence[str], locations: dict[str, list[str]] | None
) -> dict[str, Any]:
    return {
        "session_id": session_id,
        "chunks": [
            {
                "chunk_hash": chunk,
                "locations": None if locations is None else locations.get(chunk, []),
            }
            for chunk in chunks
        ],
        "summary": None if locations is None else _counts(chunks, locations),
    }


def _counts(chunks: Sequence[str], locations: dict[str, list[str]]) -> dict[str, int]:
    """Count each chunk once, at the quickest place it lies."""
    counts = {"hot": 0, "disk": 0, "elsewhere": 0, "nowhere": 0}
    for chunk in chunks:
        held = locations.get(chunk, [])
        if HOT_LOCATION in held:
            counts["hot"] += 1
        elif DISK_LOCATION in held:
            counts["disk"] += 1
        else:
            counts["elsewhere" if held else "nowhere"] += 1
    return counts


def _show(chunks: Sequence[str], locations: dict[str, list[str]] | None) -> None:
    names = list(map(printable, chunks))
    digits, width = len(str(len(names))), max(map(len, names), default=0)
    lines = [
        f"{number:>{digits}}  {name:<{width}}  {_where(chunk, locations)}"
        for number, (chunk, name) in enumerate(zip(chunks, names, strict=True), 1)
    ]
    total = f"{len(chunks)} chunk{'' if len(chunks) == 1 else 's'}"
    if locations is None:
        lines.append(f"{total}; cannot tell where they lie")
    else:
        counts = _counts(chunks, locations)
        elsewhere = f"{counts['elsewhere']} elsewhere, " if counts["elsewhere"] else ""
        lines.append(
            f"{total}: {counts['hot']} hot, {counts['disk']} on disk, "
            f"{elsewhere}{counts['nowhere']} nowhere"
        )
    click.echo("\n".join(lines))


def _where(chunk: str, locations: dict[str, list[str]] | None) -> str:
    if locations is None:
        return "cannot tell"
    return ", ".join(_WORDS.get(place, printable(place)) for place in locations.get(chunk, [])) or (
        "nowhere"
    )
