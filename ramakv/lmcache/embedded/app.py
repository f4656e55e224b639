"""The HTTP face of the embedded engine: apps that answer like LMCache's internal API.

    create_app            a lone engine: everything on one port
    create_worker_app     one worker of several
    create_scheduler_app  in front of workers: forwards `/memory/*`, has no engine of its own

The `/memory/*` routes are those of a real worker, error bodies included. The `/engine/*` routes
are this project's own: through them an inference engine, or a test in its place, stores and
retrieves. The other routes, each topic in a module of its own, follow LMCache's document.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from quart import Response, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from ramakv.errors import BackendUnavailableError
from ramakv.lmcache.embedded.calls import CALLS, HASH_CHARS_MAX, Call, chunks_of
from ramakv.lmcache.embedded.engine import Engine
from ramakv.lmcache.embedded.forwarding import WorkersFailedError, forward
from ramakv.lmcache.embedded.metrics import CONTENT_TYPE, prometheus_text
from ramakv.lmcache.embedded.node import MODEL_NAME, Node
from ramakv.lmcache.embedded.replies import RefusedError, body_bytes, reply
from ramakv.lmcache.embedded.routes_cache import add_cache_routes, add_load_routes
from ramakv.lmcache.embedded.routes_conf import add_conf_routes, add_version_routes
from ramakv.lmcache.embedded.routes_control import (
    add_bypass_routes,
    add_freeze_routes,
    add_hot_cache_routes,
)
from ramakv.lmcache.embedded.routes_kvcache import add_kvcache_routes
from ramakv.lmcache.embedded.routes_lookup import add_lookup_routes, add_statistics_routes
from ramakv.lmcache.embedded.wedge import ObservedError

__all__ = [
    "BODY_BYTES_MAX",
    "HASH_CHARS_MAX",
    "create_app",
    "create_scheduler_app",
    "create_worker_app",
]

BODY_BYTES_MAX = 64 * 1024 * 1024
SCHEDULER_PORT = 6999

_log = logging.getLogger(__name__)


def create_app(engine: Engine, *, port: int = SCHEDULER_PORT) -> QuartTrio:
    """Return the app that answers for this engine alone. The engine must outlive its server."""
    return create_worker_app(Node(engine.config, "scheduler", engine, port_start=port))


def create_worker_app(node: Node) -> QuartTrio:
    """Return the app of a node that has an engine. The engine must outlive its server."""
    app = _new_app(node)
    for path, (method, call) in CALLS.items():
        _add_call(app, path, method, _local(node, call))
    return app


def create_scheduler_app(node: Node, workers: Sequence[Node]) -> QuartTrio:
    """Return the app of a scheduler in front of these workers, in this process."""
    app = _new_app(node)
    for path, (method, _) in CALLS.items():
        _add_call(app, path, method, _forwarded(node, workers, path))
    return app


def _new_app(node: Node) -> QuartTrio:
    app = QuartTrio(__name__, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = BODY_BYTES_MAX
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False

    @app.before_request
    async def enter() -> None:
        await node.enter()

    for add_routes in (
        add_version_routes,
        add_conf_routes,
        add_cache_routes,
        add_load_routes,
        add_kvcache_routes,
        add_freeze_routes,
        add_hot_cache_routes,
        add_bypass_routes,
        add_lookup_routes,
        add_statistics_routes,
        _add_metrics_route,
    ):
        add_routes(app, node)
    _add_error_handlers(app)
    return app


Answer = Callable[[bytes], Awaitable[object]]


def _local(node: Node, call: Call) -> Answer:
    return lambda data: call(node, data)


def _forwarded(node: Node, workers: Sequence[Node], path: str) -> Answer:
    async def answer(data: bytes) -> object:
        if node.statistics.started:
            node.record_chunks(chunks_of(data))
        return await forward(node, workers, path, data)

    return answer


def _add_call(app: QuartTrio, path: str, method: str, answer: Answer) -> None:
    async def route() -> Response:
        return reply(await answer(await body_bytes()))

    app.add_url_rule(path, path, route, methods=[method])


def _add_metrics_route(app: QuartTrio, node: Node) -> None:
    @app.get("/metrics")
    async def metrics() -> Response:
        labels = {
            "model_name": MODEL_NAME,
            "role": node.role,
            "worker_id": str(node.worker_id),
        }
        text = "" if node.engine is None else prometheus_text(node.engine, labels)
        return Response(text, content_type=CONTENT_TYPE)


def _add_error_handlers(app: QuartTrio) -> None:
    @app.errorhandler(RefusedError)
    async def refused(error: RefusedError) -> Response:
        return reply(error.body, error.status)

    @app.errorhandler(ObservedError)
    async def observed(error: ObservedError) -> Response:
        return reply({"error": str(error)}, 500)

    @app.errorhandler(WorkersFailedError)
    async def workers_failed(error: WorkersFailedError) -> Response:
        what = "Some workers failed to process request"
        return reply({"error": what, "failures": error.failures}, 500)

    @app.errorhandler(BackendUnavailableError)
    async def unavailable(error: BackendUnavailableError) -> Response:
        response = reply({"error": str(error)}, 503)
        response.headers["Retry-After"] = "1"
        return response

    @app.errorhandler(HTTPException)
    async def http_error(error: HTTPException) -> Response:
        response = reply({"detail": error.name}, error.code or 500)
        for name, value in error.get_headers():
            if name == "Allow":
                response.headers[name] = value
        return response

    @app.errorhandler(Exception)
    async def fault(error: Exception) -> Response:
        _log.error("cannot answer %s %s", request.method, request.path, exc_info=error)
        return reply({"error": "internal error"}, 500)
