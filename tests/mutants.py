"""Break ramakv on purpose, one way at a time, and see that the tests notice.

python -m tests.mutants            all of them
python -m tests.mutants --only 3   the third

Each is applied to a copy of the tree. A mutant that survives is a hole in the tests.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SIMULATION = "tests/simulation"
_SECONDS_MAX = 600


@dataclass(frozen=True)
class Mutant:
    """A fault: what it is, the file, what stands there, and what stands there instead."""

    what: str
    file: str
    changes: Sequence[tuple[str, str]]
    tests: str = SIMULATION


MUTANTS = (
    Mutant(
        "a new reference does not withdraw the evict that waits",
        "ramakv/core/refcounts.py",
        [("withdrawn = self.evictions.withdraw_all(chunks)", "withdrawn = {}")],
    ),
    Mutant(
        "an event is answered before its commit",
        "ramakv/actors/steps.py",
        [("generation = await pending.committed.wait()", "generation = 0")],
    ),
    Mutant(
        "forks are forgotten at a restart",
        "ramakv/service.py",
        [("for fork in stored.state.forks:", "for fork in ():")],
    ),
    Mutant(
        "chunks are released before that is durable",
        "ramakv/actors/steps.py",
        [
            (
                "        self._pending = pending\n",
                "        self._pending = pending\n"
                "        await around.refcount.settle(owner, acquired=(), released=step.release, "
                "forgotten=(), generation=0, scope=step.scope)\n",
            ),
            (
                "released=step.release,\n                forgotten",
                "released=(),\n                forgotten",
            ),
        ],
    ),
    Mutant(
        "a prefetch that failed is sent again",
        "ramakv/actors/backend.py",
        [
            (
                '            self._judge(error, "prefetch", permit)\n',
                '            self._judge(error, "prefetch", permit)\n'
                "            self._lane.add(job)\n",
            )
        ],
    ),
    Mutant(
        "the outbox is skipped",
        "ramakv/store/store.py",
        [("if write.outbox:", "if False:")],
    ),
    Mutant(
        "a failed commit keeps what was acquired for it",
        "ramakv/actors/steps.py",
        [
            (
                "await refcount.undo(pending.owner, step.acquire, step.release)\n            raise",
                "raise",
            )
        ],
    ),
    Mutant(
        "a prefetch does not wait for the evict of its chunk",
        "ramakv/actors/backend.py",
        [("return not self._refcount.is_in_flight(chunks) and", "return")],
    ),
    Mutant(
        "an evict does not wait for the prefetch of its chunk",
        "ramakv/actors/backend.py",
        [("take(now, self._lane.chunks, flush", "take(now, (), flush")],
    ),
    Mutant(
        "suspended sessions hold references again after a restart",
        "ramakv/service.py",
        [("counts.load(stored.state.active_map)", "counts.load(stored.state.chunk_map)")],
    ),
    Mutant(
        "a turn_start waits for LMCache as long as it takes",
        "ramakv/actors/router.py",
        [("move_on_after(self._config.backend.prefetch_ack_seconds)", "move_on_after(1e9)")],
    ),
    Mutant(
        "a restart of LMCache forgives what was released since",
        "ramakv/actors/backend.py",
        [("self._refcount.forgive(seen_at)", "self._refcount.forgive(math.inf)")],
    ),
    Mutant(
        "a commit whose sync failed is left in the WAL",
        "ramakv/store/database.py",
        [("            self._bury()\n", "")],
    ),
    Mutant(
        "fork numbers are used again after a restart",
        "ramakv/store/store.py",
        [("return found[0] + 1 if found else 1", "return 1")],
    ),
    Mutant(
        "a late turn_end brings a closed session back",
        "ramakv/core/session.py",
        [("return 0 <= now_ms - closed_ms <", "return False and 0 <= now_ms - closed_ms <")],
    ),
    Mutant(
        "an older seq is applied over a newer one",
        "ramakv/core/session.py",
        [("return seq is not None and state.seq", "return False and state.seq")],
    ),
    Mutant(
        "an evict that failed is not tried again",
        "ramakv/core/evictions.py",
        [("        self._push(batch, now + self._backoff(batch.tries))\n", "        pass\n")],
    ),
    Mutant(
        "an outbox row is deleted for a reference that may yet be undone",
        "ramakv/core/refcounts.py",
        [("if self._counts.count(chunk) > unsure:", "if self._counts.count(chunk):")],
        tests="tests/test_refcounts.py",
    ),
    Mutant(
        "one bad step takes its whole group along",
        "ramakv/actors/journal.py",
        [("isinstance(error, StoreFullError | StoreBusyError | StoreReadOnlyError)", "True")],
        tests="tests/test_journal.py",
    ),
    Mutant(
        "the sessions that a client names are not held to their limit",
        "ramakv/actors/router.py",
        [("if taken >= self._config.limits.sessions_max:", "if False:")],
        tests="tests/test_session_life.py tests/hostile/test_overload.py",
    ),
    Mutant(
        "a demotion takes what others reference",
        "ramakv/actors/errands.py",
        [("if references(chunk) == 1)", "if references(chunk) >= 1)")],
        tests="tests/simulation tests/test_residency.py",
    ),
    Mutant(
        "a demotion that waited goes on although the session's turn began",
        "ramakv/actors/errands.py",
        [("if self.stands(session_id)]", "]")],
        tests="tests/test_residency.py",
    ),
)


def apply(mutant: Mutant, tree: Path) -> None:
    """Change the file. Raises ValueError where what should stand there does not, once."""
    path = tree / mutant.file
    text = path.read_text(encoding="utf-8")
    for old, new in mutant.changes:
        if text.count(old) != 1:
            raise ValueError(f"{mutant.file} has {text.count(old)} times {old!r}, not once")
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


def caught_by(mutant: Mutant, tree: Path) -> str | None:
    """Return the first test that fails with a mutant; None: it survived."""
    original = (tree / mutant.file).read_text(encoding="utf-8")
    apply(mutant, tree)
    try:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, *mutant.tests.split()],
            cwd=tree,
            env={**os.environ, "RAMAKV_DONT_SHRINK": "1"},
            capture_output=True,
            text=True,
            timeout=_SECONDS_MAX,
            check=False,
        )
    finally:
        (tree / mutant.file).write_text(original, encoding="utf-8")
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if found is None and done.returncode != 0:
        raise RuntimeError(f"pytest could not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return found[1] if found else None


def main() -> int:
    """Try them, and say which test caught each; 1 if one survived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=int, help="number of one mutant, from 1")
    only = parser.parse_args().only
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in ("ramakv", "tests", "bench", "docs", "deploy"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        for file in ROOT.iterdir():
            if file.is_file():
                shutil.copy(file, tree)
        for number, mutant in enumerate(MUTANTS, 1):
            if only in (None, number):
                test = caught_by(mutant, tree)
                survived += test is None
                print(f"| {number} | {mutant.what} | {test or 'SURVIVED'} |", flush=True)
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
