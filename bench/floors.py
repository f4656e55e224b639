"""The floors: what the web stack alone can do, with no service behind it.

    python -m bench.floors quart|asgi PORT REPLIES

Both decode the body as the daemon does and return a constant: the bytes in the JSON file
REPLIES, {path: reply}. `quart` is a bare Quart-Trio handler, `asgi` a bare ASGI callable; both
run on stock Hypercorn, which only is told never to part from a client.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import hypercorn.trio
import msgspec
import trio
from hypercorn.config import Config
from quart import Response, request
from quart_trio import QuartTrio

from ramakv.events import AnyEvent

decode = msgspec.json.Decoder(AnyEvent).decode
Replies = dict[str, bytes]


def quart_app(replies: Replies) -> QuartTrio:
    """Return the Quart-Trio app."""
    app = QuartTrio(__name__, static_folder=None)

    def view(reply: bytes) -> Callable[[], Awaitable[Response]]:
        async def answer() -> Response:
            decode(await request.get_data())
            return Response(reply, content_type="application/json")

        return answer

    for path, reply in replies.items():
        app.add_url_rule(path, path, view(reply), methods=["POST"])
    return app


def asgi_app(replies: Replies) -> Callable[..., Awaitable[None]]:
    """Return the ASGI callable."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for _ in range(2):
                phase = (await receive())["type"]
                await send({"type": f"{phase}.complete"})
            return
        parts = []
        while True:
            message = await receive()
            parts.append(message["body"])
            if not message["more_body"]:
                break
        decode(b"".join(parts))
        reply = replies[scope["path"]]
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(reply))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": reply, "more_body": False})

    return app


def main() -> None:
    kind, port, replies_path = sys.argv[1:]
    replies = {
        path: reply.encode() for path, reply in json.loads(Path(replies_path).read_text()).items()
    }
    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    config.backlog = 4096
    config.keep_alive_max_requests = 2**62
    app: Any = quart_app(replies) if kind == "quart" else asgi_app(replies)
    trio.run(hypercorn.trio.serve, app, config)


if __name__ == "__main__":
    main()
