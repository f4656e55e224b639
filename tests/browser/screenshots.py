"""Takes the pictures of the live page in docs/images: `make screenshots`."""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser

from tests.browser.stage import (
    Agents,
    Stage,
    Window,
    many_sessions,
    open_browser,
    running_stage,
    turn_end,
)
from tests.daemons import free_port

WIDE = {"width": 1280, "height": 880}
NARROW = {"width": 390, "height": 844}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    with open_browser() as browser:
        for scene in (at_work, at_scale, without_lmcache):
            with tempfile.TemporaryDirectory(prefix="ramakv-page-") as state:
                scene(browser, Path(state), folder)
    for path in sorted(folder.glob("page-*.png")):
        print(f"{path}  {path.stat().st_size // 1024} KiB")


def at_work(browser: Browser, state: Path, folder: Path) -> None:
    """A handful of agents; a session whose chunks lie in different places."""
    with running_stage(state, RAMAKV_EMBEDDED__HOT_CHUNKS_MAX="900") as stage:
        agents = Agents(stage)
        agents.begin()
        busy(agents, seconds=40)
        stage.send(
            {"type": "session_fork", "session_id": "build-2"},
            {"type": "session_suspend", "session_id": "triage-4"},
            {"type": "session_suspend", "session_id": "triage-3"},
            {"type": "turn_start", "session_id": "review-2"},
            {"type": "turn_start", "session_id": "docs-1"},
        )
        chunks = agents.maps.pop("build-2")  # rests, and its chunks leave the hot tier
        with working(agents):
            picture(browser, stage, folder / "page-light.png", whole=True)
            picture(
                browser, stage, folder / "page-dark-zh.png", color_scheme="dark", locale="zh-CN"
            )
            picture(browser, stage, folder / "page-narrow.png", viewport=NARROW)
        lost = agents.hashes(14)  # the engine never stored these
        stage.send(turn_end("build-2", [*chunks, *lost]))
        picture(browser, stage, folder / "page-session.png", fragment="#/session/build-2")


def at_scale(browser: Browser, state: Path, folder: Path) -> None:
    """10,000 sessions."""
    with running_stage(state, RAMAKV_BACKEND__KIND="noop") as stage:
        many_sessions(stage)
        picture(browser, stage, folder / "page-10000-sessions.png")


def without_lmcache(browser: Browser, state: Path, folder: Path) -> None:
    """LMCache is down: nothing listens there."""
    url = f"http://127.0.0.1:{free_port()}"
    with running_stage(state, RAMAKV_BACKEND__KIND="lmcache", RAMAKV_LMCACHE_URL=url) as stage:
        agents = Agents(stage)
        for number in range(40):
            stage.turn(f"agent-{number % 5}", agents.hashes(30), stored=False)
        time.sleep(8.0)
        picture(browser, stage, folder / "page-lmcache-down.png", whole=True)


@contextmanager
def working(agents: Agents) -> Iterator[None]:
    """Let agents work beside the block."""
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(0.05):
            agents.work(1)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        yield
    finally:
        stop.set()
        worker.join()


def busy(agents: Agents, seconds: float) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        agents.work(1)
        time.sleep(0.05)


def picture(
    browser: Browser,
    stage: Stage,
    path: Path,
    *,
    fragment: str = "",
    whole: bool = False,
    **options: Any,
) -> None:
    """Take what one sees at first, or the whole page, once it has shown a snapshot or two."""
    window = Window(browser, stage, **{"viewport": WIDE, **options})
    page = window.open(fragment)
    page.locator("#version:not(:empty)").wait_for()
    page.wait_for_timeout(2500)
    page.screenshot(path=path, full_page=whole)
    window.context.close()


if __name__ == "__main__":
    main()
