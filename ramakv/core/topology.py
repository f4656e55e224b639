"""What an LMCache must be like for ramakv to work with it, and what to do where it is not.

The facts behind the rules were observed on LMCache 0.4.4 with the routes of LMCache-Ascend.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


class Level(enum.StrEnum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"
    FATAL = "fatal"
    """No `/memory/*` call may be made."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing found, and what to do about it."""

    level: Level
    what: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Port:
    """What one port says of itself."""

    url: str
    answers: bool = False
    why_not: str = ""
    role: str | None = None
    version: str | None = None
    model: str | None = None
    use_mla: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Topology:
    """LMCache as found: the configured port, and the next one, where the first worker is."""

    main: Port
    next: Port
    has_memory_routes: bool | None = None
    """None: not asked, because asking could do harm, or because the answer says nothing."""
    previous: Port | None = None
    """The port before the configured one; asked only where the next is no worker."""

    @property
    def worker(self) -> Port:
        """The port of the first worker."""
        return self.main if self.main.role == "worker" or not self.next.answers else self.next


@dataclass(frozen=True, slots=True)
class Condition:
    """How a running LMCache is, as far as it tells."""

    answers: bool = True
    restarted: bool = False
    """It is another process than before: what was in its memory is gone."""
    held_chunks: int | None = None
    """Chunks that prefetches hold in its memory and nobody consumed; None: it does not say."""


EMBEDDED_MODEL = "ramakv-embedded"
"""What the embedded engine calls its model."""

SETTINGS = ("enable_async_loading", "use_layerwise", "local_cpu", "lmcache_instance_id")
"""Settings that the rules look at, and the id by which a restart shows."""


def find_twin(topology: Topology) -> Port | None:
    """Return the port that is the configured one's process again: a call would never end there.

    With one process for scheduler and worker (TP = 1), 0.4.4 serves both ports with one app:
    the port after the scheduler's says that it is the scheduler, too, and each call comes back
    to it. Either port may be the configured one.
    """
    if topology.main.role != "scheduler":
        return None
    beside = (topology.next, topology.previous)
    return next((port for port in beside if port and port.role == "scheduler"), None)


def judge(topology: Topology) -> Iterator[Finding]:
    """Say what is good and what is not, most important first."""
    main, worker = topology.main, topology.next
    if not main.answers:
        yield Finding(
            Level.PROBLEM,
            f"LMCache does not answer at {main.url}: {main.why_not}",
            "start it, or set lmcache_url to its scheduler's port; until then prefetches are "
            "skipped and evictions wait",
        )
        return
    yield Finding(Level.OK, f"LMCache {main.version or '(of unknown version)'} at {main.url}")
    if twin := find_twin(topology):
        yield Finding(
            Level.FATAL,
            f"{main.url} and {twin.url} are one process (both say role=scheduler): one call to "
            "/memory/* would forward to itself for ever",
            "run scheduler and workers as processes of their own (TP of 2 or more), or start "
            "ramakv with --backend noop",
        )
        return
    if main.role == "scheduler" and not worker.answers and main.model != EMBEDDED_MODEL:
        yield Finding(
            Level.PROBLEM,
            f"the scheduler answers, but no worker at {worker.url}: {worker.why_not}",
            "the scheduler forwards to the ports after its own; see that the workers are up",
        )
    elif main.role == "worker":
        yield Finding(
            Level.NOTE,
            f"{main.url} is a worker: other ranks, if there are any, are not reached",
            "set lmcache_url to the scheduler's port, one below the first worker's",
        )
    yield from _judge_routes(topology)
    yield from _judge_settings(topology.worker)


def _judge_routes(topology: Topology) -> Iterator[Finding]:
    if topology.has_memory_routes is False:
        yield Finding(
            Level.PROBLEM,
            f"{topology.main.url} has no /memory/* routes",
            "they come with LMCache-Ascend, and only where enable_chunk_hashes_return is true at "
            "the start of scheduler and workers",
        )
    elif topology.has_memory_routes:
        yield Finding(Level.OK, "it has the /memory/* routes")


def _judge_settings(port: Port) -> Iterator[Finding]:
    settings = port.settings
    if settings.get("enable_async_loading") is False:
        yield Finding(
            Level.PROBLEM,
            "enable_async_loading is false: prefetches are answered 200 and load nothing",
            "set it to true, and restart LMCache",
        )
    if settings.get("use_layerwise") is True:
        yield Finding(
            Level.PROBLEM,
            "use_layerwise is true: chunks are keyed by layer, so nothing is found or evicted",
            "set it to false, and restart LMCache",
        )
    if settings.get("local_cpu") is False:
        yield Finding(
            Level.PROBLEM,
            "local_cpu is false: there is no hot tier to bring chunks up to",
            "set it to true, and restart LMCache",
        )
    if port.use_mla:
        yield Finding(
            Level.NOTE,
            "the model uses MLA: ranks other than 0 fail at every forwarded call, and hold nothing",
        )
