"""Routes that move the KV of tokens in and out of the tiers: clear, store, retrieve, load."""

from __future__ import annotations

from quart import Response, request
from quart_trio import QuartTrio

from ramakv.errors import BackendUnavailableError
from ramakv.lmcache.embedded.fs_chunks import (
    ConfigFileError,
    NoRemoteError,
    load_fs_chunks,
)
from ramakv.lmcache.embedded.hashing import parse_tokens_mock
from ramakv.lmcache.embedded.node import Node
from ramakv.lmcache.embedded.replies import (
    RefusedError,
    body_bytes,
    body_count,
    body_text,
    decode_object,
    refuse,
    reply,
)

FAILED_KEYS_MAX = 10
"""How many failed keys a load reports unless it is told otherwise."""

_UNAVAILABLE = "LMCache API is unavailable"


def add_cache_routes(app: QuartTrio, node: Node) -> None:
    """Add `/cache/clear`, `/cache/store` and `/cache/retrieve`."""

    @app.delete("/cache/clear")
    async def clear() -> Response:
        engine = node.engine_or_refuse(_UNAVAILABLE)
        if data := await body_bytes():  # request_configs, which nothing here looks at
            decode_object(data)
        removed = await engine.clear(request.args.getlist("locations") or None)
        if node.observed:
            removed *= node.config.chunk_size
        return reply({"status": "success", "num_removed": removed})

    @app.post("/cache/store")
    async def store() -> Response:
        cache = node.token_cache_or_refuse()
        tokens = _tokens()
        try:
            await cache.store(tokens)
        except BackendUnavailableError as error:
            raise _failed("store", error) from error
        return reply({"status": "success", "num_tokens": len(tokens)})

    @app.post("/cache/retrieve")
    async def retrieve() -> Response:
        cache = node.token_cache_or_refuse()
        tokens = _tokens()
        if node.observed and node.conf["enable_async_loading"]:
            event = "Event cache_api_retrieve of type EventType.LOADING is not done or not found."
            raise _failed("retrieve", AssertionError(event))
        try:
            retrieved = await cache.retrieve(tokens)
        except BackendUnavailableError as error:
            raise _failed("retrieve", error) from error
        return reply({"status": "success", "num_tokens": len(tokens), "num_retrieved": retrieved})


def add_load_routes(app: QuartTrio, node: Node) -> None:
    """Add `/cache/load-fs-chunks`."""

    @app.post("/cache/load-fs-chunks")
    async def load() -> Response:
        engine = node.engine_or_refuse("/cache/load-fs-chunks API is unavailable")
        body = decode_object(await body_bytes())
        config_path = body_text(body, "config_path")
        max_chunks = body_count(body, "max_chunks", None)
        max_failed_keys = body_count(body, "max_failed_keys", FAILED_KEYS_MAX)
        try:
            loaded = await load_fs_chunks(engine, config_path, max_chunks)
        except ConfigFileError as error:
            if node.observed:
                detail = f"Invalid configuration file: {error.detail}"
                raise RefusedError(400, {"detail": detail}) from error
            raise _not_loaded(400, str(error), config_path) from error
        except NoRemoteError as error:
            if node.observed:
                detail = f"Failed to initialize RemoteBackend: {error}"
                raise RefusedError(500, {"detail": detail}) from error
            raise _not_loaded(400, str(error), config_path) from error
        except OSError as error:
            raise _not_loaded(500, str(error), config_path) from error
        return reply(
            {
                "status": "success",
                "loaded_chunks": loaded.chunks,
                "total_files": loaded.files,
                "failed_keys": loaded.failed_keys[:max_failed_keys],
                "config_path": config_path,
            }
        )


def _tokens() -> range:
    text = request.args.get("tokens_mock")
    if text is None:
        message = "Must specify either tokens_input or tokens_mock"
        raise refuse(400, "Missing parameters", message)
    try:
        return parse_tokens_mock(text)
    except ValueError as error:
        message = f"tokens_mock must be 'start,end': {error}"
        raise refuse(400, "Invalid tokens_mock format", message) from error


def _failed(operation: str, error: Exception) -> RefusedError:
    body = {
        "error": f"Failed to {operation} cache",
        "message": str(error),
        "exception_type": type(error).__name__,
    }
    return RefusedError(500, body)


def _not_loaded(status: int, message: str, config_path: str) -> RefusedError:
    body = {
        "error": "Failed to load chunks from FSConnector",
        "message": message,
        "config_path": config_path,
    }
    return RefusedError(status, body)
