"""The command: so many rounds, one line of result, and how to see a failure again."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

import trio

from tests.crash.campaign import Campaign


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--old-sessions", type=int, default=2000)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(Path(folder), arguments.seed, old_sessions=arguments.old_sessions)
        try:
            trio.run(campaign.run, arguments.rounds)
        except BaseException:
            done = campaign.rounds.total()
            print(
                f"failed in round {done + 1} of {arguments.rounds}; again: "
                f"python -m tests.crash --rounds {min(done + 1, arguments.rounds)} "
                f"--seed {arguments.seed} --old-sessions {arguments.old_sessions}",
                file=sys.stderr,
            )
            raise
    rounds = ", ".join(f"{kind} {count}" for kind, count in campaign.rounds.items())
    kills = ", ".join(f"{doing} {count}" for doing, count in sorted(campaign.kills.items()))
    print(
        f"rounds: {arguments.rounds} ({rounds}); killed: {kills}; "
        f"acknowledged: {campaign.acknowledged}, lost: 0; seed {arguments.seed}"
    )


if __name__ == "__main__":
    main()
