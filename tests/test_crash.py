"""SIGKILL at every stage of the daemon's life; `make crash` does it for longer."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.crash.campaign import KINDS

ROOT = Path(__file__).parent.parent


def test_kill_9_at_any_stage_loses_nothing_acknowledged() -> None:
    rounds = len(KINDS) + 1  # the last one at work again, after what the others left
    command = [sys.executable, "-m", "tests.crash", "--rounds", f"{rounds}", "--old-sessions", "50"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.findall(r"acknowledged: (\d+)", done.stdout)[0]) > 20
