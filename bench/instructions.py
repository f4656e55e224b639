"""What an event costs in instructions, which no neighbour of this machine changes; needs valgrind.

    .venv/bin/python -m bench.instructions [--kind turn_end] [--in-array 32] [--sessions 512]

Each session gets one event to wake up and one that is counted, by valgrind's callgrind. Prints
thousands of instructions for each event, by library. What the kernel does is not in them, and
copying in libc counts for too much: callgrind takes each byte of a long copy for an instruction.
"""

from __future__ import annotations

import argparse
import http.client
import random
import re
import subprocess
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from bench import contenders
from bench.workload import KINDS, Workload
from bench.wrk import LoadError

CONNECTIONS, ARRAY_CONNECTIONS = 64, 16
PATIENCE_SECONDS = "600"  # valgrind takes fifty times as long


def requests(workload: Workload, kind: str, in_array: int, rng: random.Random) -> list[bytes]:
    """Return requests that have one event for each session."""
    events = [workload.event(kind, session, rng) for session in workload.session_ids()]
    if not in_array:
        return events
    arrays = range(0, len(events), in_array)
    return [b"[" + b",".join(events[start : start + in_array]) + b"]" for start in arrays]


def send(url: str, bodies: list[bytes], connections: int) -> None:
    """Send all of them over so many connections. Raises LoadError."""
    host, _, path = url.removeprefix("http://").partition("/")

    def send_some(first: int) -> None:
        connection = http.client.HTTPConnection(host, timeout=float(PATIENCE_SECONDS))
        with closing(connection):
            for body in bodies[first::connections]:
                connection.request("POST", f"/{path}", body)
                response = connection.getresponse()
                answer = response.read()
                if response.status != 200 or b'"ok":false' in answer:
                    raise LoadError(f"refused: {answer[:200]!r}")

    with ThreadPoolExecutor(connections) as pool:
        list(pool.map(send_some, range(connections)))


def count(kind: str, in_array: int, sessions: int, folder: Path) -> Counter[str]:
    """Return how many instructions the events took, by library."""
    workload, rng = Workload(sessions=sessions), random.Random(0)
    connections = ARRAY_CONNECTIONS if in_array else CONNECTIONS
    output = folder / "callgrind"
    valgrind = ["valgrind", "-q", "--tool=callgrind", "--instr-atstart=no"]
    settings = {
        "RAMAKV_LIMITS__EVENT_TIMEOUT_SECONDS": PATIENCE_SECONDS,
        "RAMAKV_LIMITS__BODY_TIMEOUT_SECONDS": PATIENCE_SECONDS,
        "RAMAKV_LIMITS__KEEP_ALIVE_SECONDS": PATIENCE_SECONDS,
        "RAMAKV_SESSIONS__PASSIVATE_SECONDS": PATIENCE_SECONDS,
    }
    under = [*valgrind, f"--callgrind-out-file={output}"]
    with contenders.daemon(folder / "daemon", sessions=workload, under=under, **settings) as ours:
        send(ours.url(kind), requests(workload, kind, in_array, rng), connections)
        _control("-i", "on", ours)
        send(ours.url(kind), requests(workload, kind, in_array, rng), connections)
        _control("-i", "off", ours)
    return by_library(output.read_text())


def by_library(callgrind: str) -> Counter[str]:
    """Read callgrind's format: lines of cost follow the library that they are of."""
    names: dict[str, str] = {}
    found: Counter[str] = Counter()
    library, is_callee = "", False
    for line in callgrind.splitlines():
        if line.startswith(("ob=", "cob=")):
            number, _, path = line.partition("=")[2].partition(" ")
            name = names.setdefault(number, Path(path).name)
            library = name if line.startswith("ob=") else library
        elif line.startswith("calls="):
            is_callee = True  # what the next line costs is counted where it is spent
        elif re.match(r"[\d+*-]", line):
            if not is_callee:
                found[library] += int(line.split()[1])
            is_callee = False
    return found


def _control(option: str, value: str, ours: contenders.Contender) -> None:
    command = ["callgrind_control", option, value, str(ours.pid)]
    subprocess.run(command, check=True, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=KINDS, default="turn_end")
    parser.add_argument("--in-array", type=int, default=0, help="events in a request")
    parser.add_argument("--sessions", type=int, default=512)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = count(given.kind, given.in_array, given.sessions, Path(folder))
    print(f"{given.kind}: {found.total() / given.sessions / 1000:.0f} thousand instructions each")
    for library, cost in found.most_common(6):
        print(f"{cost / given.sessions / 1000:8.0f}  {library}")


if __name__ == "__main__":
    main()
