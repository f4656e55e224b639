"""Routes of what operators switch: freeze, the hot cache, bypassed backends."""

from __future__ import annotations

from quart import Response, request
from quart_trio import QuartTrio

from ramakv.lmcache.embedded.engine import Engine
from ramakv.lmcache.embedded.node import Node
from ramakv.lmcache.embedded.replies import refuse, reply

_HOT_CACHE_UNAVAILABLE = "hot_cache API is unavailable"
_BYPASS_UNAVAILABLE = "Bypass API is unavailable"


def add_freeze_routes(app: QuartTrio, node: Node) -> None:
    """Add `/freeze/*`: nothing is stored, and only the hot tier is read."""

    def answer(engine: Engine, word: str) -> Response:
        frozen = engine.switches.frozen
        return reply({"status": "success", "freeze": frozen, "message": f"Freeze mode {word}"})

    @app.put("/freeze/enable")
    async def enable_freeze() -> Response:
        engine = node.engine_or_refuse("/freeze/enable API is unavailable")
        engine.switches.frozen = True
        return answer(engine, "enabled successfully")

    @app.put("/freeze/disable")
    async def disable_freeze() -> Response:
        engine = node.engine_or_refuse("/freeze/disable API is unavailable")
        engine.switches.frozen = False
        return answer(engine, "disabled successfully")

    @app.get("/freeze/status")
    async def freeze_status() -> Response:
        engine = node.engine_or_refuse("/freeze/status API is unavailable")
        return answer(engine, "is enabled" if engine.switches.frozen else "is disabled")


def add_hot_cache_routes(app: QuartTrio, node: Node) -> None:
    """Add `/hot_cache/*`: disabled, the hot tier is empty and nothing enters it."""

    def answer(engine: Engine, word: str) -> Response:
        enabled = engine.switches.hot_cache
        return reply({"status": "success", "hot_cache": enabled, "message": f"Hot cache {word}"})

    @app.put("/hot_cache/enable")
    async def enable_hot_cache() -> Response:
        engine = node.engine_or_refuse(_HOT_CACHE_UNAVAILABLE)
        engine.switches.hot_cache = True
        return answer(engine, "enabled successfully")

    @app.put("/hot_cache/disable")
    async def disable_hot_cache() -> Response:
        engine = node.engine_or_refuse(_HOT_CACHE_UNAVAILABLE)
        engine.disable_hot_cache()
        return answer(engine, "disabled successfully")

    @app.get("/hot_cache/status")
    async def hot_cache_status() -> Response:
        engine = node.engine_or_refuse(_HOT_CACHE_UNAVAILABLE)
        return answer(engine, "is enabled" if engine.switches.hot_cache else "is disabled")


def add_bypass_routes(app: QuartTrio, node: Node) -> None:
    """Add `/bypass/*`: a bypassed backend is left out of contains, put and get."""

    @app.get("/bypass/list")
    async def bypass_list() -> Response:
        switches = node.engine_or_refuse(_BYPASS_UNAVAILABLE).switches
        return reply(
            {
                "status": "success",
                "bypassed_backends": switches.bypassed,
                "all_backends": switches.locations,
            }
        )

    @app.put("/bypass/add")
    async def bypass_add() -> Response:
        switches = node.engine_or_refuse(_BYPASS_UNAVAILABLE).switches
        name = _backend_name(switches.locations)
        was = switches.bypass(name)
        return reply(
            {
                "status": "success",
                "backend_name": name,
                "bypassed": True,
                "was_already_bypassed": was,
                "bypassed_backends": switches.bypassed,
            }
        )

    @app.put("/bypass/remove")
    async def bypass_remove() -> Response:
        switches = node.engine_or_refuse(_BYPASS_UNAVAILABLE).switches
        name = _backend_name(switches.locations)
        was = switches.restore(name)
        return reply(
            {
                "status": "success",
                "backend_name": name,
                "bypassed": False,
                "was_bypassed": was,
                "bypassed_backends": switches.bypassed,
            }
        )


def _backend_name(locations: tuple[str, ...]) -> str:
    name = request.args.get("backend_name")
    if not name:
        raise refuse(400, "Missing parameter", "backend_name is required")
    if name not in locations:
        message = f"Backend '{name}' not found. Available: {list(locations)}"
        raise refuse(400, "Unknown backend", message)
    return name
