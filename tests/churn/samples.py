"""What a daemon takes up, seen from outside, and whether it goes on growing."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from ramakv.store.database import connect_for_reading

Sample = Mapping[str, float]

WARM_UP_SHARE = 0.2
MIB = 1024 * 1024

TABLES = {
    "sessions": "SELECT count(*) FROM sessions",
    "forks": "SELECT count(*) FROM forks",
    "closed": "SELECT count(*) FROM closed",
    "pins": "SELECT count(*) FROM pins",
    "outbox owed": "SELECT count(*) FROM outbox WHERE dead_reason IS NULL",
    "dead letters": "SELECT count(*) FROM outbox WHERE dead_reason IS NOT NULL",
    "set aside": "SELECT count(*) FROM set_aside",
}


def process_sample(pid: int, prefix: str = "") -> dict[str, float]:
    """Memory, open files and threads of a process."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return {
        f"{prefix}RSS MiB": int(status["VmRSS"].split()[0]) / 1024,
        f"{prefix}fds": len(os.listdir(f"/proc/{pid}/fd")),
        f"{prefix}threads": int(status["Threads"]),
    }


def store_sample(path: Path) -> dict[str, float]:
    """Size of the database and its log; rows of each table."""
    found = {
        "database MiB": path.stat().st_size / MIB,
        "WAL MiB": wal.stat().st_size / MIB if (wal := Path(f"{path}-wal")).exists() else 0.0,
    }
    with closing(connect_for_reading(path)) as database:
        for name, query in TABLES.items():
            (found[name],) = database.execute(query).fetchone()
    return found


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))] if values else 0.0


class Report:
    """Samples of a run; figures after warm-up, at the peak and at the end."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def add(self, sample: Sample) -> None:
        self.samples.append(sample)

    def start(self, name: str) -> float:
        return self.samples[0][name]

    def warm(self, name: str) -> float:
        """The median of the tenth of the run that follows the warm-up."""
        first = int(len(self.samples) * WARM_UP_SHARE)
        return self._median(name, first, first + max(3, len(self.samples) // 10))

    def peak(self, name: str) -> float:
        return max(sample[name] for sample in self.samples)

    def end(self, name: str) -> float:
        """The median of the last tenth of the run."""
        return self._median(name, -max(3, len(self.samples) // 10), None)

    def _median(self, name: str, first: int, last: int | None) -> float:
        return statistics.median(sample[name] for sample in self.samples[first:last])

    def table(self) -> str:
        lines = [f"{'':<20}{'start':>10}{'warm':>10}{'peak':>10}{'end':>10}"]
        for name in self.samples[0]:
            figures = [of(name) for of in (self.start, self.warm, self.peak, self.end)]
            lines.append(f"{name:<20}" + "".join(f"{figure:>10.4g}" for figure in figures))
        return "\n".join(lines)

    def judge(self, *, dead_letters_max: int, wal_bytes_max: int) -> list[str]:
        """Say what is not flat after the warm-up."""
        bounds: dict[str, tuple[Callable[[str], float], float]] = {
            "RSS MiB": (self.end, 1.1 * self.warm("RSS MiB")),
            "LMCache RSS MiB": (self.end, 1.1 * self.warm("LMCache RSS MiB")),
            # Pages are used again, so the file stays as large as it was in the longest outage.
            "database MiB": (self.end, 2.0 * self.warm("database MiB") + 1.0),
            "WAL MiB": (self.peak, wal_bytes_max / MIB),
            "dead letters": (self.peak, dead_letters_max),
            "set aside": (self.peak, 0),
            "fds": (self.end, self.warm("fds") + 8),
            "threads": (self.end, self.warm("threads") + 2),
            "sessions": (self.end, 1.5 * self.warm("sessions") + 50),
            "forks": (self.end, 1.5 * self.warm("forks") + 50),
            "closed": (self.end, 1.5 * self.warm("closed") + 50),
            "pins": (self.end, 1.5 * self.warm("pins") + 50),
        }
        return [
            f"{name}: {of(name):.4g}, expected at most {bound:.4g}"
            for name, (of, bound) in bounds.items()
            if name in self.samples[0] and of(name) > bound
        ]
