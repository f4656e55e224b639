"""An ASGI app made when it is first needed: importing Quart takes as long as all the rest."""

from __future__ import annotations

from collections.abc import Callable

import trio
from hypercorn.typing import ASGIFramework, ASGIReceiveCallable, ASGISendCallable, Scope


class LazyApp:
    """Stands for an app until the first request for it; loads it in a thread."""

    def __init__(self, load: Callable[[], ASGIFramework]) -> None:
        self._load = load
        self._app: ASGIFramework | None = None
        self._loading = trio.Lock()

    async def load(self) -> ASGIFramework:
        """Make the app, once; the event loop goes on meanwhile."""
        async with self._loading:
            if self._app is None:
                self._app = await trio.to_thread.run_sync(self._load)
        return self._app

    async def __call__(
        self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        """Serve one request, or the lifespan, which nobody here has a use for."""
        if scope["type"] == "lifespan":
            await _serve_lifespan(receive, send)
            return
        app = self._app or await self.load()
        await app(scope, receive, send)


async def _serve_lifespan(receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
    await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await send({"type": "lifespan.shutdown.complete"})
