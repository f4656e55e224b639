"""What the client costs over bare httpx, and how many calls the embedded engine answers.

    .venv/bin/python -m bench.lmcache_client [--rounds 7]

The servers are processes of their own, on loopback. Calls that are compared alternate one by one;
each round has a median, and the table has the medians of the rounds. Prints Markdown, and JSON
with every round when told a file.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import trio
from quart_trio import QuartTrio

from ramakv.config import Embedded, Limits
from ramakv.lmcache.backend import fresh_lookup_id
from ramakv.lmcache.client import LMCacheClient
from ramakv.lmcache.embedded.serving import serve_engine
from ramakv.lmcache.operating import LMCacheOperator
from ramakv.web.server import open_sockets, serve_http

HOT = "LocalCPUBackend"
CHUNKS = 200
SESSIONS = 60
CONNECTIONS = 8
TIMEOUTS = {"connect_timeout_seconds": 5.0, "call_timeout_seconds": 60.0}

Done = Callable[[], Awaitable[object]]


def hashes(session: int) -> list[str]:
    """Return the chunks of a session, as a real LMCache writes them."""
    return [format((session * CHUNKS + i) * 0x9E3779B97F4A7C15 % 2**63, "x") for i in range(CHUNKS)]


ANSWERS: dict[str, Any] = {
    "/freeze/status": {"status": "success", "freeze": False, "message": "Freeze mode is disabled"},
    "/memory/query": {chunk: [HOT, "LocalDiskBackend"] for chunk in hashes(0)},
    "/memory/prefetch": {"status": "prefetch_started", "lookup_id": "a" * 32, "num_chunks": CHUNKS},
    "/memory/evict": {"status": "success", "num_evicted": CHUNKS},
}


# The servers


def serve_canned() -> None:
    """Answer each path always the same, on one connection after another: next to no work."""
    replies = {}
    for path, answer in ANSWERS.items():
        body = json.dumps(answer).encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        replies[path.encode()] = head.encode() + b"\r\n\r\n" + body
    trio.run(_serve_canned, replies)


async def _serve_canned(replies: dict[bytes, bytes]) -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    print(listeners[0].socket.getsockname()[1], flush=True)
    await trio.serve_listeners(partial(_answer, replies), listeners)


async def _answer(replies: dict[bytes, bytes], stream: trio.SocketStream) -> None:
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data = b""
    while True:
        while b"\r\n\r\n" not in data:
            more = await stream.receive_some(65536)
            if not more:
                return
            data += more
        head, data = data.split(b"\r\n\r\n", 1)
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line[15:])
        while len(data) < length:
            data += await stream.receive_some(65536)
        data = data[length:]
        await stream.send_all(replies[head.split(b" ", 2)[1]])


def serve_embedded() -> None:
    """Serve the embedded engine: a scheduler and one worker; print the scheduler's port."""
    with tempfile.TemporaryDirectory() as folder:
        trio.run(_serve_embedded, Path(folder))


async def _serve_embedded(folder: Path) -> None:
    async def serve(
        app: QuartTrio, host: str, port: int, *, task_status: trio.TaskStatus[int]
    ) -> None:
        sockets = open_sockets(f"{host}:{port}")
        async with trio.open_nursery() as nursery:
            serving = partial(serve_http, app, sockets, limits=Limits(), stop=trio.Event())
            await nursery.start(serving)
            task_status.started(sockets[0].getsockname()[1])

    async with trio.open_nursery() as nursery:
        serving = partial(serve_engine, disk_dir=folder, serve=serve)
        ports = await nursery.start(serving, "127.0.0.1", 0, 1, Embedded())
        print(ports[0], flush=True)


