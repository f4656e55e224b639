"""A real daemon with made-up agents, and a browser that looks at its page."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from tests.daemons import Daemon, free_port

CHROMIUM = shutil.which("chromium")

_FLAGS = [
    "--no-sandbox",  # as root, in a container, Chromium starts in no other way
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
_BATCH = 500


class Stage:
    """A daemon whose page is at `url`, and the agents that talk to it."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.token = environment.get("RAMAKV_AUTH_TOKEN", "")
        port = free_port()
        self.url = f"http://127.0.0.1:{port}/"
        listens = {"RAMAKV_ADMIN__LISTEN_ADDR": f"127.0.0.1:{port}"}
        self.daemon = Daemon(folder, **{**listens, **environment})
        bearer = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        self.http = httpx.Client(trust_env=False, timeout=60.0, headers=bearer)

    def start(self) -> None:
        self.daemon.start(wait=False)
        self.daemon.wait_until_answering()

    def end(self) -> None:
        self.http.close()
        self.daemon.kill()

    def send(self, *events: dict[str, Any]) -> None:
        """Send events, many in a request; each must be answered."""
        for start in range(0, len(events), _BATCH):
            reply = self.http.post(
                f"{self.daemon.url}/event", json=list(events[start : start + _BATCH])
            )
            assert reply.status_code == 200, reply.text

    def turn(self, session_id: str, chunks: list[str], *, stored: bool = True) -> None:
        """Play a turn: the engine computes the chunks, and the agent reports them."""
        if stored:
            self.store(chunks)
        self.send(turn_start(session_id), turn_end(session_id, chunks))

    def store(self, chunks: list[str]) -> None:
        url = self.daemon.environment["RAMAKV_LMCACHE_URL"]
        self.http.post(f"{url}/engine/store", json={"chunk_hashes": chunks}).raise_for_status()

    def read(self, path: str, **query: str) -> Any:
        return self.http.get(f"{self.url}api/{path}", params=query).json()


def turn_start(session_id: str) -> dict[str, Any]:
    return {"type": "turn_start", "session_id": session_id}


def turn_end(session_id: str, chunks: list[str]) -> dict[str, Any]:
    params = {"chunk_hashes": chunks}
    return {"type": "turn_end", "session_id": session_id, "kv_transfer_params": params}


@contextmanager
def running_stage(folder: Path, **environment: str) -> Iterator[Stage]:
    stage = Stage(folder, **environment)
    try:
        stage.start()
        yield stage
    finally:
        stage.end()


class Agents:
    """A handful of agents that share prefixes, and whose contexts grow from turn to turn."""

    def __init__(self, stage: Stage, seed: int = 1) -> None:
        self._stage = stage
        self._random = random.Random(seed)
        self.maps: dict[str, list[str]] = {}

    def hashes(self, count: int) -> list[str]:
        return [f"{self._random.getrandbits(63):x}" for _ in range(count)]

    def begin(self, kinds: tuple[str, ...] = ("review", "build", "docs", "triage")) -> None:
        """Let each kind of agent begin four sessions: one system prompt, one prompt a kind."""
        system = self.hashes(18)
        for kind in kinds:
            prompt = [*system, *self.hashes(self._random.randint(6, 12))]
            for number in range(1, 5):
                name = f"{kind}-{number}"
                own = self.hashes(self._random.randint(20, 140))
                self.maps[name] = [*prompt, *own]
                self._stage.turn(name, self.maps[name])

    def work(self, turns: int) -> None:
        """Let so many turns pass, one session's after another's."""
        for _ in range(turns):
            name = self._random.choice(list(self.maps))
            kept = self._random.randint(len(self.maps[name]) - 4, len(self.maps[name]))
            self.maps[name] = [*self.maps[name][:kept], *self.hashes(self._random.randint(0, 9))]
            self._stage.turn(name, self.maps[name])


def many_sessions(stage: Stage, sessions: int = 10_000) -> None:
    """Create sessions by the thousand: a common prefix, and a few chunks of their own."""
    prefix = [f"{n:x}" for n in range(1000, 1024)]
    stage.send(
        *(
            turn_end(f"session-{number:05}", [*prefix, *own(number)])
            for number in range(1, sessions + 1)
        )
    )


def own(number: int) -> list[str]:
    return [f"{number:x}{n:04x}" for n in range(8 + number % 40)]


@contextmanager
def open_browser() -> Iterator[Browser]:
    assert CHROMIUM is not None
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_FLAGS)
        try:
            yield browser
        finally:
            browser.close()


class Window:
    """One page, and what went wrong in it."""

    def __init__(self, browser: Browser, stage: Stage, **options: Any) -> None:
        self.stage = stage
        self.context: BrowserContext = browser.new_context(
            **{"locale": "en-US", "viewport": {"width": 1280, "height": 900}, **options}
        )
        self.context.set_default_timeout(15_000)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page: Page = self.context.new_page()
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.text} {message.location}")

    def open(self, fragment: str = "") -> Page:
        self.page.goto(f"{self.stage.url}{fragment}")
        return self.page

    @property
    def outside(self) -> list[str]:
        """Requests to anybody but the daemon."""
        return [url for url in self.requests if not url.startswith((self.stage.url, "data:"))]
