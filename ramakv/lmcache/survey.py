"""Finds out what an LMCache is like, by questions that change nothing."""

from __future__ import annotations

from typing import TypeVar
from urllib.parse import urlsplit, urlunsplit

from ramakv.core.topology import EMBEDDED_MODEL, SETTINGS, Port, Topology, calls_itself
from ramakv.errors import BackendError, BackendRejectedError, BackendUnsupportedError
from ramakv.lmcache.inspecting import LMCacheInspector
from ramakv.lmcache.operating import LMCacheOperator

C = TypeVar("C", bound=LMCacheInspector)


async def survey(url: str, *, timeout_seconds: float, probe_routes: bool = True) -> Topology:
    """Ask the configured port and the next one; look for `/memory/*` where that is safe."""
    main, worker = await _port(url, timeout_seconds), await _port(_next(url), timeout_seconds)
    found = Topology(main, worker)
    if not probe_routes or not main.answers or calls_itself(found):
        return found
    return Topology(main, worker, await _has_memory_routes(url, timeout_seconds))


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


async def _has_memory_routes(url: str, timeout_seconds: float) -> bool | None:
    """Evict nothing: the refusal of an empty list tells that the route is there."""
    async with _open(LMCacheOperator, url, timeout_seconds) as operator:
        try:
            await operator.memory_evict([], [])
        except BackendUnsupportedError:
            return False
        except BackendRejectedError:
            return True
        except BackendError:
            return None
    return True


def _open(kind: type[C], url: str, timeout_seconds: float) -> C:
    return kind(
        url,
        connect_timeout_seconds=timeout_seconds,
        call_timeout_seconds=timeout_seconds,
        connections_max=1,
    )


def port_after(url: str) -> int:
    """The port after this one's, where the first worker listens."""
    return (urlsplit(url).port or 80) + 1


def _next(url: str) -> str:
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return urlunsplit(parts._replace(netloc=f"{host}:{port_after(url)}"))
