"""How a scheduler passes a call on to its workers: to all at once, inside this process.

A worker that fails or does not answer in time is named in the reply by its port; the others
have done the call all the same.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from http import HTTPStatus

import trio

from ramakv.errors import BackendUnavailableError
from ramakv.lmcache.embedded.calls import CALLS
from ramakv.lmcache.embedded.node import Node
from ramakv.lmcache.embedded.replies import RefusedError
from ramakv.lmcache.embedded.wedge import ObservedError

WORKER_SECONDS_MAX = 10.0
"""How long a worker may take."""

_log = logging.getLogger(__name__)


class WorkersFailedError(Exception):
    """Some workers did not do the call; each failure by port."""

    def __init__(self, failures: dict[str, dict[str, str]]) -> None:
        super().__init__(failures)
        self.failures = failures


async def forward(scheduler: Node, workers: Sequence[Node], path: str, data: bytes) -> object:
    """Return the first worker's answer when all have answered. Raises WorkersFailedError."""
    answers: dict[int, object] = {}
    failures: dict[int, str] = {}

    async def ask(position: int, worker: Node) -> None:
        with trio.move_on_after(WORKER_SECONDS_MAX):
            try:
                answers[position] = await _call(worker, path, data)
            except _FailedError as error:
                failures[position] = str(error)
            return
        failures[position] = "timed out"

    async with trio.open_nursery() as nursery:
        for position, worker in enumerate(workers):
            if scheduler.faults.draw_worker_failure():
                failures[position] = _status_text(500)
            else:
                nursery.start_soon(ask, position, worker)
    if failures:
        raise WorkersFailedError(
            {str(workers[i].port): {"error": failures[i]} for i in sorted(failures)}
        )
    return answers[0]


class _FailedError(Exception):
    """What a worker's status would be, as urllib words it."""


async def _call(worker: Node, path: str, data: bytes) -> object:
    try:
        await worker.enter()
        return await CALLS[path][1](worker, data)
    except RefusedError as error:
        raise _FailedError(_status_text(error.status)) from error
    except ObservedError as error:
        raise _FailedError(_status_text(500)) from error
    except BackendUnavailableError as error:
        raise _FailedError(_status_text(503)) from error
    except Exception as error:
        _log.error("worker %d cannot answer %s", worker.worker_id, path, exc_info=error)
        raise _FailedError(_status_text(500)) from error


def _status_text(status: int) -> str:
    return f"HTTP Error {status}: {HTTPStatus(status).phrase}"
