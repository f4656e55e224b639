"""Whole histories, made up by Hypothesis, and what is needed to trust them."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.simulation.__main__ import judge, play_in_new_folder
from tests.simulation.history import Event, History, Kill, Pause, Restart, Send
from tests.simulation.strategies import histories
from tests.simulation.test_every_fault import ORDINARY_DAY

_PHASES = (Phase.generate, *([] if os.environ.get("RAMAKV_DONT_SHRINK") else [Phase.shrink]))
"""Making a failing history small takes minutes, which whoever only asks whether one fails saves."""


@settings(
    max_examples=30,
    deadline=None,
    database=None,
    derandomize=True,
    phases=_PHASES,
    suppress_health_check=list(HealthCheck),
)
@given(histories(60))
def test_whatever_happens_the_invariants_hold(history: History) -> None:
    judge(history)


def test_a_history_goes_the_same_way_each_time_in_any_process() -> None:
    rough = History(7, {}, (*ORDINARY_DAY[:9], Kill("commit.after", 2), *ORDINARY_DAY[9:]))
    command = [sys.executable, *rough.replay_line().split(" ", 4)[1:4]]
    text = rough.replay_line().split(" ", 4)[4].strip("'")
    stories = set()
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [*command, text],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        stories.add(re.sub("[0-9a-f]{32}", "lookup_id", done.stdout))
    assert len(stories) == 1
    assert stories.pop().rstrip().endswith("nothing wrong")


def test_a_history_survives_being_written_down() -> None:
    history = History(7, {"limits__sessions_max": 4}, ORDINARY_DAY)
    written = history.replay_line().split("replay ", 1)[1].strip("'")
    assert History.from_text(written) == history


@pytest.mark.parametrize("ending", [Restart(), Kill()])
def test_a_daemon_that_forgot_a_session_over_a_restart_would_be_noticed(
    ending: Restart | Kill, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ramakv.store.rows import Recovery

    monkeypatch.setattr(Recovery, "_read_forks", lambda self: {})
    fork = Send((Event("session_fork", 0),), waits=True)
    turn = Send((Event("turn_end", 0, (1, 2)),), waits=True)
    report = play_in_new_folder(History(1, {}, (turn, fork, ending, Pause(1.0))))
    assert any("after a start the counts" in violation for violation in report.violations)
