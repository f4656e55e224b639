"""The embedded engine on its own: a scheduler on one port and its workers on the next ones.

The HTTP server is given by the caller: it belongs to a higher layer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import trio
from quart_trio import QuartTrio

from ramakv.config import Embedded
from ramakv.lmcache.embedded.app import create_scheduler_app, create_worker_app
from ramakv.lmcache.embedded.disk import RunSync
from ramakv.lmcache.embedded.engine import open_engine
from ramakv.lmcache.embedded.node import Node


class ServeApp(Protocol):
    """Serves an app on a host and port, 0 being a free one, until it is told to stop."""

    async def __call__(
        self, app: QuartTrio, host: str, port: int, *, task_status: trio.TaskStatus[int]
    ) -> None:
        """Say which port it is as soon as clients are let in, then serve."""
        ...


class Nodes(NamedTuple):
    """A scheduler and its workers."""

    scheduler: Node
    workers: Sequence[Node]

    def apps(self) -> list[QuartTrio]:
        """Return the scheduler's app and those of the workers."""
        workers = [create_worker_app(worker) for worker in self.workers]
        return [create_scheduler_app(self.scheduler, self.workers), *workers]


@asynccontextmanager
async def open_nodes(
    config: Embedded,
    *,
    disk_dir: Path,
    workers: int | None = None,
    port_start: int = 6999,
    run_sync: RunSync = trio.to_thread.run_sync,
) -> AsyncIterator[Nodes]:
    """Open an engine for each worker, and a scheduler in front of them.

    One worker has its files in `disk_dir`, several have a folder each in it (`worker-0`, …),
    and the same in the remote tier's folder. Raises ConfigError when a folder cannot be used.
    """
    count = config.workers if workers is None else workers
    async with AsyncExitStack() as stack:
        nodes: list[Node] = []
        for worker_id in range(count):
            folder, remote_dir = disk_dir, config.remote_dir
            if count > 1:
                folder /= f"worker-{worker_id}"
                remote_dir = remote_dir and f"{remote_dir}/{folder.name}"
            own = msgspec.structs.replace(config, disk_dir=str(folder), remote_dir=remote_dir)
            engine = await stack.enter_async_context(
                open_engine(own, disk_dir=folder, run_sync=run_sync)
            )
            node = Node(
                own,
                "worker",
                engine,
                port_start=port_start,
                worker_id=worker_id,
                world_size=count,
            )
            nodes.append(node)
        scheduler = Node(config, "scheduler", None, port_start=port_start, world_size=count)
        yield Nodes(scheduler, nodes)


async def serve_engine(
    host: str,
    port: int,
    workers: int,
    config: Embedded,
    *,
    disk_dir: Path,
    serve: ServeApp,
    run_sync: RunSync = trio.to_thread.run_sync,
    task_status: trio.TaskStatus[list[int]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve a scheduler on `port` and its workers on the ports after it, until `serve` returns.

    With port 0 each takes a free one. Says which ports those are, the scheduler's first, when
    all let clients in. What was to be written is written when this returns. As with every
    nursery, errors come out in a group: a ConfigError among them says what cannot be used.
    """
    async with (
        open_nodes(
            config, disk_dir=disk_dir, workers=workers, port_start=port, run_sync=run_sync
        ) as nodes,
        trio.open_nursery() as nursery,
    ):
        everyone = [nodes.scheduler, *nodes.workers]
        for node, app in reversed(list(zip(everyone, nodes.apps(), strict=True))):
            # The scheduler comes last: when its port answers, all do.
            wanted = node.port if port else 0
            node.port = await nursery.start(partial(serve, app, host, wanted))
        task_status.started([node.port for node in everyone])
