"""The HTTP face of the embedded engine: an app that answers like LMCache's internal API.

The `/memory/*` routes are those of a real worker, error bodies included. The `/engine/*` routes
are this project's own: through them an inference engine, or a test in its place, stores and
retrieves. Each group of routes is one function; `create_app` lists them.
"""

from __future__ import annotations

import logging
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta
from quart import Response, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from ramakv.errors import BackendUnavailableError
from ramakv.lmcache.embedded.engine import Engine

BODY_BYTES_MAX = 64 * 1024 * 1024
CHUNKS_PER_CALL_MAX = 1_000_000
HASH_CHARS_MAX = 1024

_HASHES_REQUIRED = "chunk_hashes is required"
_HASHES_AND_ID_REQUIRED = "chunk_hashes and lookup_id are required"

_log = logging.getLogger(__name__)

ChunkHash = Annotated[str, Meta(min_length=1, max_length=HASH_CHARS_MAX)]
LookupId = str | Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class ChunksBody(msgspec.Struct, kw_only=True):
    """Body of most routes. Absent, null and empty are all answered with 400."""

    chunk_hashes: Annotated[list[ChunkHash], Meta(max_length=CHUNKS_PER_CALL_MAX)] | None = None


class PrefetchBody(ChunksBody, kw_only=True):
    """Body of a prefetch."""

    lookup_id: LookupId | None = None


class EvictBody(ChunksBody, kw_only=True):
    """Body of an evict. Null locations are all of them."""

    locations: list[str] | None = None


B = TypeVar("B", bound=ChunksBody)

_chunks_decoder = msgspec.json.Decoder(ChunksBody)
_prefetch_decoder = msgspec.json.Decoder(PrefetchBody)
_evict_decoder = msgspec.json.Decoder(EvictBody)


class _RefusedError(Exception):
    """The request is answered with this status and error."""

    def __init__(self, status: int, error: str) -> None:
        super().__init__(error)
        self.status = status


def create_app(engine: Engine) -> QuartTrio:
    """Return the app that answers for this engine. The engine must outlive its server."""
    app = QuartTrio(__name__, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = BODY_BYTES_MAX
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
    _add_memory_routes(app, engine)
    _add_engine_routes(app, engine)
    _add_error_handlers(app)
    return app


def _add_memory_routes(app: QuartTrio, engine: Engine) -> None:
    @app.post("/memory/prefetch")
    async def prefetch() -> Response:
        body = await _read_body(_prefetch_decoder)
        if not body.chunk_hashes or not body.lookup_id:
            raise _RefusedError(400, _HASHES_AND_ID_REQUIRED)
        return _reply(engine.prefetch(body.chunk_hashes, body.lookup_id))

    @app.post("/memory/evict")
    async def evict() -> Response:
        body = await _read_body(_evict_decoder)
        return _reply(await engine.evict(_hashes(body), body.locations))

    @app.post("/memory/query")
    async def query() -> Response:
        body = await _read_body(_chunks_decoder)
        return _reply(engine.query(_hashes(body)))


def _add_engine_routes(app: QuartTrio, engine: Engine) -> None:
    @app.post("/engine/store")
    async def store() -> Response:
        body = await _read_body(_chunks_decoder)
        return _reply(await engine.store(_hashes(body)))

    @app.post("/engine/retrieve")
    async def retrieve() -> Response:
        body = await _read_body(_chunks_decoder)
        return _reply(await engine.retrieve(_hashes(body)))

    @app.get("/engine/stats")
    async def stats() -> Response:
        return _reply(engine.statistics())


def _add_error_handlers(app: QuartTrio) -> None:
    @app.errorhandler(_RefusedError)
    async def refused(error: _RefusedError) -> Response:
        return _reply({"error": str(error)}, error.status)

    @app.errorhandler(BackendUnavailableError)
    async def unavailable(error: BackendUnavailableError) -> Response:
        response = _reply({"error": str(error)}, 503)
        response.headers["Retry-After"] = "1"
        return response

    @app.errorhandler(HTTPException)
    async def http_error(error: HTTPException) -> Response:
        response = _reply({"detail": error.name}, error.code or 500)
        for name, value in error.get_headers():
            if name == "Allow":
                response.headers[name] = value
        return response

    @app.errorhandler(Exception)
    async def fault(error: Exception) -> Response:
        _log.error("cannot answer %s %s", request.method, request.path, exc_info=error)
        return _reply({"error": "internal error"}, 500)


async def _read_body(decoder: msgspec.json.Decoder[B]) -> B:
    """Decode the body, whatever its content type; one that cannot be is a 500, as in LMCache."""
    data = await request.get_data(cache=False, as_text=False, parse_form_data=False)
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as exc:
        raise _RefusedError(500, str(exc)) from exc
    except RecursionError as exc:
        raise _RefusedError(500, "the body is nested too deeply") from exc


def _hashes(body: ChunksBody) -> list[str]:
    if not body.chunk_hashes:
        raise _RefusedError(400, _HASHES_REQUIRED)
    return body.chunk_hashes


def _reply(answer: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(answer), status, content_type="application/json")
