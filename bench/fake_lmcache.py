"""An LMCache that does nothing: at once, after so many seconds, or never.

    python -m bench.fake_lmcache PORT SECONDS        (SECONDS may be inf)

It answers the calls of the daemon, and tells at /counts what it was asked.
"""

from __future__ import annotations

import sys
from collections import Counter

import hypercorn.trio
import trio
from hypercorn.config import Config
from quart import request
from quart_trio import QuartTrio


def create_app(seconds: float) -> QuartTrio:
    """Return an app whose calls take so many seconds."""
    app = QuartTrio(__name__, static_folder=None)
    counts: Counter[str] = Counter()

    @app.post("/memory/<call>")
    async def answer(call: str) -> dict[str, object]:
        counts[f"{call}_calls"] += 1
        counts[f"{call}_chunks"] += len((await request.get_json())["chunk_hashes"])
        await trio.sleep(seconds)
        if call == "query":
            return {}
        return {"status": "success" if call == "evict" else "prefetch_started"}

    @app.post("/counts")
    async def tell() -> dict[str, int]:
        return dict(counts)

    return app


def main() -> None:
    config = Config()
    config.bind = [f"127.0.0.1:{sys.argv[1]}"]
    trio.run(hypercorn.trio.serve, create_app(float(sys.argv[2])), config)


if __name__ == "__main__":
    main()
