"""Lookup clients and servers: which class the configuration asks for, and which there is. Pure."""

from __future__ import annotations

from typing import Literal

from ramakv.lmcache.embedded.conf import Conf

Role = Literal["scheduler", "worker"]


def client_name(conf: Conf) -> str:
    """Return the lookup client that the configuration asks for, with its wrappers."""
    if conf["enable_scheduler_bypass_lookup"]:
        name = "LMCacheBypassLookupClient"
    elif conf["enable_async_loading"]:
        name = "LMCacheAsyncLookupClient"
    else:
        name = "LMCacheLookupClient"
    ratio = conf["hit_miss_ratio"]
    if ratio is not None and 0 <= ratio <= 1:
        name = f"HitLimitLookupClient({name})"
    if conf["enable_chunk_statistics"]:
        name = f"ChunkStatisticsLookupClient({name})"
    return name


def server_name(conf: Conf) -> str:
    """Return the lookup server that the configuration asks for."""
    return "LMCacheAsyncLookupServer" if conf["enable_async_loading"] else "LMCacheLookupServer"


class Lookup:
    """The lookup client of a scheduler, or the server of a worker; a lone engine has both.

    A changed configuration takes effect when they are created again.
    """

    def __init__(self, conf: Conf, role: Role, *, has_engine: bool) -> None:
        """Create what the role asks for."""
        self._conf = conf
        self._has_engine = has_engine
        self.role = role
        self.client: str | None = None
        self.server: str | None = None
        self.counts_chunks = False
        self.create()

    @property
    def kind(self) -> str:
        """What the role manages."""
        return "client" if self.role == "scheduler" else "server"

    @property
    def current(self) -> str | None:
        """What there is, of the kind that the role manages."""
        return self.client if self.role == "scheduler" else self.server

    @property
    def planned(self) -> str:
        """What `create` would create."""
        return client_name(self._conf) if self.role == "scheduler" else server_name(self._conf)

    def create(self) -> str:
        """Create, or replace, by the configuration of now. Return what was created."""
        if self.role == "scheduler":
            self.client = client_name(self._conf)
        if self._has_engine:
            self.server = server_name(self._conf)
        self.counts_chunks = bool(self._conf["enable_chunk_statistics"])
        return self.planned

    def close(self) -> str | None:
        """Close what there is, and return it."""
        old = self.current
        self.client = self.server = None
        self.counts_chunks = False
        return old
