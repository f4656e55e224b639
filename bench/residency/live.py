"""What residency takes of the daemon's CPU: part of a trace, in real time, over real HTTP.

    .venv/bin/python -m bench.residency.live TRACE [--share 0.02] [--skip 2000] [--requests 1500]

For each policy there is a daemon and an embedded engine, each a process of its own, and an agent
that plays the same requests to both. All policies run side by side, so that what else the machine
does is the same for them: of the figures, trust ratios.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec

from bench.processes import (
    LOAD_CORE,
    SERVER_CORE,
    cpu_seconds,
    free_port,
    python,
    running,
    wait_until_ready,
)
from bench.residency import trace as traces
from bench.residency.costs import MODELS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--share", type=float, default=0.02, help="of the trace's distinct blocks")
    parser.add_argument("--policies", default="off,sticky,auto")
    parser.add_argument("--skip", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--set", action="append", default=[], metavar="RAMAKV_KEY=VALUE")
    given = parser.parse_args()
    trace = traces.load(given.trace)
    hot = trace.capacity(given.share)
    read_seconds = MODELS["8b"].disk_seconds(trace.block_tokens)
    with tempfile.TemporaryDirectory(prefix="ramakv-live-") as name, ExitStack() as stack:
        folder = Path(name)
        part = folder / "part.jsonl"
        turns = trace.turns[given.skip : given.skip + given.requests]
        part.write_bytes(msgspec.json.Encoder().encode_lines(turn.request for turn in turns))
        more = dict(entry.split("=", 1) for entry in given.set)
        policies = given.policies.split(",")
        pairs = {
            policy: begin(stack, folder / policy, policy, hot, read_seconds, more)
            for policy in policies
        }
        before = {policy: cpu_seconds(pid) for policy, (pid, _, _) in pairs.items()}
        agents = [
            subprocess.Popen(
                python(
                    *("ramakv", "replay", str(part), "--speed", "1"),
                    *("--url", daemon, "--engine-url", engine),
                ),
                stdout=subprocess.DEVNULL,
            )
            for _, daemon, engine in pairs.values()
        ]
        for agent in agents:
            agent.wait()  # not 0 where sessions that began before the part were asked for
        used = {policy: cpu_seconds(pid) - before[policy] for policy, (pid, _, _) in pairs.items()}
    for policy, seconds in used.items():
        each = 1e6 * seconds / (2 * given.requests)
        print(f"{policy}: {each:.0f} µs of CPU an event, {seconds / used[policies[0]]:.3f}")


def begin(
    stack: ExitStack,
    folder: Path,
    policy: str,
    hot_chunks: int,
    read_seconds: float,
    more: dict[str, str],
) -> tuple[int, str, str]:
    """Start an engine and a daemon; returns the daemon's process, and where both listen."""
    folder.mkdir()
    daemon_port, engine_port = free_port(), free_port()
    engine_url, url = f"http://127.0.0.1:{engine_port}", f"http://127.0.0.1:{daemon_port}"
    log = folder / "log"
    engine = {
        "RAMAKV_EMBEDDED__HOT_CHUNKS_MAX": str(hot_chunks),
        "RAMAKV_EMBEDDED__DISK_READ_SECONDS": str(read_seconds),
        "RAMAKV_EMBEDDED__CHUNK_BYTES": "1",
        "RAMAKV_EMBEDDED__DISK_DIR": str(folder / "chunks"),
    }
    daemon = {
        "RAMAKV_LISTEN_ADDR": f"127.0.0.1:{daemon_port}",
        "RAMAKV_ADMIN__LISTEN_ADDR": f"127.0.0.1:{free_port()}",
        "RAMAKV_LMCACHE_URL": engine_url,
        "RAMAKV_SESSION_STORE_PATH": str(folder / "sessions.db"),
        "RAMAKV_STORE__SYNCHRONOUS": "NORMAL",
        "RAMAKV_RESIDENCY__POLICY": policy,
        "RAMAKV_RESIDENCY__HOT_CHUNKS_MAX": str(hot_chunks),
        **more,
    }
    serve = python("ramakv", "lmcache", "serve", "--port", str(engine_port))
    stack.enter_context(running(serve, LOAD_CORE, log, engine))
    wait_until_listening(engine_port)
    process = stack.enter_context(running(python("ramakv", "serve"), SERVER_CORE, log, daemon))
    wait_until_ready(process, f"{url}/event", log)
    return process.pid, url, engine_url


def wait_until_listening(port: int) -> None:
    """Wait for the engine. Raises TimeoutError."""
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError(f"nobody listens on port {port}")


if __name__ == "__main__":
    main()