@contextmanager
def server(kind: str) -> Iterator[str]:
    """Run one of the servers as a process of its own; give its address."""
    command = [sys.executable, "-m", "bench.lmcache_client", "--serve", kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


# The client beside bare httpx


class Ways(NamedTuple):
    """The same call in three ways."""

    client: Done
    bytes_only: Done
    with_json: Done


def ways(
    http: httpx.AsyncClient, call: Done, method: str, path: str, body: dict[str, Any] | None
) -> Ways:
    content = None if body is None else json.dumps(body, separators=(",", ":")).encode()
    headers = None if body is None else {"content-type": "application/json"}

    async def bytes_only() -> object:
        return (await http.request(method, path, content=content, headers=headers)).content

    async def with_json() -> object:
        return (await http.request(method, path, json=body)).json()

    return Ways(call, bytes_only, with_json)


async def compare(url: str, rounds: int, calls: int) -> dict[str, list[list[float]]]:
    """Return seconds for each way in each round, by what is called."""
    chunks = hashes(0)
    found: dict[str, list[list[float]]] = defaultdict(list)
    bare = httpx.AsyncClient(
        base_url=url,
        timeout=httpx.Timeout(60.0),
        limits=httpx.Limits(max_connections=1, keepalive_expiry=2.0),
        trust_env=False,
        verify=False,
    )
    async with (
        bare as http,
        LMCacheClient(url, **TIMEOUTS, connections_max=1) as client,
        LMCacheOperator(url, **TIMEOUTS, connections_max=1) as operator,
    ):
        prefetched = {"chunk_hashes": chunks, "lookup_id": "a" * 32}
        evicted = {"chunk_hashes": chunks, "locations": [HOT]}
        query = {"chunk_hashes": chunks}
        table = {
            "GET /freeze/status": ways(
                http, operator.freeze_status, "GET", "/freeze/status", None
            ),
            "POST /memory/query": ways(
                http, partial(client.query, chunks), "POST", "/memory/query", query
            ),
            "POST /memory/prefetch": ways(
                http, partial(client.prefetch, chunks, "a" * 32), "POST", "/memory/prefetch",
                prefetched,
            ),
            "POST /memory/evict": ways(
                http, partial(client.evict, chunks, [HOT]), "POST", "/memory/evict", evicted
            ),
        }  # fmt: skip
        for number in range(rounds + 1):
            for name, three in table.items():
                times: list[list[float]] = [[], [], []]
                for turn in range(calls):
                    for step in range(3):
                        place = (turn + step) % 3  # each goes first, second and third
                        begins = time.perf_counter()
                        await three[place]()
                        times[place].append(time.perf_counter() - begins)
                if number:  # the first round warms up
                    found[name].append([statistics.median(each) for each in times])
    return found


# The embedded engine


async def rate(calls: list[Done]) -> float:
    """Make these calls over CONNECTIONS connections; return how many a second."""
    waiting = iter(calls)

    async def make() -> None:
        for call in waiting:
            await call()

    begins = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(CONNECTIONS):
            nursery.start_soon(make)
    return len(calls) / (time.perf_counter() - begins)


async def load_engine(url: str, rounds: int) -> dict[str, list[float]]:
    """Return calls per second in each round, by what is called."""
    sessions = [hashes(number) for number in range(SESSIONS)]
    found: dict[str, list[float]] = defaultdict(list)
    async with (
        httpx.AsyncClient(base_url=url, trust_env=False, verify=False, timeout=60.0) as http,
        LMCacheClient(url, **TIMEOUTS, connections_max=CONNECTIONS) as client,
    ):

        async def loaded() -> None:
            while True:
                counts = (await http.get("/engine/stats")).json()["prefetches"]
                if counts["started"] == counts["finished"]:
                    return
                await trio.sleep(0.01)

        def prefetches() -> list[Done]:
            return [partial(client.prefetch, chunks, fresh_lookup_id()) for chunks in sessions]

        evicts: list[Done] = [partial(client.evict, chunks, [HOT]) for chunks in sessions]
        queries: list[Done] = [partial(client.query, chunks) for chunks in sessions]
        for chunks in sessions:
            (await http.post("/engine/store", json={"chunk_hashes": chunks})).raise_for_status()
        await rate(evicts)
        for number in range(rounds + 1):
            figures = {"/memory/prefetch, chunks on disk": await rate(prefetches())}
            await loaded()
            answer = await client.query(sessions[-1])
            assert answer is not None
            assert all(HOT in locations for locations in answer.values())
            figures["/memory/prefetch, chunks hot"] = await rate(prefetches() * 4)
            await loaded()
            figures["/memory/query, chunks hot"] = await rate(queries * 4)
            figures["/memory/evict, chunks hot"] = await rate(evicts)
            if number:
                for name, figure in figures.items():
                    found[name].append(figure)
    return found


def time_reading(calls: int) -> dict[str, float]:
    """Return the seconds that it takes to read the answer to a query, as the client does it."""
    sent = json.dumps(ANSWERS["/memory/query"]).encode()
    kind = dict[str, list[str]]
    ways_to_read: dict[str, Callable[[], object]] = {
        "decode": lambda: msgspec.json.decode(sent),
        "decode, then check": lambda: msgspec.convert(msgspec.json.decode(sent), kind),
        "both in one": lambda: msgspec.json.decode(sent, type=kind),
    }
    return {
        name: min(timeit.repeat(read, number=calls, repeat=7)) / calls
        for name, read in ways_to_read.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=300, help="Calls in a round, of each way.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", choices=["canned", "embedded"])
    arguments = parser.parse_args()
    if arguments.serve:
        {"canned": serve_canned, "embedded": serve_embedded}[arguments.serve]()
        return
    with server("canned") as url:
        compared = trio.run(compare, url, arguments.rounds, arguments.calls)
    print("| call | client µs | httpx, bytes µs | ratio | httpx, JSON µs | ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, each in compared.items():
        client, plain, with_json = (statistics.median(column) for column in zip(*each, strict=True))
        to_bytes, to_json = (
            statistics.median(one[0] / one[place] for one in each) for place in (1, 2)
        )
        micros = (f"{seconds * 1e6:.0f}" for seconds in (client, plain, with_json))
        first, second, third = micros
        print(f"| {name} | {first} | {second} | {to_bytes:.2f} | {third} | {to_json:.2f} |")
    read = time_reading(arguments.calls)
    said = ", ".join(f"{name} {seconds * 1e6:.0f}" for name, seconds in read.items())
    print(f"\nReading the answer to a query of {CHUNKS} hashes, µs: {said}")
    with server("embedded") as url:
        loads = trio.run(load_engine, url, arguments.rounds)
    print("\n| call of 200 hashes | per second |\n| --- | --- |")
    for name, figures in loads.items():
        print(f"| {name} | {statistics.median(figures):.0f} |")
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps({"client": compared, "read": read, "engine": loads}, indent=1)
        )


if __name__ == "__main__":
    main()
