"""The same day, and inside SQLite one operation after the other fails, or the power does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import pytest

from tests.simulation.__main__ import judge
from tests.simulation.history import FailFile, FilePoint, History, Kill, Pause
from tests.simulation.test_every_fault import one, until_clean

pytestmark = pytest.mark.skipif(
    not re.search(r"/libsqlite3\.so", Path("/proc/self/maps").read_text()),
    reason="Python's SQLite is no shared library; its files cannot be watched",
)


@pytest.mark.parametrize(
    ("point", "how"),
    [
        ("file.open", "fails"),
        ("file.read", "fails"),
        ("file.write", "full"),
        ("file.write", "short"),
        ("file.sync", "fails"),
        ("file.truncate", "fails"),
    ],
)
def test_a_file_operation_that_fails_changes_nothing(
    point: FilePoint, how: Literal["fails", "full", "short"]
) -> None:
    assert until_clean(point, lambda nth: FailFile(point, nth, how), stride=6) >= 1


@pytest.mark.parametrize("power_fails", [False, True], ids=["kill", "power failure"])
@pytest.mark.parametrize("point", ["file.write", "file.sync"])
def test_a_daemon_that_ends_inside_a_write_keeps_what_was_acknowledged(
    point: FilePoint, power_fails: bool
) -> None:
    assert until_clean(point, lambda nth: Kill(point, nth, power_fails), stride=6) >= 10


@pytest.mark.parametrize("point", ["file.sync", "file.write"])
@pytest.mark.parametrize("times", [1, 2, 4])
def test_an_event_that_was_refused_does_not_come_back_after_a_crash(
    point: FilePoint, times: int
) -> None:
    for nth in range(1, 6):
        refused = (FailFile(point, nth, times=times), one("turn_end", 1, 3, 4), Kill())
        judge(History(1, {}, (one("turn_end", 0, 1, 2), *refused, Pause(1.0))))
