"""On what, and of what, the figures were taken."""

from __future__ import annotations

import os
import platform
import re
import sqlite3
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGES = ("ramakv", "trio", "hypercorn", "h11", "quart", "quart-trio", "msgspec", "httpx")


def describe(data: Path) -> dict[str, Any]:
    """Return machine, versions and commit; `data` is where the databases lie."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 1_000_000,
        "kernel": platform.release(),
        "filesystem": _filesystem(data),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "wrk": _first_line(["wrk", "--version"]),
        "packages": {name: version(name) for name in PACKAGES},
        "load_before": os.getloadavg()[0],
    }


def _first_line(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    return (done.stdout or done.stderr).partition("\n")[0].partition(" Copyright")[0]


def _commit() -> str:
    commit = _first_line(["git", "rev-parse", "--short=12", "HEAD"])
    return commit + ("" if not _first_line(["git", "status", "--porcelain"]) else ", changed")


def _cpu() -> str:
    found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def _filesystem(path: Path) -> str:
    """Return the kind of filesystem: on one in memory an fsync costs nothing."""
    mounts = (line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines())
    real = str(path.resolve())
    fitting = [(where, kind) for where, kind in mounts if real.startswith(where)]
    return max(fitting, key=lambda mount: len(mount[0]))[1] if fitting else "unknown"
