"""The closed loop: wrk, with events from a file."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bench.measure import CURVE_PERCENTILES, at
from bench.processes import LOAD_CORE, on_core
from bench.workload import Workload

SCRIPT = Path(__file__).parent / "events.lua"
SPARE_SECONDS = 30.0
STEADY_REQUESTS_MIN = 20
"""With fewer answers after the first wave, the rate is that of the whole time."""
MISSING = (
    "wrk is not installed. It makes the load: install the package `wrk` "
    "(Debian, Ubuntu: apt-get install wrk; Fedora: dnf install wrk; Homebrew: brew install wrk)"
)


class LoadError(Exception):
    """Load that could not be made, or was not answered as it should be."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one run of wrk sends, from a file of events' beginnings."""

    events: Path
    in_array: int = 0
    fresh: int = 0
    hash_chars: int = 64

    @property
    def events_per_request(self) -> int:
        return self.in_array or 1


@dataclass(frozen=True, slots=True)
class Loaded:
    """What one run of wrk saw. Latencies are of requests, in milliseconds."""

    requests: int
    per_second: float
    curve: list[float]

    @property
    def latencies(self) -> dict[str, float]:
        points = {"p50_ms": 50.0, "p99_ms": 99.0, "p999_ms": 99.9}
        return {name: at(self.curve, percent) for name, percent in points.items()}


def check_wrk() -> None:
    """Raise LoadError where there is no wrk, with what to install."""
    if shutil.which("wrk") is None:
        raise LoadError(MISSING)


def write_load(folder: Path, workload: Workload, kind: str, in_array: int = 0) -> Load:
    """Write the file of a workload's events of one kind."""
    path = folder / f"{kind}-{workload.sessions}.txt"
    if not path.exists():
        lines = (workload.beginning(kind, session) for session in workload.session_ids())
        path.write_text("\n".join(lines) + "\n")
    fresh = workload.changed if kind == "turn_end" else 0
    return Load(path, in_array, fresh, workload.hash_chars)


def command(url: str, load: Load, connections: int, seconds: int, seed: int) -> list[str]:
    """Return the command line of a run."""
    wrk = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "20s"]
    script: list[object] = [load.events, load.in_array, load.fresh, load.hash_chars // 8, seed]
    script += [",".join(map(str, CURVE_PERCENTILES)), connections]
    return [*wrk, "-s", str(SCRIPT), url, "--", *map(str, script)]


def parse(output: str) -> Loaded:
    """Read what `events.lua` wrote. Raises LoadError unless every answer was a good one."""
    counts = re.search(
        r"^BENCH requests (\d+) seconds ([\d.]+) not_200 (\d+) refused (\d+) broken (\d+)$",
        output,
        re.MULTILINE,
    )
    steady = re.search(r"^STEADY requests (\d+) seconds ([\d.]+)$", output, re.MULTILINE)
    points = re.search(r"^CURVE (.+)$", output, re.MULTILINE)
    if counts is None or steady is None or points is None:
        raise LoadError(f"wrk said nothing that can be read: {output[-500:]!r}")
    requests, seconds, *faults = counts.groups()
    not_200, refused, broken = map(int, faults)
    if not_200 or refused or broken:
        first = re.search(r"^REFUSAL (.*)$", output, re.MULTILINE)
        raise LoadError(
            f"{not_200} answers were not 200, {refused} not ok, {broken} never came"
            + (f"; the first: {first[1]}" if first and first[1] else "")
        )
    per_second = int(requests) / float(seconds)
    if int(steady[1]) >= STEADY_REQUESTS_MIN:
        per_second = int(steady[1]) / float(steady[2])
    return Loaded(int(requests), per_second, [float(point) for point in points[1].split()])


def start(url: str, load: Load, connections: int, seconds: int, seed: int) -> subprocess.Popen[str]:
    """Start a run; `finish` ends it."""
    return subprocess.Popen(
        on_core(LOAD_CORE, command(url, load, connections, seconds, seed)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], seconds: int) -> Loaded:
    """Wait for a run and read it. Raises LoadError."""
    try:
        output, _ = process.communicate(timeout=seconds + SPARE_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise LoadError(f"wrk did not end within {seconds + SPARE_SECONDS:g} s") from error
    finally:
        process.kill()
    return parse(output)


def run(url: str, load: Load, connections: int, seconds: int, seed: int) -> Loaded:
    """Run wrk once. Raises LoadError."""
    loaded = finish(start(url, load, connections, seconds, seed), seconds)
    if not loaded.requests:
        raise LoadError(f"not one request was answered in {seconds} s; try longer --seconds")
    return loaded
