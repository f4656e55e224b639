"""Events per second and latency of the daemon, at 1, 16 and 64 connections.

    .venv/bin/python -m bench.first_figures [--seconds 4] [--rounds 5]

Needs wrk, and strace for the fsyncs. wrk runs on core 1, the daemon where it likes: it has a
thread for SQLite beside its own. Kinds and connection counts alternate, round after round; the
table has medians. Prints Markdown, and JSON with every single run when told a file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.daemons import Daemon

KINDS = ("turn_end", "turn_start", "health")
CONNECTIONS = (1, 16, 64)
SCRIPT = Path(__file__).parent / "events.lua"


def load(url: str, kind: str, connections: int, seconds: float) -> dict[str, Any]:
    """Run wrk once."""
    command = ["taskset", "-c", "1", "wrk", "-t1", f"-c{connections}", f"-d{seconds}s"]
    done = subprocess.run(
        [*command, "-s", str(SCRIPT), url, "--", kind], capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(re.findall(r"^JSON (.*)$", done.stdout, re.MULTILINE)[0])
    assert not found["not_200"], done.stdout
    assert not found["errors"], done.stdout
    return found | {"per_second": found["requests"] / found["seconds"]}


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def fsyncs_per_turn_end(daemon: Daemon, seconds: float) -> float:
    """Count the fsyncs of the daemon while 64 connections send turn_end."""
    assert daemon.process is not None
    counted = Path(tempfile.mkdtemp()) / "strace"
    watched = ("-e", "trace=fsync,fdatasync", "-p", str(daemon.process.pid))
    tracer = subprocess.Popen(
        ["strace", "-f", "-c", "-o", str(counted), *watched], stderr=subprocess.PIPE
    )
    assert tracer.stderr is not None
    tracer.stderr.readline()  # it says when it is attached
    found = load(daemon.url, "turn_end", 64, seconds)
    tracer.send_signal(2)
    tracer.wait(30)
    calls = re.findall(
        r"^\s*[\d.]+\s+[\d.]+\s+\d+\s+(\d+).*f(?:data)?sync$", counted.read_text(), re.M
    )
    return sum(map(int, calls)) / found["requests"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    runs: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        daemon = Daemon(Path(folder), RAMAKV_BACKEND__KIND="noop")
        daemon.start()
        try:
            assert daemon.process is not None
            for number in range(arguments.rounds):
                for connections in CONNECTIONS:
                    for kind in KINDS:
                        before = cpu_seconds(daemon.process.pid)
                        run = load(daemon.url, kind, connections, int(arguments.seconds))
                        used = cpu_seconds(daemon.process.pid) - before
                        run["cpu_us"] = used / run["requests"] * 1e6
                        runs[kind, connections].append(run)
                        line = f"round {number + 1} {kind} {connections}: {run['per_second']:.0f}/s"
                        print(line, file=sys.stderr)
            fsyncs = fsyncs_per_turn_end(daemon, 4) if shutil.which("strace") else None
        finally:
            daemon.kill()
    print("| event | connections | per second | p50 ms | p99 ms | CPU µs per event |")
    print("| --- | --- | --- | --- | --- | --- |")
    for (kind, connections), found in sorted(runs.items()):
        cells = [
            statistics.median(run[key] for run in found)
            for key in ("per_second", "p50_ms", "p99_ms", "cpu_us")
        ]
        shown = "{:.0f} | {:.1f} | {:.1f} | {:.0f}".format(*cells)
        print(f"| {kind} | {connections} | {shown} |")
    if fsyncs is not None:
        print(f"\nfsyncs per turn_end at 64 connections: {fsyncs:.3f}")
    if arguments.json:
        table = [{"kind": k, "connections": c, "runs": found} for (k, c), found in runs.items()]
        arguments.json.write_text(json.dumps({"runs": table, "fsyncs_per_turn_end": fsyncs}))


if __name__ == "__main__":
    main()
