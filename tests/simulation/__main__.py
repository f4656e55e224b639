"""Play histories for as long as asked, or one again.

python -m tests.simulation soak --minutes 10
python -m tests.simulation replay '{"seed":…}'
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.simulation.history import History
from tests.simulation.strategies import histories
from tests.simulation.world import Report, play

_BATCH = 50
"""Histories made up from one seed."""


class FoundError(AssertionError):
    """A history that must not have gone as it went."""


def play_in_new_folder(history: History) -> Report:
    """Play a history where nothing of another is left."""
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        return play(history, Path(folder))


def _memory() -> str | None:
    """Return a folder in memory, where there is one: an fsync there costs nothing."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def judge(history: History) -> Report:
    """Play a history; raise FoundError, with the line that plays it again, for a violation."""
    report = play_in_new_folder(history)
    if report.violations:
        listed = "\n".join(report.violations[:20])
        raise FoundError(f"{listed}\nplay it again: {history.replay_line()}")
    return report


def soak(seconds: float, first_seed: int, steps_max: int) -> Counter[str]:
    """Play new histories until the time is over; what fails is made as small as possible."""
    counted: Counter[str] = Counter()
    ends = time.monotonic() + seconds
    number = first_seed
    while time.monotonic() < ends:

        @seed(number)
        @settings(
            max_examples=_BATCH,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(histories(steps_max))
        def batch(history: History) -> None:
            counted.update(judge(history).counted)
            counted["histories"] += 1

        try:
            batch()
        except BaseException:
            print(f"found with seed {number}", flush=True)
            raise
        number += 1
        left = max(0.0, ends - time.monotonic())
        print(f"seed {number}: {counted['histories']} histories, {left:.0f} s to go", flush=True)
    return counted


def main() -> int:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    soaking = commands.add_parser("soak")
    soaking.add_argument("--minutes", type=float, default=10.0)
    soaking.add_argument("--seed", type=int, default=random.randrange(2**32))
    soaking.add_argument("--steps", type=int, default=80)
    commands.add_parser("replay").add_argument("history")
    arguments = parser.parse_args()
    if arguments.command == "replay":
        report = play_in_new_folder(History.from_text(arguments.history))
        print("\n".join([*report.story, "", *(report.violations or ["nothing wrong"])]))
        return 1 if report.violations else 0
    counted = soak(arguments.minutes * 60, arguments.seed, arguments.steps)
    for what, number in sorted(counted.items()):
        print(f"{what}: {number}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
