"""`ramakv serve`, counting its transactions in a file that others read while it runs.

    python -m bench.counted_daemon COUNTS serve …

The daemon tells its statistics to nobody outside. Counting here costs one addition for each
transaction, where strace stops the process twice for each system call and slows what it counts.
"""

from __future__ import annotations

import mmap
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ramakv.store.store import SessionWrite, Store, Write

_COUNTS = struct.Struct("=QQ")
_WAL_CYCLE = slice(12, 16)  # in the header of a write-ahead log: how often it began anew
FSYNCS_PER_WAL_CYCLE = 3  # checkpoint: the log, then the database; then the log's new header


class Counts(NamedTuple):
    """What a daemon did so far."""

    transactions: int
    commits: int
    wal_cycles: int = 0

    @property
    def fsyncs(self) -> int:
        """With synchronous = FULL: one in each transaction, and those of the checkpoints."""
        return self.transactions + FSYNCS_PER_WAL_CYCLE * self.wal_cycles


def create_counts(path: Path) -> None:
    """Make the file."""
    path.write_bytes(bytes(_COUNTS.size))


def read_counts(path: Path, database: Path) -> Counts:
    """Read what was counted, and how often SQLite's log began anew."""
    transactions, commits = _COUNTS.unpack(path.read_bytes())
    try:
        with database.with_name(database.name + "-wal").open("rb") as log:
            header = log.read(32)
    except FileNotFoundError:
        header = b""
    return Counts(transactions, commits, int.from_bytes(header[_WAL_CYCLE], "big"))


def main() -> None:
    from ramakv.cli import main as ramakv

    counts_path = sys.argv.pop(1)
    with open(counts_path, "r+b") as file, mmap.mmap(file.fileno(), _COUNTS.size) as shared:
        counts = memoryview(shared).cast("Q")
        commit = Store.commit

        def counted(self: Store, writes: Sequence[Write]) -> int:
            generation = commit(self, writes)
            counts[0] += 1
            counts[1] += sum(isinstance(write, SessionWrite) for write in writes)
            return generation

        Store.commit = counted  # type: ignore[method-assign]
        try:
            ramakv()
        finally:
            counts.release()


if __name__ == "__main__":
    main()
