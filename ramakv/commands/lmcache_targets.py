"""Which LMCache processes there are to ask, and which must not be asked for `/memory/*`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import click
import httpx
import trio

from ramakv.errors import BackendError, BackendUnavailableError, BackendUnsupportedError
from ramakv.lmcache.inspecting import LMCacheInspector
from ramakv.lmcache.operating import LMCacheOperator
from ramakv.lmcache.survey import neighbour, port_beside

T = TypeVar("T")

SCHEDULER_URL = "http://127.0.0.1:6999"
WORKERS_MAX = 64
"""Ports after the scheduler's that are searched for workers."""
PORT_MAX = 65535
PROBE_SECONDS_MAX = 5.0

_ROLE_SCHEDULER = "scheduler"
_ROLE_WORKER = "worker"


def run_trio(main: Callable[[], Awaitable[T]]) -> T:
    """Run it in an event loop of its own; Ctrl-C becomes click's Abort."""
    try:
        return trio.run(main)
    except BaseExceptionGroup as group:
        if group.subgroup(KeyboardInterrupt) is not None:
            raise click.Abort from group
        raise


def open_operator(url: str, timeout_seconds: float) -> LMCacheOperator:
    """Connect to one target."""
    return LMCacheOperator(
        url,
        connect_timeout_seconds=min(timeout_seconds, PROBE_SECONDS_MAX),
        call_timeout_seconds=timeout_seconds,
        connections_max=1,
    )


def parse_urls(urls: Sequence[str]) -> list[str]:
    """Return base addresses without repeats; raise BadParameter where one cannot be used."""
    return list(dict.fromkeys(map(_parse_url, urls)))


def _parse_url(text: str) -> str:
    try:
        url = httpx.URL(text)
        valid = (
            url.scheme == "http"
            and bool(url.host)
            and url.port != 0
            and (url.port or 80) <= PORT_MAX
        )
    except httpx.InvalidURL:
        valid = False
    if not valid or url.query or url.fragment:
        raise click.BadParameter(f"expected http://host:port, got {text!r}")
    return text.rstrip("/")


async def find_targets(
    urls: Sequence[str], timeout_seconds: float, *, first_only: bool = False
) -> list[str]:
    """Return the addresses to ask: those that are given, else scheduler and workers here."""
    if first_only:
        return [urls[0] if urls else SCHEDULER_URL]
    return list(urls) or [SCHEDULER_URL, *await _find_workers(timeout_seconds)]


async def _find_workers(timeout_seconds: float) -> list[str]:
    """Return the workers on the ports after the scheduler's, up to the first that is none.

    A worker that takes connections and answers nothing is one all the same: it hangs.
    """
    probe_seconds = min(timeout_seconds, PROBE_SECONDS_MAX)
    urls = []
    for distance in range(1, WORKERS_MAX + 1):
        url = _neighbour(SCHEDULER_URL, distance)
        if url is None or not await _is_listening(url, probe_seconds):
            break
        urls.append(url)
    is_lmcache = dict.fromkeys(urls, False)

    async def probe(url: str) -> None:
        is_lmcache[url] = await _is_lmcache(url, probe_seconds)

    async with trio.open_nursery() as nursery:
        for url in urls:
            nursery.start_soon(probe, url)
    found = []
    for url in urls:
        if not is_lmcache[url]:
            break
        found.append(url)
    return found


async def _is_listening(url: str, timeout_seconds: float) -> bool:
    parts = httpx.URL(url)
    try:
        with trio.fail_after(timeout_seconds):
            stream = await trio.open_tcp_stream(parts.host, parts.port or 80)
    except (OSError, trio.TooSlowError):
        return False
    await stream.aclose()
    return True


async def _is_lmcache(url: str, timeout_seconds: float) -> bool:
    try:
        async with open_operator(url, timeout_seconds) as target:
            await target.lmc_version()
    except BackendUnsupportedError:
        return False
    except BackendUnavailableError as error:
        # Another service says something else, with 200 or not in HTTP; a hung worker, nothing.
        return error.status != 200 and not isinstance(error.__cause__, httpx.ProtocolError)
    except BackendError:
        return True
    return True


async def refuse_one_process(url: str, timeout_seconds: float) -> None:
    """Raise BackendError where a `/memory/*` call to this target would never end.

    Where LMCache 0.4.4 runs scheduler and worker in one process, both ports answer as scheduler,
    and the one forwards to itself for ever. Nothing tells so but the role of the port beside it.
    """
    seconds = min(timeout_seconds, PROBE_SECONDS_MAX)
    role = await _role(url, seconds)
    if role == _ROLE_WORKER:
        return
    after, before = _neighbour(url, 1), _neighbour(url, -1)
    if after is not None:
        try:
            role_after = await _role(after, seconds)
        except BackendError as error:
            if isinstance(error.__cause__, trio.TooSlowError | httpx.TimeoutException):
                raise BackendError(
                    f"not sent: {after} does not say its role ({error}), and if scheduler and "
                    "worker are one process, the call would never end; ask a worker by --url"
                ) from error
            role_after = None
        _refuse_two_schedulers(url, after, role_after)
    if before is not None and role == _ROLE_SCHEDULER:
        try:
            role_before = await _role(before, seconds)
        except BackendError:
            role_before = None
        _refuse_two_schedulers(url, before, role_before)


def _refuse_two_schedulers(url: str, other: str, role_of_other: str | None) -> None:
    if role_of_other == _ROLE_SCHEDULER:
        raise BackendError(
            f"not sent: {url} and {other} both answer as scheduler, so they are one process, and "
            "a /memory call would be forwarded to itself until LMCache is restarted"
        )


async def _role(url: str, timeout_seconds: float) -> str | None:
    """Return the role of a process; None where it answers, and does not say."""
    async with open_inspector(url, timeout_seconds) as target:
        try:
            return (await target.meta(["role"])).role
        except BackendError as error:
            if error.status is None:
                raise
            return None


def open_inspector(url: str, timeout_seconds: float) -> LMCacheInspector:
    """Connect to one target, only to look."""
    return open_operator(url, timeout_seconds)


def _neighbour(url: str, distance: int) -> str | None:
    """Return the address so many ports further, if there is such a port."""
    return neighbour(url, distance) if 0 < port_beside(url, distance) <= PORT_MAX else None
