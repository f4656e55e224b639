"""`ramakv demo`: a daemon, an engine and a few agents in one process, with comments."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import trio
from rich.console import Console

from ramakv.config import HOT_LOCATION, Backend, Config, Embedded, Eviction, Log
from ramakv.errors import RamakvError
from ramakv.logs import configure_logs
from ramakv.service import open_service
from ramakv.web.event_app import create_event_app
from ramakv.web.server import open_sockets, serve_http, socket_urls

_SETTLE_SECONDS_MAX = 5.0
_LOOK_AGAIN_SECONDS = 0.02
_COUNTS = ("prefetch_count", "evicted_count", "fork_id", "sessions_count")


def run() -> int:
    """Show everything once; 0 if all of it came out as told."""
    logs = configure_logs("error")
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="ramakv-demo-") as folder:
        try:
            trio.run(_demo, Path(folder), console)
        except* (RamakvError, httpx.HTTPError, _UnexpectedError) as group:
            console.print(f"[red]the demo failed:[/] {group.exceptions[0]}")
            return_code = 1
        else:
            return_code = 0
    logs.close()
    return return_code


class _UnexpectedError(Exception):
    """Something did not come out as told."""


async def _demo(folder: Path, console: Console) -> None:
    config = _make_config(folder)
    console.print(f"A daemon with the embedded engine, in [bold]{folder}[/]\n")
    async with _daemon(config) as stage:
        tell = _Teller(console, stage)
        await _round_trip(tell)
        await _sharing(tell)
        await _fork(tell)
        await _suspend_and_restore(tell)
        await tell.send("turn_end", "night", hashes=["n-1", "n-2"])
        await tell.send("session_fork", "night")
    async with _daemon(config) as stage:
        await _after_restart(_Teller(console, stage))


async def _round_trip(tell: _Teller) -> None:
    tell.title("1. A turn: start, inference, end")
    await tell.send("turn_start", "s1", why="a new session has no chunks to bring up")
    await tell.store("h-a", "h-b", "h-c")
    await tell.send("turn_end", "s1", hashes=["h-a", "h-b", "h-c"], why="its map is on disk now")
    await tell.send("turn_start", "s1", why="its chunks are brought up before the next turn")
    await tell.send("session_close", "s1", why="nobody needs them: queued for eviction")
    await tell.expect_hot("after the close", [])


async def _sharing(tell: _Teller) -> None:
    tell.title("2. Two agents share a prefix")
    await tell.store("system", "tools", "alice", "bob")
    await tell.send("turn_end", "alice", hashes=["system", "tools", "alice"])
    await tell.send("turn_end", "bob", hashes=["system", "tools", "bob"])
    await tell.send("session_close", "alice", why="bob still uses system and tools")
    await tell.expect_hot(
        "alice's own chunk went, the shared ones stayed", ["system", "tools", "bob"]
    )
    await tell.send("session_close", "bob", why="the last reference goes, and the chunks with it")
    await tell.expect_hot("after both", [])


async def _fork(tell: _Teller) -> None:
    tell.title("3. A fork keeps what its parent drops")
    await tell.store("plan", "step-1", "step-2")
    await tell.send("turn_end", "parent", hashes=["plan", "step-1"])
    await tell.send("session_fork", "parent", child_session_id="child")
    await tell.send(
        "turn_end", "parent", hashes=["plan", "step-2"], why="step-1 is the child's too"
    )
    await tell.expect_hot("nothing was lost", ["plan", "step-1", "step-2"])
    await tell.send("session_fork_end", "parent", why="the child has its own references")
    await tell.send("session_close", "child", why="now nobody needs step-1")
    await tell.expect_hot("the parent's chunks", ["plan", "step-2"])
    await tell.send("session_close", "parent")
    await tell.expect_hot("after all", [])


async def _suspend_and_restore(tell: _Teller) -> None:
    tell.title("4. A pause: suspend, and come back")
    await tell.store("long-1", "long-2")
    await tell.send("turn_end", "sleeper", hashes=["long-1", "long-2"])
    await tell.send("session_suspend", "sleeper", why="memory is for those who work")
    await tell.expect_hot("the disk tier still has them", [])
    await tell.send("snapshot_restore", "sleeper", why="brought up again before the user is back")
    await tell.expect_hot("back from the disk tier", ["long-1", "long-2"])
    await tell.send("session_close", "sleeper")


async def _after_restart(tell: _Teller) -> None:
    tell.title("5. The daemon was stopped and started again")
    await tell.send("health", why="what was acknowledged is there")
    await tell.send("session_map", "night")
    ended = await tell.send("session_fork_end", "night", why="its fork survived, too")
    if not ended["matched"]:
        raise _UnexpectedError("the fork did not survive the restart")
    tell.end("Next: ramakv serve --backend embedded, and point your agents at POST /event.")


class _Stage:
    """Base addresses of what runs."""

    def __init__(self, http: httpx.AsyncClient, events_url: str, engine_url: str) -> None:
        self.http = http
        self.events_url = events_url
        self.engine_url = engine_url


class _Teller:
    """Sends events and says what happened, a line each."""

    def __init__(self, console: Console, stage: _Stage) -> None:
        self._console = console
        self._stage = stage
        self._chunks: list[str] = []

    def title(self, text: str) -> None:
        self._console.print(f"[bold cyan]{text}[/]")
        self._chunks = []

    def end(self, text: str) -> None:
        self._console.print(f"\n{text}")

    async def send(
        self,
        type_: str,
        session_id: str | None = None,
        *,
        hashes: list[str] | None = None,
        why: str = "",
        **fields: Any,
    ) -> Any:
        event: dict[str, Any] = {"type": type_, **fields}
        if session_id is not None:
            event["session_id"] = session_id
        if hashes is not None:
            event["kv_transfer_params"] = {"chunk_hashes": hashes}
        reply = await self._post(f"{self._stage.events_url}/event", event)
        if not reply["ok"]:
            raise _UnexpectedError(f"{type_} {session_id}: {reply['error']}")
        told = [*(hashes or []), *_told_by(reply["data"])]
        self._row(f"{type_} {session_id or ''}", " ".join(told), why)
        return reply["data"]

    async def store(self, *hashes: str) -> None:
        """Play the inference engine: it has computed these chunks."""
        self._chunks += hashes
        await self._post(f"{self._stage.engine_url}/engine/store", {"chunk_hashes": hashes})
        self._row("(engine stores)", " ".join(hashes), "")

    async def expect_hot(self, moment: str, expected: list[str]) -> None:
        """Wait until exactly these of the chunks stored so far are in the hot tier."""
        hot: list[str] = []
        with trio.move_on_after(_SETTLE_SECONDS_MAX):
            # Evicts and prefetches are asynchronous, and LMCache tells nobody when they are done.
            while (hot := await self._hot()) != expected:  # noqa: ASYNC110
                await trio.sleep(_LOOK_AGAIN_SECONDS)
        if hot != expected:
            raise _UnexpectedError(f"{moment}: hot are {hot}, expected {expected}")
        self._row("= hot tier", " ".join(hot) or "(empty)", moment)

    def _row(self, what: str, told: str, why: str) -> None:
        self._console.print(f"  [bold]{what:<25}[/]{told:<32} [green]{why}[/]", soft_wrap=True)

    async def _hot(self) -> list[str]:
        url = f"{self._stage.engine_url}/memory/query"
        where = await self._post(url, {"chunk_hashes": self._chunks})
        return [chunk for chunk in self._chunks if HOT_LOCATION in where[chunk]]

    async def _post(self, url: str, body: Any) -> Any:
        response = await self._stage.http.post(url, content=msgspec.json.encode(body))
        return response.json()


def _told_by(data: dict[str, Any]) -> list[str]:
    """What a reply says beyond that it was done."""
    told = [f"{name}={data[name]}" for name in _COUNTS if data.get(name)]
    return [*told, *data.get("chunk_hashes", [])]


def _make_config(folder: Path) -> Config:
    with socket.create_server(("127.0.0.1", 0)) as free:
        engine_port = free.getsockname()[1]
    return Config(
        listen_addr="127.0.0.1:0",
        lmcache_url=f"http://127.0.0.1:{engine_port}",
        session_store_path=str(folder / "sessions.db"),
        backend=Backend(kind="embedded"),
        eviction=Eviction(batch_age_seconds=0.05),
        embedded=Embedded(disk_dir=str(folder / "chunks")),
        log=Log(level="error"),
    )


@asynccontextmanager
async def _daemon(config: Config) -> AsyncIterator[_Stage]:
    sockets = open_sockets(config.listen_addr)
    stop = trio.Event()
    async with open_service(config) as service, trio.open_nursery() as nursery:
        app = create_event_app(service, config)
        await nursery.start(partial(serve_http, app, sockets, limits=config.limits, stop=stop))
        async with httpx.AsyncClient(trust_env=False, timeout=30.0) as http:
            yield _Stage(http, socket_urls(sockets)[0], config.lmcache_url)
        stop.set()
