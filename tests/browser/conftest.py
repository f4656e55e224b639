"""Looks for complaints after each of these tests, which only `make test-browser` runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.browser.stage import Stage, Window

collect_ignore_glob = [] if os.environ.get("RAMAKV_BROWSER_TESTS") else ["test_*.py"]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from tests.browser.stage import open_browser

    with open_browser() as opened:
        yield opened


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    from tests.browser.stage import running_stage

    with running_stage(tmp_path) as running:
        yield running


@pytest.fixture
def look(browser: Any) -> Iterator[Callable[..., Window]]:
    """Opens windows; none may complain in its console, or ask anybody but the daemon."""
    from tests.browser.stage import Window

    windows: list[Window] = []

    def open_window(stage: Stage, **options: Any) -> Window:
        windows.append(Window(browser, stage, **options))
        return windows[-1]

    yield open_window
    complaints = [complaint for window in windows for complaint in window.complaints]
    outside = [url for window in windows for url in window.outside]
    for window in windows:
        window.context.close()
    assert not complaints
    assert not outside
