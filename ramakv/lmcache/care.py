"""Care for a real LMCache: what to look at before calls, beside them, and after one timed out."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence

import structlog

from ramakv.core.topology import Condition, Finding, Level, Topology, judge
from ramakv.errors import BackendError
from ramakv.lmcache.client import LMCacheClient
from ramakv.lmcache.inspecting import LMCacheInspector
from ramakv.lmcache.survey import port_beside, survey

log = structlog.get_logger("ramakv.lmcache")

_NUMBER = r"(\d+(?:\.\d+)?(?:e\+\d\d)?)$"
_PINNED = re.compile(
    r"^lmcache:pin_monitor_pinned_objects_count(?:\{[^}]*\})? " + _NUMBER, re.MULTILINE
)
_STARTED = re.compile(r"^process_start_time_seconds " + _NUMBER, re.MULTILINE)
_PROBE_SECONDS = 3.0


class LMCacheCare:
    """Looks after the LMCache that a client speaks to. Asks only what changes nothing."""

    def __init__(self, client: LMCacheClient, url: str, *, timeout_seconds: float) -> None:
        self._client = client
        self._url = url
        self._timeout_seconds = timeout_seconds
        self._told: list[Finding] = []
        self._topology: Topology | None = None
        # What a restart changes: the id, unless it is configured, and when the process began.
        self._incarnation: dict[str, object] = {}

    async def check_first(self) -> bool:
        """Log what is found, each finding once; returns whether LMCache may be called."""
        found = await survey(self._url, timeout_seconds=self._timeout_seconds)
        findings = list(judge(found))
        for finding in findings:
            if finding not in self._told:
                level = logging.INFO if finding.level is Level.OK else logging.WARNING
                log.log(level, finding.what, found=finding.level.value, advice=finding.advice)
        self._told, self._topology = findings, found
        self._incarnation = {}
        self._is_another({"id": found.worker.settings.get("lmcache_instance_id")})
        if found.worker.use_mla:
            self._client.only_port_that_counts = port_beside(self._url, 1)
        return not any(finding.level is Level.FATAL for finding in findings)

    async def look(self) -> Condition:
        """See whether LMCache was restarted, and how many chunks prefetches hold in it."""
        worker = self._topology.worker.url if self._topology else self._url
        async with self._inspector(worker) as inspector:
            try:
                conf = await inspector.conf(["lmcache_instance_id"])
            except BackendError:
                return Condition(answers=False)
            try:
                metrics = await inspector.metrics()
            except BackendError:
                metrics = ""
        pinned, started = _PINNED.search(metrics), _STARTED.search(metrics)
        return Condition(
            restarted=self._is_another(
                {"id": conf.get("lmcache_instance_id"), "started": started and started[1]}
            ),
            held_chunks=int(float(pinned[1])) if pinned else None,
        )

    def _is_another(self, seen: Mapping[str, object]) -> bool:
        """Remember what was seen of the process; returns whether it is not the one known."""
        seen = {name: value for name, value in seen.items() if value is not None}
        known = self._incarnation
        self._incarnation = {**known, **seen}
        return any(name in known and known[name] != value for name, value in seen.items())

    async def find_wedged(self) -> Sequence[str]:
        """Return the ports that do not answer the simplest question: a restart is needed there."""
        urls = [self._url]
        if self._topology is not None and self._topology.next.answers:
            urls.append(self._topology.next.url)
        return [url for url in urls if not await self._answers(url)]

    async def _answers(self, url: str) -> bool:
        async with self._inspector(url, _PROBE_SECONDS) as inspector:
            try:
                await inspector.lmc_version()
            except BackendError as error:
                return error.status is not None  # a refusal is an answer
        return True

    def _inspector(self, url: str, timeout_seconds: float | None = None) -> LMCacheInspector:
        seconds = timeout_seconds or self._timeout_seconds
        return LMCacheInspector(
            url, connect_timeout_seconds=seconds, call_timeout_seconds=seconds, connections_max=1
        )
