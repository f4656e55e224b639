"""Finds out what an LMCache is like, by questions that change nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import httpx

from ramakv.core.topology import EMBEDDED_MODEL, SETTINGS, Port, Topology, find_twin
from ramakv.errors import BackendError, BackendUnsupportedError
from ramakv.lmcache.inspecting import LMCacheInspector
from ramakv.lmcache.transport import Caller

C = TypeVar("C", bound=Caller)


async def survey(url: str, *, timeout_seconds: float) -> Topology:
    """Ask the configured port and the next one; look for `/memory/*` without a call to them."""
    main = await _port(url, timeout_seconds)
    worker = await _port(neighbour(url, 1), timeout_seconds)
    previous = None
    if main.role == "scheduler" and worker.role != "worker":
        previous = await _port(neighbour(url, -1), timeout_seconds)
    found = Topology(main, worker, previous=previous)
    if not main.answers or find_twin(found):
        return found
    async with _open(_RouteFinder, url, timeout_seconds) as finder:
        return replace(found, has_memory_routes=await finder.has("/memory/evict"))


async def _port(url: str, timeout_seconds: float) -> Port:
    async with _open(LMCacheInspector, url, timeout_seconds) as inspector:
        try:
            meta = await inspector.meta()
        except BackendUnsupportedError:
            return Port(url, answers=True)
        except BackendError as error:
            return Port(url, why_not=str(error))
        version: str | None = None
        settings = {}
        try:
            version = await inspector.lmc_version()
            if meta.model_name != EMBEDDED_MODEL:  # whose prefetches ask for no setting
                settings = await inspector.conf(SETTINGS)
        except BackendError:
            pass  # it answers, and says nothing of this
    return Port(
        url,
        answers=True,
        role=meta.role,
        version=version,
        model=meta.model_name,
        use_mla=bool(meta.use_mla),
        settings=settings,
    )


class _RouteFinder(Caller):
    """Finds out whether there is a route, without the call that it stands for."""

    async def has(self, path: str) -> bool | None:
        """Ask by the wrong method: a route that is there says so, and neither acts nor forwards."""
        try:
            reply = await self._call("GET", path)
        except BackendError:
            return None
        return {404: False, 405: True}.get(reply.status)


def _open(kind: type[C], url: str, timeout_seconds: float) -> C:
    return kind(
        url,
        connect_timeout_seconds=timeout_seconds,
        call_timeout_seconds=timeout_seconds,
        connections_max=1,
    )


def port_beside(url: str, distance: int) -> int:
    """The port so many further than this one's: 1 is where a scheduler's first worker listens."""
    return (httpx.URL(url).port or 80) + distance


def neighbour(url: str, distance: int) -> str:
    """The same address so many ports further; there need not be such a port."""
    return str(httpx.URL(url).copy_with(port=port_beside(url, distance))).rstrip("/")
