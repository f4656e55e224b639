"""What is to be sent when: the plan of an open loop, and of an agent load. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import cycle, islice
from typing import NamedTuple
from zlib import crc32

import msgspec

from bench.workload import Workload
from ramakv.commands.trace import Request, chunk_hash


class Item(NamedTuple):
    """One event to send."""

    due: float
    """Seconds after the start. Latency counts from here, however late it could be sent."""
    lane: str | None
    """Events of one lane go over one connection, each after the answer to the one before."""
    kind: str
    body: bytes


def due_times(rate: float, seconds: float) -> list[float]:
    """Return the intended start times of an open loop: evenly spaced."""
    return [number / rate for number in range(round(rate * seconds))]


def open_loop(workload: Workload, kind: str, rate: float, seconds: float, seed: int) -> list[Item]:
    """Plan events of one kind at a set rate, over all sessions in turn."""
    rng = random.Random(seed)
    sessions = cycle(workload.session_ids())
    return [
        Item(due, None, kind, workload.event(kind, session, rng))
        for due, session in zip(due_times(rate, seconds), sessions, strict=False)
    ]


def one_each(workload: Workload, kind: str, seed: int = 0) -> list[Item]:
    """Plan one event for each session, as fast as they are answered."""
    rng = random.Random(seed)
    return [
        Item(0.0, None, kind, workload.event(kind, session, rng))
        for session in workload.session_ids()
    ]


class Moment(NamedTuple):
    """An event of a trace, at its time."""

    at: float
    session: str
    kind: str
    hashes: list[int] | None = None


def moments(requests: Iterable[Request]) -> list[Moment]:
    """Return a trace's events in the order of their times; each session is closed at its end.

    A turn that begins before its session's last one has ended waits for it.
    """
    found: list[Moment] = []
    ends: dict[str, float] = {}
    for request in requests:
        begins = max(request.t, ends.get(request.session, 0.0))
        ends[request.session] = ended = begins + request.service_seconds()
        found.append(Moment(begins, request.session, "turn_start"))
        found.append(Moment(ended, request.session, "turn_end", request.hashes))
    found.extend(Moment(ended, session, "session_close") for session, ended in ends.items())
    return sorted(found, key=lambda moment: moment.at)  # stable: a session's order stays


def agent_load(requests: Iterable[Request], speed: float | None, prefix: str) -> list[Item]:
    """Plan a trace, so many times faster than it was; None leaves out every pause.

    `prefix` begins the session ids: played again under another, the sessions are others.
    """
    found = []
    for at, session, kind, hashes in moments(requests):
        session_id = prefix + session
        event: dict[str, object] = {"type": kind, "session_id": session_id}
        if hashes is not None:
            event["kv_transfer_params"] = {"chunk_hashes": [chunk_hash(each) for each in hashes]}
        due = at / speed if speed else 0.0
        found.append(Item(due, session_id, kind, msgspec.json.encode(event)))
    return found


def synthetic_agents(sessions: int = 60, seed: int = 1) -> Iterator[Request]:
    """Yield a small agent load, in the order of time.

    Agents share a system prompt of 20 chunks, grow by 1 to 8 chunks a turn, and after 200 begin
    anew from a summary. Between turns they wait for a tool: mostly a second or so, at times a
    minute.
    """
    rng = random.Random(seed)
    requests = [each for number in range(sessions) for each in _agent(number, rng)]
    yield from sorted(requests, key=lambda request: request.t)


def _agent(number: int, rng: random.Random) -> Iterator[Request]:
    shared = list(range(20))
    fresh = iter(range((number + 1) * 1_000_000, (number + 2) * 1_000_000))
    at, hashes = rng.uniform(0, 120), shared
    for turn in range(1, rng.randint(8, 60)):
        if len(hashes) > 200:
            hashes = [*shared, *islice(fresh, 30)]
        hashes = [*hashes, *islice(fresh, rng.randint(1, 8))]
        seconds = rng.uniform(1, 12)
        stop = "tool_use" if rng.random() < 0.9 else "end_turn"
        tokens = 256 * len(hashes)
        yield Request(at, f"agent{number}", turn, tokens, 200, hashes, seconds, stop)
        at += seconds + (rng.expovariate(1.0) if rng.random() < 0.9 else rng.uniform(20, 90))


def lane_of(session: str, connections: int) -> int:
    """Return the connection that carries a session's events."""
    return crc32(session.encode()) % connections
