"""A thousand idle connections to the real daemon; `make idle` has five thousand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.daemons import running_daemon
from tests.hostile.idle import LIMITS, connections_possible, measure

CONNECTIONS = 1000


def test_idle_connections_cost_little_and_nothing_once_they_are_closed(tmp_path: Path) -> None:
    if not connections_possible(CONNECTIONS):
        pytest.skip(f"the hard limit of open files does not allow {CONNECTIONS} connections")
    with running_daemon(tmp_path, **LIMITS) as daemon:
        cost = measure(daemon, CONNECTIONS)
    assert cost.fds_after <= cost.fds_before
    assert cost.kib_each < 40
    # The median of three against that of six around them: the machine's own moods weigh little.
    assert cost.beside_ms < 2 * cost.alone_ms + 5
